"""Random block masks for tests, as patterns make them: the diagonal is always set."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine.core.view import BlockMask


def random_mask(
    queries: int,
    lens: list[int],
    heads: int,
    block: int,
    offset: int,
    device: str = "cpu",
    keep: float = 0.4,
    alike: bool = False,
) -> BlockMask:
    """A mask of one span whose rows have these lengths, one or one per KV head."""
    rows, columns = -(-(offset + queries) // block), -(-max(lens) // block)
    mask = torch.rand(1 if alike else heads, rows, columns) < keep
    for head in range(mask.shape[0]):
        length = lens[head * len(lens) // mask.shape[0]]
        first, last = own_slots(queries, length, block, offset, rows)
        column = torch.arange(columns)
        reached = (column[None] * block <= last) & ((column[None] + 1) * block > first)
        mask[head] = (mask[head] | reached) & (column[None] * block <= last)
    return BlockMask(mask.to(device), block, offset)


def own_slots(
    queries: int, length: int, block: int, offset: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Row slots [rows, 1] of the first and of the last query of each block."""
    row = torch.arange(rows)[:, None]
    first = (row * block - offset).clamp_min(0)
    last = ((row + 1) * block - offset).clamp_max(queries) - 1
    return first + length - queries, last + length - queries
