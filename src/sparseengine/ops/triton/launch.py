"""Host facts that launches are sized by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 under the interpreter, which runs on the host."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch shape of an attention kernel: keys and (query, head) pairs per tile, warps, stages."""

    keys: int
    pairs: int = 16
    warps: int = 4
    stages: int = 3

    def bytes(self, row_bytes: int) -> int:
        """Shared memory: a tile of queries and `stages` tiles of keys and values."""
        return row_bytes * self.pairs // 2 + row_bytes * self.keys * self.stages

    def fitted(self, row_bytes: int, limit_bytes: int) -> Tuning:
        """The same with fewer stages, then smaller tiles, until it fits. row_bytes: one K and V."""
        best = self
        while best.bytes(row_bytes) > limit_bytes and (best.stages > 1 or best.keys > 16):
            if best.stages > 2 or (best.stages > 1 and best.keys <= 32):
                best = replace(best, stages=best.stages - 1)
            else:
                best = replace(best, keys=best.keys // 2, pairs=max(16, best.pairs // 2))
        return best


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one program may take; the interpreter knows no bound."""
    if device.type != "cuda":
        return 1 << 30
    props = torch.cuda.get_device_properties(device)
    return int(props.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 inputs are multiplied as fp32, never rounded to tf32: results equal the twins'."""
    return "ieee" if dtype == torch.float32 else "tf32"
