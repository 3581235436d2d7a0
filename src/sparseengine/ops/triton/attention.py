# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""Paged attention over ragged rows: split-KV decode, prefill, and the merge of decode splits.

Both kernels see one segment of keys. `lens` are its rows' lengths; `total` and `base` place it in
the whole row when a view has several segments (base: keys in older segments). They write
normalised outputs with their log-sum-exp, so that segments and splits merge exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseengine.core.view import PackedTable
from sparseengine.ops.triton.keys import Keys, row_place, row_table
from sparseengine.ops.triton.launch import (
    Tuning,
    dot_precision,
    multiprocessors,
    shared_memory_bytes,
)
from sparseengine.ops.tuned import launch_shape

_LOG2E = 1.4426950408889634
_MIN_SPLIT_TOKENS = 256  # shorter splits cost more in the merge than they win
_MAX_SPLIT_TOKENS = 2048  # longer ones let one long row set the pace of a batch
_MAX_SPLITS = 256
_PROGRAMS_PER_SM = 4


DECODE = Tuning(keys=64)
PREFILL = Tuning(keys=128, pairs=128, warps=8, stages=2)
PREFILL_WIDE = Tuning(keys=32, pairs=64, stages=2)  # fp32, or more than 128 channels
PREFILL_SHORT = Tuning(keys=64, pairs=64)  # spans of few queries


def plan_splits(rows: int, max_len: int, processors: int) -> tuple[int, int]:
    """(splits per row, fewest tokens of a split) from host facts.

    rows: spans x KV heads. A split is as long as filling the device with rows of max_len tokens
    allows, within bounds. The kernel cuts each row by its own length, so that a short row takes few
    splits and a long row among short ones does not set the pace.
    """
    fill = -(-_PROGRAMS_PER_SM * processors // max(rows, 1))
    tokens = min(max(-(-max_len // fill), _MIN_SPLIT_TOKENS), _MAX_SPLIT_TOKENS)
    return max(1, min(-(-max_len // tokens), _MAX_SPLITS)), tokens


def capped(scale: float, softcap: float) -> tuple[float, float]:
    """(factor of q.k, bound) as `soft_cap` takes them, from a layer's scale and cap (0: none)."""
    if not softcap:
        return scale * _LOG2E, 0.0
    return 2 * scale / softcap * _LOG2E, softcap * _LOG2E


@triton.jit
def soft_cap(s, factor, bound, SOFTCAP: tl.constexpr):
    """Products q.k -> logits in log2 units; with SOFTCAP bound * tanh(q.k * scale / cap)."""
    s = s * factor
    if SOFTCAP:
        s = bound - 2 * bound / (tl.exp2(s) + 1)
    return s


@triton.jit
def _tile(
    x, k, v, table, n0, bound, visible, first_seen, peak, norm, acc, scale, cap,
    k_sn, k_sp, v_sn, v_sp,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VDIM: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to row slots n0.. of one tile; online softmax in log2 units.

    MASK 0: every query sees the whole tile. 1: all see the slots below `bound`, at least one.
    2: a query sees [first_seen, visible), all of it below `bound`; it may see nothing of the tile.
    Slots at and past `bound` are never read.
    """
    n = n0 + tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    ok = n < bound
    page = tl.load(table + n // PAGE, mask=ok, other=0).to(tl.int64)  # pools exceed 2^31 elements
    k_at = page * k_sn + (n % PAGE) * k_sp
    v_at = page * v_sn + (n % PAGE) * v_sp
    if MASK > 0 or DIM != BLOCK_D:
        keys = tl.load(
            k + k_at[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0
        )
    else:
        keys = tl.load(k + k_at[:, None] + d[None, :])
    s = soft_cap(tl.dot(x, tl.trans(keys), input_precision=PRECISION), scale, cap, SOFTCAP)
    if MASK == 1:
        s = tl.where(ok[None, :], s, float("-inf"))
    if MASK == 2:
        seen = (n[None, :] < visible[:, None]) & (n[None, :] >= first_seen[:, None])
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(peak, tl.max(s, 1))
    ref = new
    if MASK == 2:
        ref = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - ref[:, None])
    alpha = tl.exp2(peak - ref)
    norm = norm * alpha + tl.sum(p, 1)
    if MASK > 0 or VDIM != BLOCK_V:
        values = tl.load(
            v + v_at[:, None] + dv[None, :], mask=ok[:, None] & (dv < VDIM)[None, :], other=0.0
        )
    else:
        values = tl.load(v + v_at[:, None] + dv[None, :])
    acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    return new, norm, acc


# Numbers and addresses that change from step to step: a variant of the kernel for each of their
# alignments would be compiled in the middle of serving.
_VARYING = ["first_row", "table_ss", "table_sg", "lens_ss", "lens_sg", "window"]
_VARYING_POINTERS = ["table", "starts", "widths", "lens", "total", "base", "cu_q"]


@triton.jit(
    do_not_specialize=[*_VARYING, "splits", "split_tokens", "first_split", "all_splits"],
    do_not_specialize_on_alignment=_VARYING_POINTERS[:-1],
)
def _decode_kernel(
    q, k, v, table, starts, widths, first_row, table_ss, table_sg, lens, total, base, out, lse,
    scale, cap, window, splits, split_tokens, first_split, all_splits,
    q_st, q_sh, k_sn, k_sh, k_sp, v_sn, v_sh, v_sp, lens_ss, lens_sg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VDIM: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, PACKED: tl.constexpr, POOL_HEADS: tl.constexpr,
    MULTI: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one row for its query group. out [S, Hq, splits, Dv], lse [S, Hq, splits]."""
    span, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    row = head if ROW_PER_HEAD else 0
    length, whole, before = row_place(
        lens, total, base, span, head, row, lens_ss, lens_sg, KV_HEADS, MULTI
    )
    start = 0
    if WINDOW:
        start = tl.minimum(tl.maximum(whole - window - before, 0), length)
    mine = tl.minimum(tl.cdiv(length - start, split_tokens), splits)  # splits of this row
    size = tl.cdiv(tl.cdiv(length - start, tl.maximum(mine, 1)), BLOCK_N) * BLOCK_N
    lo = start + split * size
    hi = tl.minimum(lo + size, length)

    g, d, dv = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    heads = head * GROUP + g
    to = (span * KV_HEADS * GROUP + heads) * all_splits + first_split + split
    if lo >= hi:
        # An empty split says so in its lse; its output stays unwritten and is never read.
        tl.store(lse + to, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=g < GROUP)
    else:
        x = tl.load(
            q + span * q_st + heads[:, None] * q_sh + d[None, :],
            mask=(g < GROUP)[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        table = row_table(
            table, starts, widths, first_row, table_ss, table_sg, span, row, PACKED
        )  # fmt: skip
        if POOL_HEADS:
            k += head * k_sh
            v += head * v_sh
        peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
        for n0 in range(lo, hi, BLOCK_N):
            peak, norm, acc = _tile(
                x, k, v, table, n0, hi, hi, 0, peak, norm, acc, scale, cap, k_sn, k_sp, v_sn, v_sp,
                DIM, BLOCK_D, VDIM, BLOCK_V, PAGE, BLOCK_N, 1, SOFTCAP, PRECISION,
            )  # fmt: skip
        acc = acc / norm[:, None]
        tl.store(lse + to, peak + tl.log2(norm), mask=g < GROUP)
        tl.store(
            out + to[:, None] * VDIM + dv[None, :], acc.to(out.dtype.element_ty),
            mask=(g < GROUP)[:, None] & (dv < VDIM)[None, :],
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    part, lse, out, splits, out_st, out_sh,
    Q_HEADS: tl.constexpr, VDIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one (span, query head). An empty row becomes zeros."""
    row = tl.program_id(0).to(tl.int64)
    kk, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    peak = float("-inf")
    norm = 0.0
    acc = tl.zeros([BLOCK_V], tl.float32)
    for k0 in range(0, splits, BLOCK_K):
        k = k0 + kk
        x = tl.load(lse + row * splits + k, mask=k < splits, other=float("-inf"))
        used = x > float("-inf")
        new = tl.maximum(peak, tl.max(x, 0))
        base = tl.where(new > float("-inf"), new, 0.0)
        weight = tl.exp2(x - base)
        alpha = tl.exp2(peak - base)
        y = tl.load(
            part + (row * splits + k)[:, None] * VDIM + dv[None, :],
            mask=used[:, None] & (dv < VDIM)[None, :], other=0.0,
        )  # fmt: skip
        acc = acc * alpha + tl.sum(weight[:, None] * y, 0)
        norm = norm * alpha + tl.sum(weight, 0)
        peak = new
    acc = acc / tl.where(norm > 0, norm, 1.0)
    at = (row // Q_HEADS) * out_st + (row % Q_HEADS) * out_sh + dv
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=dv < VDIM)


def paged_decode(
    q: Tensor, segments: list[Keys], out: Tensor, scale: float, window: int | None, max_len: int,
    softcap: float = 0.0,
) -> None:  # fmt: skip
    """One query per span: q [S, Hq, D] over its rows, into out [S, Hq, Dv] (every element written).

    max_len: host bound of the rows' length. Splits of all segments share one merge.
    """
    spans, q_heads, _ = q.shape
    if spans == 0:
        return
    value_dim, splits = out.shape[2], []
    for keys in segments:
        rows = spans * _kv_heads(keys)
        longest = keys.longest(max_len)
        splits.append(plan_splits(rows, longest, multiprocessors(q.device)))
    total = sum(n for n, _ in splits)
    part = torch.empty(spans, q_heads, total, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(spans, q_heads, total, dtype=torch.float32, device=q.device)
    first = 0
    for keys, plan in zip(segments, splits, strict=True):
        _launch_decode(q, keys, part, lse, (scale, softcap), window, plan, first)
        first += plan[0]
    _merge_kernel[(spans * q_heads,)](
        part, lse, out, total, *out.stride()[:2], Q_HEADS=q_heads, VDIM=value_dim,
        BLOCK_V=triton.next_power_of_2(value_dim),
        BLOCK_K=min(16, triton.next_power_of_2(total)), num_warps=1 if total <= 4 else 4,
    )  # fmt: skip


def _kv_heads(keys: Keys) -> int:
    return max(keys.groups, keys.k.shape[1])


def _block(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _fitted(tuning: Tuning, keys: Keys, channels: int) -> Tuning:
    return tuning.fitted(channels * keys.k.element_size(), shared_memory_bytes(keys.k.device))


def _kind(keys: Keys, channels: int) -> str:
    """By what launch shapes are told apart in a tuning file: a K and V row."""
    return f"{channels} channels of {keys.k.element_size()} bytes"


def _launch_decode(
    q: Tensor, keys: Keys, part: Tensor, lse: Tensor, logits: tuple[float, float],
    window: int | None, splits: tuple[int, int], first: int,
) -> None:  # fmt: skip
    spans, q_heads, dim = q.shape
    kv_heads, value_dim = _kv_heads(keys), part.shape[3]
    group = q_heads // kv_heads
    block_d, block_v = _block(dim), _block(value_dim)
    tuning = launch_shape("decode", _kind(keys, block_d + block_v), DECODE)
    tuning = _fitted(tuning, keys, block_d + block_v)
    _decode_kernel[(spans * kv_heads, splits[0])](
        q, keys.k, keys.v, *keys.place(), keys.lens, keys.total, keys.base, part, lse,
        *capped(*logits), window or 0, *splits, first, part.shape[2],
        *q.stride()[:2], *keys.k.stride()[:3], *keys.v.stride()[:3],
        *keys.lens.stride(),
        KV_HEADS=kv_heads, GROUP=group, BLOCK_G=max(16, triton.next_power_of_2(group)),
        DIM=dim, BLOCK_D=block_d, VDIM=value_dim, BLOCK_V=block_v,
        PAGE=keys.page_size, BLOCK_N=tuning.keys,
        ROW_PER_HEAD=keys.groups > 1, POOL_HEADS=keys.k.shape[1] > 1,
        PACKED=isinstance(keys.table, PackedTable),
        MULTI=keys.total is not None, WINDOW=window is not None, SOFTCAP=logits[1] != 0,
        PRECISION=dot_precision(q.dtype), num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


@triton.jit
def _walk(
    x, k, v, table, start, full, end, length, visible, first_seen, scale, cap,
    k_sn, k_sp, v_sn, v_sp,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VDIM: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Row slots [start, full), which every query sees, then [full, end) under the causal mask."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for n0 in range(start, full, BLOCK_N):
        # `length`, though all slots lie below `full`: a bound that the compiler can prove costs 7 %
        peak, norm, acc = _tile(
            x, k, v, table, n0, length, visible, first_seen, peak, norm, acc, scale, cap, k_sn,
            k_sp, v_sn, v_sp, DIM, BLOCK_D, VDIM, BLOCK_V, PAGE, BLOCK_N, 0, SOFTCAP, PRECISION,
        )  # fmt: skip
    for n0 in range(full, end, BLOCK_N):
        peak, norm, acc = _tile(
            x, k, v, table, n0, end, visible, first_seen, peak, norm, acc, scale, cap, k_sn,
            k_sp, v_sn, v_sp, DIM, BLOCK_D, VDIM, BLOCK_V, PAGE, BLOCK_N, 2, SOFTCAP, PRECISION,
        )  # fmt: skip
    return peak, norm, acc


@triton.jit
def _key_range(
    visible_first, visible_last, length, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """(start, full, end): slots a tile reads, and up to where all its queries see everything."""
    end = tl.minimum(visible_last, length)
    full = tl.maximum(tl.minimum(visible_first, length), 0) // BLOCK_N * BLOCK_N
    start = 0
    if WINDOW:
        start = tl.maximum(visible_first - window, 0) // BLOCK_N * BLOCK_N
        full = start
    return start, full, end


@triton.jit(
    do_not_specialize=[*_VARYING, "first_span"], do_not_specialize_on_alignment=_VARYING_POINTERS
)
def _prefill_kernel(
    q, k, v, table, lens, total, base, cu_q, out, lse, scale, cap, window, first_span,
    q_st, q_sh, o_st, o_sh, k_sn, k_sh, k_sp, v_sn, v_sh, v_sp,
    table_ss, table_sg, lens_ss, lens_sg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VDIM: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, POOL_HEADS: tl.constexpr, MULTI: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M (query, head of the group) pairs of one span and one KV head.

    Pair m is query m // GROUP, head m % GROUP: a tile reads each key once for the whole group.
    """
    span = (tl.program_id(2) + first_span).to(tl.int64)
    head = tl.program_id(1)
    row = head if ROW_PER_HEAD else 0
    q0 = tl.load(cu_q + span)
    queries = tl.load(cu_q + span + 1) - q0
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # longest first
    if tile < queries * GROUP:
        length, whole, before = row_place(
            lens, total, base, span, head, row, lens_ss, lens_sg, KV_HEADS, MULTI
        )
        m = tile + tl.arange(0, BLOCK_M)
        real = m < queries * GROUP
        i = m // GROUP
        token, heads = (q0 + i).to(tl.int64), head * GROUP + m % GROUP
        d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        x = tl.load(
            q + (token * q_st + heads * q_sh)[:, None] + d[None, :],
            mask=real[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        # Keys of this segment that query i sees: [first_seen, visible)
        offset = whole - queries + 1 - before
        visible = tl.minimum(offset + i, length)
        first_seen = offset + i - window if WINDOW else tl.zeros([BLOCK_M], tl.int32)
        last = tl.minimum(tile + BLOCK_M, queries * GROUP) - 1
        start, full, end = _key_range(
            offset + tile // GROUP, offset + last // GROUP, length, window, BLOCK_N, WINDOW
        )
        table += span * table_ss + row * table_sg
        if POOL_HEADS:
            k += head * k_sh
            v += head * v_sh
        peak, norm, acc = _walk(
            x, k, v, table, start, full, end, length, visible, first_seen, scale, cap,
            k_sn, k_sp, v_sn, v_sp,
            DIM, BLOCK_D, VDIM, BLOCK_V, PAGE, BLOCK_M, BLOCK_N, SOFTCAP, PRECISION,
        )  # fmt: skip
        safe = tl.where(norm > 0, norm, 1.0)
        acc = acc / safe[:, None]
        at = token * o_st + heads * o_sh
        tl.store(
            out + at[:, None] + dv[None, :], acc.to(out.dtype.element_ty),
            mask=real[:, None] & (dv < VDIM)[None, :],
        )  # fmt: skip
        if MULTI:
            value = tl.where(norm > 0, peak + tl.log2(safe), float("-inf"))
            tl.store(lse + token * KV_HEADS * GROUP + heads, value, mask=real)


def paged_prefill(
    q: Tensor,
    keys: Keys,
    cu_q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    window: int | None,
    *,
    max_q: int,
    first_span: int = 0,
    softcap: float = 0.0,
) -> None:
    """Spans first_span.. of q [T, Hq, D] over one segment, into out [T, Hq, Dv].

    cu_q: int32 [S + 1]. Causal, bottom-right. lse: fp32 [T, Hq] in log2 units, wanted when the view
    has several segments; -inf and an output of 0 where a query sees nothing of this segment.
    """
    q_heads, dim = q.shape[1:]
    value_dim, kv_heads = out.shape[2], _kv_heads(keys)
    group, spans = q_heads // kv_heads, cu_q.shape[0] - 1 - first_span
    if spans <= 0 or max_q == 0:
        return
    wide = max(dim, value_dim) > 128 or q.dtype == torch.float32
    short = max_q * group <= 64
    tuning = PREFILL_WIDE if wide else PREFILL_SHORT if short else PREFILL
    block_d, block_v = _block(dim), _block(value_dim)
    kind = _kind(keys, block_d + block_v) + (", few queries" if short else "")
    tuning = launch_shape("prefill", kind, tuning)
    tuning = _fitted(tuning, keys, block_d + block_v)
    _prefill_kernel[(triton.cdiv(max_q * group, tuning.pairs), kv_heads, spans)](
        q, keys.k, keys.v, keys.table, keys.lens, keys.total, keys.base, cu_q, out, lse,
        *capped(scale, softcap), window or 0, first_span,
        *q.stride()[:2], *out.stride()[:2], *keys.k.stride()[:3], *keys.v.stride()[:3],
        *keys.table.stride()[:2], *keys.lens.stride(),
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK_D=block_d, VDIM=value_dim, BLOCK_V=block_v,
        PAGE=keys.page_size, BLOCK_M=tuning.pairs, BLOCK_N=tuning.keys,
        ROW_PER_HEAD=keys.table.shape[1] > 1, POOL_HEADS=keys.k.shape[1] > 1,
        MULTI=keys.total is not None, WINDOW=window is not None, SOFTCAP=softcap != 0,
        PRECISION=dot_precision(q.dtype), num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
