"""Dummy weights: a model of any shipped shape without a download, to measure speed and memory."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from sparseengine.errors import ConfigError, nearest

_STD = 0.02
_PATTERN_SIZE = (1 << 20) + 7  # coprime to every usual row length, so that no two rows are alike


def shape_names() -> tuple[str, ...]:
    """Names of the shipped model shapes, for `hf_config`."""
    folder = resources.files("sparseengine.weights") / "shapes"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir()))


def shape_config(name: str) -> dict[str, Any]:
    """The config of a shipped model shape, with Hugging Face field names."""
    if name not in shape_names():
        raise ConfigError(f"unknown model shape {name!r}; {nearest(name, shape_names())}")
    file = resources.files("sparseengine.weights") / "shapes" / f"{name}.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


class DummyFill:
    """Fills parameters with seeded normal values of standard deviation 0.02, norms with ones.

    The same seed gives the same values on every device: one pattern of 2^20 + 7 values is drawn on
    the host and repeated, each parameter continuing where the last one stopped. Drawing 8 billion
    values afresh would take minutes on a CPU.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pattern = torch.randn(_PATTERN_SIZE, generator=generator) * _STD
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._at = 0

    def __call__(self, name: str, parameter: Tensor) -> None:
        if parameter.dim() == 1 and name.endswith("norm.weight"):
            parameter.fill_(1.0)
            return
        key = (parameter.device, parameter.dtype)
        if key not in self._placed:
            self._placed[key] = self._pattern.to(device=key[0], dtype=key[1])
        pattern, flat = self._placed[key], parameter.view(-1)
        total, done = flat.numel(), 0
        while done < min(total, _PATTERN_SIZE):
            count = min(total - done, _PATTERN_SIZE - self._at)
            flat[done : done + count] = pattern[self._at : self._at + count]
            self._at = (self._at + count) % _PATTERN_SIZE
            done += count
        # The rest repeats what is there: doubling it takes few copies however large the parameter.
        self._at = (self._at + total - done) % _PATTERN_SIZE
        while done < total:
            start = done % _PATTERN_SIZE
            count = min(total - done, done - start)
            flat[done : done + count] = flat[start : start + count]
            done += count
