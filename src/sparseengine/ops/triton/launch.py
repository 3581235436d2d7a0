"""Host facts that launches are sized by."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 under the interpreter, which runs on the host."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 inputs are multiplied as fp32, never rounded to tf32: results equal the twins'."""
    return "ieee" if dtype == torch.float32 else "tf32"
