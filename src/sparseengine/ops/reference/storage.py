"""Moving entries in and out of paged pools, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Slots of one row that `compact` holds outside the pool at once: bounds the scratch memory, so that
# no second copy of a long row ever exists.
_COMPACT_TILE_SLOTS = 4096


def store(pools: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    """Write this step's entries into their slots.

    pools: [N, Hs, P, D_i] each. values: [T, H, D_i] each. slots: int64 [G, T], page * P + offset;
    -1 skips the token. G = 1 with Hs = H: a slot holds all heads. G = H: every head has its own
    slot, in a page of one head (Hs = 1) or in its place of a page of all heads (Hs = H).
    """
    if slots.shape[0] == 1:
        _store_shared(pools, values, slots[0])
    else:
        _store_per_head(pools, values, slots)


def _store_shared(pools: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    page_size = pools[0].shape[2]
    token: Tensor | None = None
    if bool((slots < 0).any()):
        token = (slots >= 0).nonzero()[:, 0]
        slots = slots[token]
    at = slots // page_size, slots % page_size
    for pool, value in zip(pools, values, strict=True):
        source = value.to(pool.dtype)
        pool.transpose(1, 2)[at] = source if token is None else source[token]  # [T, H, D]


def _store_per_head(pools: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    inner, page_size = pools[0].shape[1:3]
    flat = slots.flatten()  # [G * T]
    kept: Tensor | None = None
    if bool((flat < 0).any()):
        kept = (flat >= 0).nonzero()[:, 0]
        flat = flat[kept]
    for pool, value in zip(pools, values, strict=True):
        source = value.transpose(0, 1).reshape(-1, value.shape[2]).to(pool.dtype)  # [G * T, D]
        source = source if kept is None else source[kept]
        if inner == 1 and pool.is_contiguous():
            pool.view(-1, pool.shape[3]).index_copy_(0, flat, source)
            continue
        head = torch.zeros_like(slots)
        if inner > 1:
            head += torch.arange(inner, device=slots.device)[:, None]
        head = head.flatten() if kept is None else head.flatten()[kept]
        pool[flat // page_size, head, flat % page_size] = source


def compact(pools: Sequence[Tensor], table: Tensor, mask: Tensor) -> None:
    """Move the kept slots of many rows to the front of their row, in place and in order.

    pools: [N, U, P, ...] each: payload and side tensors of slots; a page's U heads move alike.
    table: int32 [R, W] pages, private to their row. mask: bool [R, L], False past a row's length.
    Slots past the kept ones hold garbage afterwards.
    """
    page_size = pools[0].shape[2]
    target = mask.cumsum(1) - 1  # [R, L]
    moves = mask & (target != torch.arange(mask.shape[1], device=mask.device))
    for lo in range(0, mask.shape[1], _COMPACT_TILE_SLOTS):
        # Targets never lie right of their source: a tile read before it is written loses nothing.
        row, col = moves[:, lo : lo + _COMPACT_TILE_SLOTS].nonzero(as_tuple=True)
        if row.numel() == 0:
            continue
        col = col + lo
        to = target[row, col]
        src, dst = table[row, col // page_size].long(), table[row, to // page_size].long()
        for pool in pools:
            pool[dst, :, to % page_size] = pool[src, :, col % page_size]


def copy_pages(pools: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole pages: pool[dst] = pool[src]. pools [N, ...]; src, dst int64 [M], disjoint."""
    for pool in pools:
        pool[dst] = pool[src]


def gather_rows(pool: Tensor, table: Tensor, lens: Tensor, num_heads: int, max_len: int) -> Tensor:
    """Rows in slot order: [H, max_len, ...], zeros past a row's length.

    pool: [N, Hs, P, ...]. table: int32 [G, W]. lens: int32 [G]. Head h reads row h (row 0 when
    G = 1) and pool head h (head 0 when Hs = 1).
    """
    page_size = pool.shape[2]
    width = min(table.shape[1], -(-max_len // page_size))
    heads = torch.arange(num_heads, device=pool.device)
    rows = heads if table.shape[0] > 1 else torch.zeros_like(heads)
    inner = heads if pool.shape[1] > 1 else torch.zeros_like(heads)
    pages = table[:, :width].long()[rows]  # [H, W]
    data = pool[pages, inner[:, None]].flatten(1, 2)  # [H, W * P, ...]
    out = pool.new_zeros(num_heads, max_len, *pool.shape[3:])
    n = min(data.shape[1], max_len)
    valid = torch.arange(n, device=pool.device) < lens.to(pool.device)[rows][:, None]
    valid = valid.reshape(num_heads, n, *([1] * (pool.dim() - 3)))
    out[:, :n] = torch.where(
        valid, data[:, :n], torch.zeros((), dtype=pool.dtype, device=pool.device)
    )
    return out
