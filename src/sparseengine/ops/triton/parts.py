# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""Rows in order, and the merge of attention over their parts. Twins: `ops/reference/parts.py`."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_GATHERED = 64  # slots of one head that a program moves
_MERGED = 16  # queries of one head that a program merges


@triton.jit
def _gather_one(
    pool, out, page, inner, slot, head, row, inside, p_sn, p_sh, p_sp, o_st, o_sh,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    real = (d < DIM)[None, :]
    at = page * p_sn + inner * p_sh + slot * p_sp
    x = tl.load(pool + at[:, None] + d[None, :], mask=inside[:, None] & real, other=0.0)
    return out + (row * o_st + head * o_sh)[:, None] + d[None, :], x, real


@triton.jit(
    do_not_specialize=["length", "first", "rows", "table_sg"],
    do_not_specialize_on_alignment=["table"],
)
def _gather_kernel(
    pool0, pool1, out0, out1, table, length, first, rows, table_sg,
    p0_sn, p0_sh, p0_sp, p1_sn, p1_sh, p1_sp, o0_st, o0_sh, o1_st, o1_sh,
    PAGE: tl.constexpr, DIM0: tl.constexpr, DIM1: tl.constexpr,
    BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, POOL_HEADS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    slot = first + row
    inside = (slot < length) & (row < rows)
    table += head * table_sg if ROW_PER_HEAD else 0
    inner = head if POOL_HEADS else 0
    page = tl.load(table + slot // PAGE, mask=inside, other=0).to(tl.int64)
    slot = slot % PAGE
    to0, x0, real0 = _gather_one(
        pool0, out0, page, inner, slot, head, row, inside, p0_sn, p0_sh, p0_sp, o0_st, o0_sh,
        DIM0, BLOCK_D0,
    )  # fmt: skip
    to1, x1, real1 = _gather_one(
        pool1, out1, page, inner, slot, head, row, inside, p1_sn, p1_sh, p1_sp, o1_st, o1_sh,
        DIM1, BLOCK_D1,
    )  # fmt: skip
    mine = (row < rows)[:, None]
    tl.store(to0, x0, mask=mine & real0)
    tl.store(to1, x1, mask=mine & real1)


def gather_part(
    pools: Sequence[Tensor], table: Tensor, length: int, first: int, outs: Sequence[Tensor]
) -> None:
    """Slots first .. first + n of one row into outs [n, H, D_i]; slots from `length` on are 0.

    pools: [N, Hs, P, D_i], K and V. table: int32 [G, W].
    """
    (k, v), (keys, values) = pools, outs
    rows, heads = keys.shape[:2]
    _gather_kernel[(triton.cdiv(rows, _GATHERED), heads)](
        k, v, keys, values, table, length, first, rows, table.stride(0),
        *k.stride()[:3], *v.stride()[:3], *keys.stride()[:2], *values.stride()[:2],
        PAGE=k.shape[2], DIM0=k.shape[3], DIM1=v.shape[3],
        BLOCK_D0=triton.next_power_of_2(k.shape[3]), BLOCK_D1=triton.next_power_of_2(v.shape[3]),
        BLOCK_N=_GATHERED, ROW_PER_HEAD=table.shape[0] > 1, POOL_HEADS=k.shape[1] > 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_q", "l_sh", "l_sn", "to_l_sh"])
def _merge_parts_kernel(
    outs, lses, out, lse, num_q, o_st, o_sh, l_sh, l_sn, to_st, to_sh, to_l_sh,
    VDIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Some queries of one head, over a tuple of results and one of their log-sum-exps."""
    head = tl.program_id(1)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    dv = tl.arange(0, BLOCK_V)
    real = n < num_q
    mask = real[:, None] & (dv < VDIM)[None, :]
    peak = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        x = tl.load(lses[i] + head * l_sh + n * l_sn, mask=real, other=0.0)
        peak = tl.maximum(peak, x)
    norm = tl.zeros([BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    at = (n * o_st + head * o_sh)[:, None] + dv[None, :]
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses[i] + head * l_sh + n * l_sn, mask=real, other=0.0) - peak)
        norm += weight
        acc += weight[:, None] * tl.load(outs[i] + at, mask=mask, other=0.0).to(tl.float32)
    acc = acc / norm[:, None]
    to = (n * to_st + head * to_sh)[:, None] + dv[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=mask)
    if WITH_LSE:
        tl.store(lse + head * to_l_sh + n, peak + tl.log(norm), mask=real)


def merge_parts(
    outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor | None = None
) -> None:
    """Attention over all parts from outs [n, H, Dv] and fp32 lses [H, n] of each, into out and lse.

    Every query sees something of some part. Results have one set of strides, and so have the lses;
    the last stride of `lse` is 1.
    """
    num_q, heads, value_dim = out.shape
    assert all(o.stride() == outs[0].stride() for o in outs), "results in different layouts"
    assert all(x.stride() == lses[0].stride() for x in lses), "log-sum-exps in different layouts"
    _merge_parts_kernel[(triton.cdiv(num_q, _MERGED), heads)](
        tuple(outs), tuple(lses), out, lse, num_q, *outs[0].stride()[:2], *lses[0].stride(),
        *out.stride()[:2], 0 if lse is None else lse.stride(0),
        VDIM=value_dim, BLOCK_V=triton.next_power_of_2(value_dim), BLOCK_N=_MERGED,
        PARTS=len(outs), WITH_LSE=lse is not None,
    )  # fmt: skip
