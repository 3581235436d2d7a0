"""Facts about a device, by probes only: no choice is made from a device's name."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from sparseengine.core.attention import DeviceCaps


def _triton_interpreted() -> bool:
    """True when Triton runs its kernels as Python on the host."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def _probe(kind: str, index: int) -> DeviceCaps:
    has_triton = importlib.util.find_spec("triton") is not None
    interpreted = has_triton and _triton_interpreted()
    if kind != "cuda":
        return DeviceCaps(
            kind="cpu",
            memory_bytes=_host_memory_bytes(),
            has_triton=has_triton,
            interpreted=interpreted,
        )
    props = torch.cuda.get_device_properties(index)
    return DeviceCaps(
        kind="cuda",
        arch=(props.major, props.minor),
        multiprocessors=props.multi_processor_count,
        memory_bytes=props.total_memory,
        has_triton=has_triton,
        interpreted=interpreted,
        cudnn=_cudnn_version(),
    )


def _cudnn_version() -> int:
    """cuDNN's version as torch sees it, 0 where its attention is absent or switched off."""
    if not (torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()):
        return 0
    return torch.backends.cudnn.version() or 0


def device_caps(device: torch.device | str) -> DeviceCaps:
    """Probe `device` (once per process)."""
    device = torch.device(device)
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    return _probe(device.type, index or 0)
