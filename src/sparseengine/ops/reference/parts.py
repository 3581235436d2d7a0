"""Rows in order, and the merge of attention over their parts, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseengine.ops.reference.merge import merge_lse


def gather_part(
    pools: Sequence[Tensor], table: Tensor, length: int, first: int, outs: Sequence[Tensor]
) -> None:
    """Slots first .. first + n of one row into outs [n, H, D_i]; slots from `length` on are 0.

    pools: [N, Hs, P, D_i] each. table: int32 [G, W] page ids, G is 1 or H, and Hs is 1 where a page
    holds one head; every head's row has `length` tokens.
    """
    num, heads = outs[0].shape[:2]
    slot = torch.arange(first, first + num, device=table.device)
    inside = slot < length
    size = pools[0].shape[2]
    page = table[:, (slot // size).clamp_max(table.shape[1] - 1)].long()  # [G, n]
    page, slot = torch.where(inside, page, 0).expand(heads, -1), slot % size
    for pool, out in zip(pools, outs, strict=True):
        head = torch.arange(heads, device=table.device)[:, None] if pool.shape[1] > 1 else 0
        rows = pool[page, head, slot]  # [H, n, D]
        out.copy_(torch.where(inside[:, None], rows, 0).transpose(0, 1))


def merge_parts(
    outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor | None = None
) -> None:
    """Attention over all parts from outs [n, H, Dv] and lses [H, n] of each, into out and lse.

    Weights and sums are fp32 (fp64 for fp64 inputs): behind a long text the old keys' weight is
    near 1, and what 16 bits leave of 1 - weight is nothing.
    """
    wide = torch.promote_types(outs[0].dtype, torch.float32)
    whole, total = merge_lse([o.to(wide) for o in outs], [x.T.to(wide) for x in lses])
    out.copy_(whole)
    if lse is not None:
        lse.copy_(total.T)
