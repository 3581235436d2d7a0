# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""Kernels that move entries of paged pools. Twins: `ops/reference/storage.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_COMPACT_TILE = 8192  # elements a program holds in registers at once


@triton.jit
def _store_one(
    pool, value, slot, keep, token, head,
    pool_sn, pool_sh, pool_sp, value_st, value_sh,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, POOL_HEADS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    mask = keep[:, None] & (d < DIM)[None, :]
    x = tl.load(value + (token * value_st + head * value_sh)[:, None] + d[None, :], mask=mask)
    inner = head if POOL_HEADS else 0
    to = (slot // PAGE) * pool_sn + inner * pool_sh + (slot % PAGE) * pool_sp
    tl.store(pool + to[:, None] + d[None, :], x.to(pool.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "slots_sg"], do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    pool0, pool1, value0, value1, slots, num_tokens,
    p0_sn, p0_sh, p0_sp, p1_sn, p1_sh, p1_sp, v0_st, v0_sh, v1_st, v1_sh, slots_sg,
    PAGE: tl.constexpr, DIM0: tl.constexpr, DIM1: tl.constexpr,
    BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, BLOCK_T: tl.constexpr,
    SLOT_PER_HEAD: tl.constexpr, POOL_HEADS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    head = tl.program_id(1)
    row = head if SLOT_PER_HEAD else 0
    slot = tl.load(slots + row * slots_sg + token, mask=token < num_tokens, other=-1)
    keep = slot >= 0
    slot = tl.maximum(slot, 0)
    _store_one(
        pool0, value0, slot, keep, token, head, p0_sn, p0_sh, p0_sp, v0_st, v0_sh,
        PAGE, DIM0, BLOCK_D0, POOL_HEADS,
    )  # fmt: skip
    if TWO:
        _store_one(
            pool1, value1, slot, keep, token, head, p1_sn, p1_sh, p1_sp, v1_st, v1_sh,
            PAGE, DIM1, BLOCK_D1, POOL_HEADS,
        )  # fmt: skip


def _inner_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def store(pools: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    """Write [T, H, D_i] values into slots int64 [G, T] of [N, Hs, P, D_i] pools; -1 skips.

    Two pools (K and V) take one launch.
    """
    for i in range(0, len(pools), 2):
        _store_pair(pools[i : i + 2], values[i : i + 2], slots)


def _store_pair(pools: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    values = [_inner_contiguous(v) for v in values]
    slots = _inner_contiguous(slots)
    tokens, heads, _ = values[0].shape
    if tokens == 0:
        return
    p0, p1, v0, v1 = pools[0], pools[-1], values[0], values[-1]
    block_t = 16 if tokens >= 2048 else 1
    _store_kernel[(triton.cdiv(tokens, block_t), heads)](
        p0, p1, v0, v1, slots, tokens,
        *p0.stride()[:3], *p1.stride()[:3], *v0.stride()[:2], *v1.stride()[:2], slots.stride(0),
        PAGE=p0.shape[2], DIM0=p0.shape[3], DIM1=p1.shape[3],
        BLOCK_D0=triton.next_power_of_2(p0.shape[3]), BLOCK_D1=triton.next_power_of_2(p1.shape[3]),
        BLOCK_T=block_t, SLOT_PER_HEAD=slots.shape[0] > 1, POOL_HEADS=p0.shape[1] > 1,
        TWO=len(pools) > 1, num_warps=4 if block_t > 1 else 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "mask_sr"], do_not_specialize_on_alignment=["mask"])
def _kept_kernel(mask, kept, count, fixed, length, mask_sr, BLOCK: tl.constexpr):
    """One row: its kept slots in order, how many, and how many of them are in place already."""
    row = tl.program_id(0).to(tl.int64)
    done = 0
    still = 0
    for n0 in range(0, length, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        keep = tl.load(mask + row * mask_sr + n, mask=n < length, other=0) != 0
        to = done + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(kept + row * length + to, n, mask=keep)
        still += tl.sum((keep & (to == n)).to(tl.int32), 0)
        done += tl.sum(keep.to(tl.int32), 0)
    tl.store(count + row, done)
    tl.store(fixed + row, still)


@triton.jit(do_not_specialize=["length", "table_sr"], do_not_specialize_on_alignment=["table"])
def _compact_kernel(
    pool, table, kept, count, fixed, length, pool_sn, pool_sh, pool_sp, table_sr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program moves one head of one row, tile by tile: the only order that is safe in place.

    A slot never moves right, so a tile that is read in full before it is written destroys nothing
    that a later tile reads.
    """
    row = tl.program_id(0).to(tl.int64)
    base = pool + tl.program_id(1) * pool_sh
    table += row * table_sr
    e = tl.arange(0, BLOCK_E)
    stop = tl.load(count + row)
    for n0 in range(tl.load(fixed + row), stop, BLOCK_N):
        to = n0 + tl.arange(0, BLOCK_N)
        ok = to < stop
        n = tl.load(kept + row * length + to, mask=ok, other=0)
        src = tl.load(table + n // PAGE, mask=ok, other=0).to(tl.int64)
        dst = tl.load(table + to // PAGE, mask=ok, other=0).to(tl.int64)
        src = src * pool_sn + (n % PAGE) * pool_sp
        dst = dst * pool_sn + (to % PAGE) * pool_sp
        both = ok[:, None] & (e < SIZE)[None, :]
        x = tl.load(base + src[:, None] + e[None, :], mask=both)
        tl.debug_barrier()  # every warp has read before any warp writes
        tl.store(base + dst[:, None] + e[None, :], x, mask=both)
        tl.debug_barrier()


def compact(pools: Sequence[Tensor], table: Tensor, mask: Tensor) -> None:
    """Move kept slots (mask bool [R, L]) of rows (table int32 [R, W]) to their front, in order.

    One launch lists the kept slots of all rows, then one per pool moves all rows and heads.
    """
    rows, length = mask.shape
    if rows == 0 or length == 0:
        return
    table, mask = _inner_contiguous(table), _inner_contiguous(mask).view(torch.uint8)
    kept = torch.empty(rows, length, dtype=torch.int32, device=mask.device)
    count = torch.empty(rows, dtype=torch.int32, device=mask.device)
    fixed = torch.empty_like(count)
    block = min(4096, triton.next_power_of_2(length))
    _kept_kernel[(rows,)](mask, kept, count, fixed, length, mask.stride(0), BLOCK=block)
    for pool in pools:
        flat = pool.flatten(3) if pool.dim() > 3 else pool.unsqueeze(3)  # [N, U, P, E]
        if flat.data_ptr() != pool.data_ptr() or flat.stride(3) != 1:
            raise ValueError(f"a slot's entries must be contiguous, got strides {pool.stride()}")
        block_e = triton.next_power_of_2(flat.shape[3])
        block_n = max(16, min(512, _COMPACT_TILE // block_e))
        _compact_kernel[(rows, flat.shape[1])](
            flat, table, kept, count, fixed, length, *flat.stride()[:3], table.stride(0),
            PAGE=flat.shape[2], SIZE=flat.shape[3], BLOCK_E=block_e, BLOCK_N=block_n, num_warps=8,
        )  # fmt: skip


@triton.jit
def _copy_pages_kernel(pool, src, dst, stride, size, BLOCK: tl.constexpr):
    m = tl.program_id(0)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(src + m) * stride, tl.load(dst + m) * stride
    tl.store(pool + b + e, tl.load(pool + a + e, mask=e < size), mask=e < size)


def copy_pages(pools: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole pages src -> dst, int64 [M] ids, disjoint; a page must be contiguous."""
    if src.numel() == 0:
        return
    src, dst = src.contiguous(), dst.contiguous()
    for pool in pools:
        if not pool[0].is_contiguous():
            raise ValueError(f"a page must be contiguous, got strides {pool.stride()}")
        size = pool[0].numel()
        block = min(4096, triton.next_power_of_2(size))
        grid = (src.numel(), triton.cdiv(size, block))
        _copy_pages_kernel[grid](pool, src, dst, pool.stride(0), size, BLOCK=block)
