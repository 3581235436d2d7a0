# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""One query per row against every slot of the row, through its page table.

A row is cut into splits, a program each. Where a softmax is wanted, a first pass leaves the
log-sum-exp of every split, and the second one merges them. Twins: `ops/reference/slots.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseengine.core.view import PackedTable
from sparseengine.ops.triton.attention import capped, plan_splits, soft_cap
from sparseengine.ops.triton.keys import Keys, row_table
from sparseengine.ops.triton.launch import (
    Tuning,
    dot_precision,
    multiprocessors,
    shared_memory_bytes,
)
from sparseengine.ops.triton.scores import channel_block, key_tile, query_tile, wide_products

_TILE_BYTES = 1 << 14  # of keys: narrow ones, such as labels, are read many at a time
_LOG2E = 1.4426950408889634
_VARYING = [
    "first_row", "table_ss", "table_sg", "lens_ss", "lens_sg", "width", "splits", "split_tokens",
]  # fmt: skip
_VARYING_POINTERS = ["table", "starts", "widths", "lens"]


@triton.jit
def _logits(
    q, x, at, ok, k, table, n, length, factor, bound, k_sn, k_sp,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits [BLOCK_G, BLOCK_N] of a query group on row slots n."""
    if DIM > BLOCK_D:
        s = wide_products(
            q, at, ok, k, table, n, length, k_sn, k_sp,
            PAGE, DIM, BLOCK_D, BLOCK_G, BLOCK_N, PRECISION,
        )  # fmt: skip
    else:
        keys = key_tile(k, table, n, length, k_sn, k_sp, 0, PAGE, DIM, BLOCK_D)
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION)
    return soft_cap(s, factor, bound, SOFTCAP)


@triton.jit
def _merged(part, rows, splits, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr):
    """Log-sum-exp [BLOCK_G] of whole rows, in log2 units, from those of their splits."""
    g, i = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_K)
    x = tl.load(
        part + (rows * splits + i)[None, :] * GROUP + g[:, None],
        mask=(g < GROUP)[:, None] & (i < splits)[None, :], other=float("-inf"),
    )  # fmt: skip
    peak = tl.max(x, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(x - peak[:, None]), 1)
    return peak + tl.log2(tl.where(total > 0, total, 1.0))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_POINTERS)
def _lse_kernel(
    q, k, table, starts, widths, first_row, table_ss, table_sg, lens, part,
    factor, bound, splits, split_tokens,
    q_st, q_sh, k_sn, k_sh, k_sp, lens_ss, lens_sg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, PACKED: tl.constexpr, POOL_HEADS: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one row: log-sum-exp of its query group, log2 units. part [S, Hkv, splits, g]"""
    span, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    row = head if ROW_PER_HEAD else 0
    length = tl.load(lens + span * lens_ss + row * lens_sg)
    lo = tl.program_id(1) * split_tokens
    hi = tl.minimum(lo + split_tokens, length)
    table = row_table(table, starts, widths, first_row, table_ss, table_sg, span, row, PACKED)
    if POOL_HEADS:
        k += head * k_sh
    g = tl.arange(0, BLOCK_G)
    at, ok = span * q_st + (head * GROUP + g) * q_sh, g < GROUP
    x = query_tile(q, at, ok, 0, DIM, BLOCK_D)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for n0 in range(lo, hi, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        s = _logits(
            q, x, at, ok, k, table, n, hi, factor, bound, k_sn, k_sp,
            PAGE, DIM, BLOCK_D, BLOCK_G, BLOCK_N, SOFTCAP, PRECISION,
        )  # fmt: skip
        s = tl.where((n < hi)[None, :], s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, 1))
        total = total * tl.exp2(peak - new) + tl.sum(tl.exp2(s - new[:, None]), 1)
        peak = new
    lse = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    to = (span * KV_HEADS + head) * splits + tl.program_id(1)
    tl.store(part + to * GROUP + g, lse, mask=ok)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_POINTERS)
def _scores_kernel(
    q, k, table, starts, widths, first_row, table_ss, table_sg, lens, part, out, width,
    factor, bound, splits, split_tokens,
    q_st, q_sh, k_sn, k_sh, k_sp, lens_ss, lens_sg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, PACKED: tl.constexpr, POOL_HEADS: tl.constexpr,
    NORMALISE: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one row: the largest logit of the group on each slot. out [S, Hkv, width]"""
    span, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    row = head if ROW_PER_HEAD else 0
    length = tl.load(lens + span * lens_ss + row * lens_sg)
    lo = tl.program_id(1) * split_tokens
    hi = tl.minimum(lo + split_tokens, length)
    table = row_table(table, starts, widths, first_row, table_ss, table_sg, span, row, PACKED)
    if POOL_HEADS:
        k += head * k_sh
    g = tl.arange(0, BLOCK_G)
    at, ok = span * q_st + (head * GROUP + g) * q_sh, g < GROUP
    x = query_tile(q, at, ok, 0, DIM, BLOCK_D)
    lse = tl.zeros([BLOCK_G], tl.float32)
    if NORMALISE:
        lse = _merged(part, span * KV_HEADS + head, splits, GROUP, BLOCK_G, BLOCK_K)
    out += (span * KV_HEADS + head) * width
    for n0 in range(lo, hi, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        s = _logits(
            q, x, at, ok, k, table, n, hi, factor, bound, k_sn, k_sp,
            PAGE, DIM, BLOCK_D, BLOCK_G, BLOCK_N, False, PRECISION,
        )  # fmt: skip
        s = tl.where(ok[:, None], s - lse[:, None], float("-inf"))
        tl.store(out + n, tl.max(s, 0) * UNIT, mask=n < hi)


@triton.jit
def _gather_more(pool, at, ok, left, more):
    """pool[at] * left + more, in place."""
    found = tl.load(pool + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(pool + at, (found * left + more).to(pool.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=[*_VARYING, "left"], do_not_specialize_on_alignment=_VARYING_POINTERS)
def _add_mass_kernel(
    q, k, table, starts, widths, first_row, table_ss, table_sg, lens, part, mass, seen, left,
    factor, bound, splits, split_tokens,
    q_st, q_sh, k_sn, k_sh, k_sp, lens_ss, lens_sg, m_sn, m_sh, m_sp,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, PACKED: tl.constexpr, POOL_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr, COUNT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one row: what its query group pays goes to the slots, each written once."""
    span, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    row = head if ROW_PER_HEAD else 0
    length = tl.load(lens + span * lens_ss + row * lens_sg)
    lo = tl.program_id(1) * split_tokens
    hi = tl.minimum(lo + split_tokens, length)
    table = row_table(table, starts, widths, first_row, table_ss, table_sg, span, row, PACKED)
    inner = 0
    if POOL_HEADS:
        k += head * k_sh
        inner = head * m_sh
    g = tl.arange(0, BLOCK_G)
    at, ok = span * q_st + (head * GROUP + g) * q_sh, g < GROUP
    x = query_tile(q, at, ok, 0, DIM, BLOCK_D)
    lse = _merged(part, span * KV_HEADS + head, splits, GROUP, BLOCK_G, BLOCK_K)
    for n0 in range(lo, hi, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        s = _logits(
            q, x, at, ok, k, table, n, hi, factor, bound, k_sn, k_sp,
            PAGE, DIM, BLOCK_D, BLOCK_G, BLOCK_N, SOFTCAP, PRECISION,
        )  # fmt: skip
        paid = tl.sum(tl.where(ok[:, None], tl.exp2(s - lse[:, None]), 0.0), 0)
        page = tl.load(table + n // PAGE, mask=n < hi, other=0).to(tl.int64)
        to = page * m_sn + inner + (n % PAGE) * m_sp
        _gather_more(mass, to, n < hi, left, paid)
        if COUNT:
            _gather_more(seen, to, n < hi, left, tl.full([BLOCK_N], 1.0, tl.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What all kernels of this file are launched with."""

    grid: tuple[int, int]
    place: tuple[object, ...]
    strides: tuple[int, ...]
    split_tokens: int
    shape: dict[str, Any]

    @property
    def splits(self) -> int:
        return self.grid[1]


def _launch(q: Tensor, k_pool: Tensor, table: Tensor | PackedTable, lens: Tensor) -> _Launch:
    keys = Keys(k=k_pool, v=k_pool, table=table, lens=lens, page_size=k_pool.shape[2])
    spans, q_heads, dim = q.shape
    kv_heads = max(keys.groups, k_pool.shape[1])
    group = q_heads // kv_heads
    longest = keys.longest(1 << 62)
    splits, _ = plan_splits(spans * kv_heads, longest, multiprocessors(q.device))
    row_bytes = channel_block(dim) * k_pool.element_size()
    keys_held = max(64, min(256, _TILE_BYTES // row_bytes))
    tuning = Tuning(keys=keys_held).fitted(row_bytes, shared_memory_bytes(q.device))
    tokens = triton.cdiv(triton.cdiv(longest, splits), tuning.keys) * tuning.keys
    return _Launch(
        grid=(spans * kv_heads, max(1, triton.cdiv(longest, max(tokens, 1)))),
        place=keys.place(),
        strides=(*q.stride()[:2], *k_pool.stride()[:3], *lens.stride()),
        split_tokens=tokens,
        shape={
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "BLOCK_G": max(16, triton.next_power_of_2(group)),
            "DIM": dim,
            "BLOCK_D": channel_block(dim),
            "PAGE": k_pool.shape[2],
            "BLOCK_N": tuning.keys,
            "ROW_PER_HEAD": keys.groups > 1,
            "PACKED": isinstance(table, PackedTable),
            "POOL_HEADS": k_pool.shape[1] > 1,
            "PRECISION": dot_precision(q.dtype),
            "num_warps": tuning.warps,
            "num_stages": tuning.stages,
        },
    )


def _queries(q: Tensor, k_pool: Tensor) -> Tensor:
    q = q.to(k_pool.dtype)
    return q if q.stride(2) == 1 else q.contiguous()


def _split_lse(
    q: Tensor, k_pool: Tensor, lens: Tensor, how: _Launch, scale: float, softcap: float
) -> Tensor:
    """fp32 [S, Hkv, splits, g], log2 units."""
    spans, q_heads, _ = q.shape
    part = torch.empty(spans, q_heads * how.splits, dtype=torch.float32, device=q.device)
    _lse_kernel[how.grid](
        q, k_pool, *how.place, lens, part, *capped(scale, softcap), how.splits, how.split_tokens,
        *how.strides, SOFTCAP=softcap != 0, **how.shape,
    )  # fmt: skip
    return part


def slot_scores(
    q: Tensor,
    k_pool: Tensor,
    table: Tensor | PackedTable,
    lens: Tensor,
    scale: float = 1.0,
    *,
    normalise: bool = False,
) -> Tensor:
    """See the twin. Two launches when normalised, else one."""
    q = _queries(q, k_pool)
    how = _launch(q, k_pool, table, lens)
    columns = table.columns if isinstance(table, PackedTable) else table.shape[2]
    width, kv_heads = columns * k_pool.shape[2], how.shape["KV_HEADS"]
    out = torch.empty(q.shape[0], kv_heads, width, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    part = _split_lse(q, k_pool, lens, how, scale, 0.0) if normalise else None
    # Logits are in log2 units where they meet a log-sum-exp.
    factor = scale * _LOG2E if normalise else scale
    _scores_kernel[how.grid](
        q, k_pool, *how.place, lens, part, out, width, factor, 0.0, how.splits, how.split_tokens,
        *how.strides, NORMALISE=normalise, BLOCK_K=triton.next_power_of_2(how.splits),
        UNIT=1 / _LOG2E if normalise else 1.0, **how.shape,
    )  # fmt: skip
    return out


def add_mass(
    q: Tensor,
    k_pool: Tensor,
    table: Tensor | PackedTable,
    lens: Tensor,
    mass: Tensor,
    seen: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    left: float = 1.0,
) -> None:
    """See the twin. Two launches; no two programs write one slot."""
    if q.shape[0] == 0:
        return
    if seen is not None and seen.stride() != mass.stride():
        raise ValueError("mass and seen need equal strides")
    q = _queries(q, k_pool)
    how = _launch(q, k_pool, table, lens)
    part = _split_lse(q, k_pool, lens, how, scale, softcap)
    _add_mass_kernel[how.grid](
        q, k_pool, *how.place, lens, part, mass, seen, left,
        *capped(scale, softcap), how.splits, how.split_tokens, *how.strides, *mass.stride(),
        BLOCK_K=triton.next_power_of_2(how.splits), COUNT=seen is not None,
        SOFTCAP=softcap != 0, **how.shape,
    )  # fmt: skip
