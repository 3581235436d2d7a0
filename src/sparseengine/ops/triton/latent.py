# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""Paged attention over latent rows: each is read once and serves as key and as value.

All query heads share a row, so that a program takes the heads of several queries of one span as one
tile of (query, head) pairs: decode is the case of one query. Keys are cut into splits for decode
and prefill alike; the splits of all segments share one merge.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseengine.core.view import PackedTable
from sparseengine.ops.triton.attention import (
    _merge_kernel,
    capped,
    soft_cap,
)
from sparseengine.ops.triton.keys import Keys, row_place, row_table
from sparseengine.ops.triton.launch import (
    Tuning,
    dot_precision,
    multiprocessors,
    shared_memory_bytes,
)
from sparseengine.ops.tuned import launch_shape

_MAX_PAIRS = 64
_PER_PROCESSOR = 2  # programs of a multiprocessor at a time
_MIN_SPLIT_TOKENS, _MAX_SPLIT_TOKENS, _MAX_SPLITS = 256, 4096, 256
_OVERHEAD_TOKENS = 128  # what starting, ending and merging a split costs
NARROW = Tuning(keys=32, warps=4, stages=3)  # up to 32 pairs: two programs fit a multiprocessor
WIDE = Tuning(keys=64, warps=8, stages=2)


@cache
def _warpgroup_kernel(device: torch.device) -> ModuleType | None:
    """The decode kernel of warpgroup matrix instructions, where the device and Triton have them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from sparseengine.ops.triton import latent_wgmma
    except (ImportError, AttributeError):  # Gluon's names still move between versions of Triton
        return None
    return latent_wgmma


def plan_waves(programs: int, max_len: int, processors: int) -> tuple[int, int]:
    """(splits per tile, fewest tokens of a split) from host facts.

    programs: tiles of pairs without splits. A processor runs `_PER_PROCESSOR` at a time, so that
    programs come in waves; the choice is the one whose waves take the fewest tokens. Each program
    costs `_OVERHEAD_TOKENS` on top. Rows shorter than max_len take fewer splits.
    """
    slots, max_len = _PER_PROCESSOR * processors, max(max_len, 1)
    least = -(-max_len // _MAX_SPLIT_TOKENS)
    most = min(-(-max_len // _MIN_SPLIT_TOKENS), _MAX_SPLITS)

    def cost(splits: int) -> int:
        waves = -(-programs * splits // slots)
        return waves * (-(-max_len // splits) + _OVERHEAD_TOKENS)

    splits = min(range(min(least, _MAX_SPLITS), most + 1), key=cost)
    return splits, -(-max_len // splits)


@triton.jit
def _latent_tile(
    x, y, pool, page, n0, bound, visible, peak, norm, acc, scale, cap, pool_sn, pool_sp,
    VDIM: tl.constexpr, BLOCK_C: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SINGLE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to row slots n0.. of one tile; online softmax in log2 units.

    x, y: the pairs' channels in the latent space and their rotated ones. A pair sees the slots
    below `visible`, or below `bound` where the span has one query. Slots at and past `bound` are
    never read.
    """
    n = n0 + tl.arange(0, BLOCK_N)
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    ok = n < bound
    at = page.to(tl.int64) * pool_sn + (n % PAGE) * pool_sp  # pools exceed 2^31 elements
    some = ok[:, None]
    has_c = some if VDIM == BLOCK_C else some & (c < VDIM)[None, :]
    has_r = some if ROPE == BLOCK_R else some & (r < ROPE)[None, :]
    latent = tl.load(pool + at[:, None] + c[None, :], mask=has_c, other=0.0)
    rope = tl.load(pool + VDIM + at[:, None] + r[None, :], mask=has_r, other=0.0)
    s = tl.dot(x, tl.trans(latent), input_precision=PRECISION)
    s = tl.dot(y, tl.trans(rope), s, input_precision=PRECISION)
    s = soft_cap(s, scale, cap, SOFTCAP)
    seen = ok[None, :] if SINGLE else n[None, :] < visible[:, None]
    s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(peak, tl.max(s, 1))
    ref = new
    if not SINGLE:
        ref = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - ref[:, None])
    alpha = tl.exp2(peak - ref)
    norm = norm * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision=PRECISION)
    return new, norm, acc


@triton.jit
def _latent_walk(
    q, real, pool, table, lo, hi, visible, scale, cap, pool_sn, pool_sp,
    VDIM: tl.constexpr, BLOCK_C: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SINGLE: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Row slots [lo, hi) for pairs whose queries start at the pointers q [BLOCK_M]."""
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    x = tl.load(q[:, None] + c[None, :], mask=real[:, None] & (c < VDIM)[None, :], other=0.0)
    y = tl.load(q[:, None] + VDIM + r[None, :], mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    n = lo + tl.arange(0, BLOCK_N)
    page = tl.load(table + n // PAGE, mask=n < hi, other=0)
    for n0 in range(lo, hi, BLOCK_N):
        # Ids of the next tile's pages: rows whose ids are known can be fetched tiles ahead.
        n = n0 + BLOCK_N + tl.arange(0, BLOCK_N)
        ahead = tl.load(table + n // PAGE, mask=n < hi, other=0)
        peak, norm, acc = _latent_tile(
            x, y, pool, page, n0, hi, visible, peak, norm, acc, scale, cap, pool_sn, pool_sp,
            VDIM, BLOCK_C, ROPE, BLOCK_R, PAGE, BLOCK_N, SINGLE, SOFTCAP, PRECISION,
        )  # fmt: skip
        page = ahead
    return peak, norm, acc


@triton.jit(
    do_not_specialize=[
        "tiles", "first_span", "splits", "split_tokens", "first_split", "all_splits",
        "first_row", "table_ss", "table_sg", "lens_ss",
    ],
    do_not_specialize_on_alignment=["table", "starts", "widths", "lens", "total", "base", "cu_q"],
)  # fmt: skip
def _latent_kernel(
    q, pool, table, starts, widths, first_row, table_ss, table_sg, lens, total, base, cu_q,
    out, lse,
    scale, cap, tiles, first_span, splits, split_tokens, first_split, all_splits,
    q_st, q_sh, o_st, o_sh, o_ss, pool_sn, pool_sp, lens_ss,
    HEADS: tl.constexpr, VDIM: tl.constexpr, BLOCK_C: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SINGLE: tl.constexpr, MULTI: tl.constexpr,
    DIRECT: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the keys for one tile of a span's (query, head) pairs.

    Pair m is head m % HEADS of query m // HEADS. out: [T, Hq, splits, Dv] and lse [T, Hq, splits],
    or out [T, Hq, Dv] alone where there is but one split of one segment (DIRECT).
    """
    span, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    split = tl.program_id(1)
    q0, queries = span, 1
    if not SINGLE:
        q0 = tl.load(cu_q + span + first_span).to(tl.int64)
        queries = (tl.load(cu_q + span + first_span + 1) - q0).to(tl.int32)
        q0 -= first_span  # the spans before the first hold one query each and are not in q
    if tile * BLOCK_M < queries * HEADS:
        span += first_span
        length, whole, before = row_place(lens, total, base, span, 0, 0, lens_ss, 0, 1, MULTI)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        real = m < queries * HEADS
        i, head = m // HEADS, m % HEADS
        token = q0 + i
        offset = whole - queries + 1 - before  # keys of this segment that the first query sees
        last = tl.minimum((tile + 1) * BLOCK_M, queries * HEADS) - 1
        end = tl.maximum(tl.minimum(offset + last // HEADS, length), 0)
        mine = tl.minimum(tl.cdiv(end, split_tokens), splits)  # splits of this tile
        size = tl.cdiv(tl.cdiv(end, tl.maximum(mine, 1)), BLOCK_N) * BLOCK_N
        lo = split * size
        hi = tl.minimum(lo + size, end)
        row = (token * HEADS + head) * all_splits + first_split + split
        if hi + (1 if DIRECT else 0) > lo:  # an empty row's only split writes its zeros
            visible = tl.minimum(offset + i, length)
            ids = row_table(
                table, starts, widths, first_row, table_ss, table_sg, span, 0, PACKED
            )  # fmt: skip
            peak, norm, acc = _latent_walk(
                q + token * q_st + head * q_sh, real, pool, ids, lo, hi, visible, scale, cap,
                pool_sn, pool_sp, VDIM, BLOCK_C, ROPE, BLOCK_R, PAGE,
                BLOCK_M, BLOCK_N, SINGLE, SOFTCAP, PRECISION,
            )  # fmt: skip
            safe = tl.where(norm > 0, norm, 1.0)
            if not DIRECT:
                value = tl.where(norm > 0, peak + tl.log2(safe), float("-inf"))
                tl.store(lse + row, value, mask=real)
            # Addresses last: made before the loop, they would sit in registers all along.
            c = tl.arange(0, BLOCK_C)
            to = out + token * o_st + head * o_sh + (first_split + split) * o_ss
            acc = (acc / safe[:, None]).to(out.dtype.element_ty)
            tl.store(to[:, None] + c[None, :], acc, mask=real[:, None] & (c < VDIM)[None, :])
        elif not DIRECT:
            # An empty split says so in its lse; its output stays unwritten and is never read.
            tl.store(lse + row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=real)


def paged_latent(
    q: Tensor,
    segments: list[Keys],
    cu_q: Tensor,
    out: Tensor,
    scale: float,
    softcap: float,
    *,
    max_q: int,
    max_len: int,
    first_span: int = 0,
) -> None:
    """Spans first_span.. of a view, whose queries are q [T, Hq, D], into out [T, Hq, Dv].

    Rows hold one head of D channels; values are their first Dv. Causal, bottom-right; cu_q: int32
    [S + 1]; the spans before first_span hold one query each. max_q, max_len: host bounds of the
    queries of a span and the keys of a row.
    """
    tokens, q_heads, _ = q.shape
    spans, value_dim = cu_q.shape[0] - 1 - first_span, out.shape[2]
    if spans <= 0 or tokens == 0:
        return
    kernel = _warpgroup_kernel(q.device)
    one_each = max_q == 1 and tokens == spans and len(segments) == 1
    if kernel is not None and one_each and kernel.serves(q, segments[0], value_dim):
        kernel.latent_decode(q, segments[0], out, scale, softcap)
        return
    pairs = min(_MAX_PAIRS, max(16, int(triton.next_power_of_2(max_q * q_heads))))
    tiles = triton.cdiv(max_q * q_heads, pairs)
    plans = []
    for keys in segments:
        longest = keys.longest(max_len)
        plans.append(plan_waves(spans * tiles, longest, multiprocessors(q.device)))
    total = sum(n for n, _ in plans)
    part, lse = out, None
    if total > 1:
        shape = (tokens, q_heads, total)
        part = torch.empty(*shape, value_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    first = 0
    for keys, plan in zip(segments, plans, strict=True):
        _launch(q, keys, cu_q, part, lse, (scale, softcap), (pairs, tiles), plan, first,
                first_span, spans, max_q == 1)  # fmt: skip
        first += plan[0]
    if lse is not None:
        _merge_kernel[(tokens * q_heads,)](
            part, lse, out, total, *out.stride()[:2], Q_HEADS=q_heads, VDIM=value_dim,
            BLOCK_V=triton.next_power_of_2(value_dim),
            BLOCK_K=min(16, triton.next_power_of_2(total)), num_warps=1 if total <= 4 else 4,
        )  # fmt: skip


def _launch(
    q: Tensor, keys: Keys, cu_q: Tensor, part: Tensor, lse: Tensor | None,
    logits: tuple[float, float], shape: tuple[int, int], plan: tuple[int, int], first: int,
    first_span: int, spans: int, single: bool,
) -> None:  # fmt: skip
    pool, value_dim = keys.k, part.shape[-1]
    pairs, tiles = shape
    rope = pool.shape[3] - value_dim
    block_c, block_r = (max(16, int(triton.next_power_of_2(n))) for n in (value_dim, rope))
    row_bytes = (block_c + block_r) * q.element_size()
    kind = f"{block_c + block_r} channels of {q.element_size()} bytes, {pairs} pairs"
    tuning = launch_shape("latent", kind, WIDE if pairs > 32 else NARROW)
    tuning = tuning.fitted(row_bytes, shared_memory_bytes(q.device) - row_bytes * pairs)
    _latent_kernel[(spans * tiles, plan[0])](
        q, pool, *keys.place(), keys.lens, keys.total, keys.base, cu_q, part, lse,
        *capped(*logits), tiles, first_span, *plan, first, 1 if lse is None else lse.shape[2],
        *q.stride()[:2], *part.stride()[:2], 0 if lse is None else part.stride(2),
        pool.stride(0), pool.stride(2), keys.lens.stride(0),
        HEADS=q.shape[1], VDIM=value_dim, BLOCK_C=block_c, ROPE=rope, BLOCK_R=block_r,
        PAGE=keys.page_size, BLOCK_M=pairs, BLOCK_N=tuning.keys, SINGLE=single,
        MULTI=keys.total is not None, DIRECT=lse is None,
        PACKED=isinstance(keys.table, PackedTable), SOFTCAP=logits[1] != 0,
        PRECISION=dot_precision(q.dtype),
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
