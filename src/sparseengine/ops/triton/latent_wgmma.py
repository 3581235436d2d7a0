# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Gluon kernels take pointers and compile-time constants, which Python types cannot express.)
"""Latent decode attention by warpgroup matrix instructions (compute capability 9.x), 16-bit rows.

The products are transposed: a tile of 64 rows is the 64-row side of `wgmma`, and the heads, 16 to
64 of them, are its narrow side. A tile is copied to shared memory once and serves as key and,
transposed by the instruction, as value: O^T += V^T P^T.

Each program takes an equal run of all spans' tiles, whatever the spans' lengths, so that there are
no waves: a span that lies in one run is written at once, the parts of the others are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparseengine.core.view import PackedTable
from sparseengine.ops.triton import keys as _keys
from sparseengine.ops.triton.attention import capped
from sparseengine.ops.triton.keys import Keys
from sparseengine.ops.triton.launch import multiprocessors, shared_memory_bytes

_TILE = 64  # rows of a tile: the instruction's
_SPANS = 1024  # spans whose lengths are summed at a time
_LAG = 8.0  # log2 units
_LEAST = 2  # tiles of a program, where there are few


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tuning:
    """Warps of a program, tiles in shared memory, programs that a multiprocessor runs at once."""

    warps: int
    stages: int
    programs: int


_TUNINGS = {  # by heads of a program
    16: _Tuning(warps=4, stages=1, programs=2),
    32: _Tuning(warps=4, stages=1, programs=2),
    64: _Tuning(warps=8, stages=2, programs=1),
}
# Triton 3.6 and 3.9 name these differently.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_row_table = gluon.jit(_keys.row_table.fn)


@gluon.constexpr_function
def _swizzled(channels):
    return gl.NVMMASharedLayout(min(128, channels * 2), 16, rank=2)


@gluon.constexpr_function
def _product(heads, warps, beside):
    """Layout of a product over heads, `warps` down and `beside` abreast."""
    return gl.NVMMADistributedLayout([3, 0], [warps, beside], [16, heads // beside, 16])


@gluon.jit
def _count(lens, lens_ss, items, v, TILES: gl.constexpr, TILE: gl.constexpr):
    """Tiles of the items v. Item v is heads v % TILES * BLOCK_M.. of span v // TILES."""
    n = gl.load(lens + (v // TILES).to(gl.int64) * lens_ss, mask=v < items, other=0)
    return gl.cdiv(n, TILE)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _run(
    lens, lens_ss, items,
    TILES: gl.constexpr, TILE: gl.constexpr, BLOCK: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """(first tile, end, first item, first tile of that item) of this program's run."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK // (32 * gl.num_warps())], [32],
                                            [gl.num_warps()], [0])  # fmt: skip
    v = gl.arange(0, BLOCK, layout=layout)
    ends = gl.associative_scan(_count(lens, lens_ss, items, v, TILES, TILE), 0, _add)
    total = gl.max(ends, 0)
    for v0 in range(BLOCK, items, BLOCK):
        total += gl.sum(_count(lens, lens_ss, items, v0 + v, TILES, TILE), 0)
    programs = gl.maximum(gl.minimum(gl.num_programs(0), gl.cdiv(total, LEAST)), 1)
    each, more, program = total // programs, total % programs, gl.program_id(0)
    start = program * each + gl.minimum(program, more)
    stop = gl.minimum(start + each + gl.where(program < more, 1, 0), total)
    past = ends <= start
    item = gl.sum(past.to(gl.int32), 0)
    begin = gl.max(gl.where(past, ends, 0), 0)
    done = gl.max(ends, 0)
    for v0 in range(BLOCK, items, BLOCK):
        later = done + gl.associative_scan(
            _count(lens, lens_ss, items, v0 + v, TILES, TILE), 0, _add
        )
        past = later <= start
        item += gl.sum(past.to(gl.int32), 0)
        begin = gl.maximum(begin, gl.max(gl.where(past, later, 0), 0))
        done = gl.max(later, 0)
    return start, stop, item, begin


@gluon.jit
def _load_queries(
    q, x, y, item, q_st, q_sh, layout: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr
):
    BLOCK_M: gl.constexpr = x.shape[0]
    VDIM: gl.constexpr = x.shape[1]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    head = item % TILES * BLOCK_M + m
    at = q + (item // TILES).to(gl.int64) * q_st + (head * q_sh)[:, None]
    c = gl.arange(0, VDIM, layout=gl.SliceLayout(0, layout))
    r = gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, layout))
    real = (head < HEADS)[:, None]
    x.store(gl.load(at + c[None, :], mask=real, other=0.0))
    y.store(gl.load(at + VDIM + r[None, :], mask=real, other=0.0))


@gluon.jit
def _place(pages, n0, hi, pool_sn, pool_sp, layout: gl.constexpr, PAGE: gl.constexpr,
           TILE: gl.constexpr):  # fmt: skip
    """Offsets of the rows n0.. of a tile; those past the end repeat the last: their weight is 0."""
    n = gl.minimum(n0 + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout)), hi - 1)
    page = gl.load(pages + n // PAGE)
    return page.to(gl.int64) * pool_sn + (n % PAGE) * pool_sp  # pools exceed 2^31 elements


@gluon.jit
def _fetch(to, rows, at, layout: gl.constexpr):
    c = gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, layout))
    _copy(to, rows + at[:, None] + c[None, :])


@gluon.jit
def _arrived(left: gl.constexpr):
    """All but the last `left` copies are there for every thread and for the matrix units."""
    async_copy.wait_group(left)
    hopper.fence_async_shared()
    _barrier()


@gluon.jit
def _write(to, stride, real, acc, inverse, FIRST: gl.constexpr, layout: gl.constexpr):
    CHUNK: gl.constexpr = acc.shape[0]
    m = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    c = FIRST + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    value = (acc * inverse[None, :]).to(to.dtype.element_ty)
    gl.store(to + (m * stride)[None, :] + c[:, None], value, mask=(m < real)[None, :])


@gluon.jit
def _length(lens, lens_ss, item, TILES: gl.constexpr):
    return gl.load(lens + (item // TILES).to(gl.int64) * lens_ss)


@gluon.jit
def _following(item, lens, lens_ss, TILES: gl.constexpr):
    """The next item that has rows, and their number. There is one."""
    item += 1
    hi = _length(lens, lens_ss, item, TILES)
    while hi == 0:
        item += 1
        hi = _length(lens, lens_ss, item, TILES)
    return item, hi


@gluon.jit
def _pages(tables, item, TILES: gl.constexpr, PACKED: gl.constexpr):
    table, starts, widths, first_row, table_ss, table_sg = tables
    span = (item // TILES).to(gl.int64)
    return _row_table(table, starts, widths, first_row, table_ss, table_sg, span, 0, PACKED)


@gluon.jit
def _advance(
    far, tables, lens, lens_ss, TILES: gl.constexpr, TILE: gl.constexpr, PACKED: gl.constexpr
):
    """The tile after `far`: (item, first row of the tile, rows of the item, its page ids)."""
    item, n0, hi, pages = far
    n0 += TILE
    if n0 >= hi:
        item, hi = _following(item, lens, lens_ss, TILES)
        n0 = 0
        pages = _pages(tables, item, TILES, PACKED)
    return item, n0, hi, pages


@gluon.jit
def _fetch_ahead(
    latent, rope, pool, at, far, tables, lens, lens_ss, left, pool_sn, pool_sp,
    layout: gl.constexpr, TILES: gl.constexpr, PAGE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Fetch the tile `far`, whose rows are at `at`, and find the next; `left` tiles remain."""
    TILE: gl.constexpr = latent.shape[0]
    if left > 0:
        _fetch(rope, pool + latent.shape[1], at, layout)
        _fetch(latent, pool, at, layout)
    async_copy.commit_group()
    if left > 1:
        far = _advance(far, tables, lens, lens_ss, TILES, TILE, PACKED)
        at = _place(far[3], far[1], far[2], pool_sn, pool_sp, layout, PAGE, TILE)
    return far, at


@gluon.jit
def _attend(
    peak, norm, acc0, acc1, latent, rope, x, y, weights, left, scale, cap,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Attend to one tile, of which `left` rows count; online softmax in log2 units.

    peak [heads]: what weights refer to; norm [rows, heads]: their sums so far, not yet over rows;
    acc0, acc1 [half of the values, heads].
    """
    s_layout: gl.constexpr = norm.type.layout
    n = gl.arange(0, norm.shape[0], layout=gl.SliceLayout(1, s_layout))
    _arrived(STAGES - 1)
    s = gl.zeros(norm.shape, gl.float32, layout=s_layout)
    s = hopper.warpgroup_mma(rope, y.permute((1, 0)), s, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma(latent, x.permute((1, 0)), s, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=[s]) * scale
    if SOFTCAP:
        s = cap - 2 * cap / (gl.exp2(s) + 1)
    s = gl.where((n < left)[:, None], s, float("-inf"))
    # The reference lags behind the peak: weights up to 2^LAG are as exact, and few tiles rescale.
    new = gl.max(s, 0)
    new = gl.where(new > peak + LAG, new, peak)
    p = gl.exp2(s - new[None, :])
    weights.store(p.to(weights.dtype))
    hopper.fence_async_shared()
    if gl.max((new > peak).to(gl.int32), 0) > 0:
        alpha = gl.exp2(peak - new)
        norm = norm * alpha[None, :]
        a = gl.convert_layout(alpha, gl.SliceLayout(0, acc0.type.layout))[None, :]
        acc0 = acc0 * a
        acc1 = acc1 * a
    norm += p
    _barrier()
    HALF: gl.constexpr = acc0.shape[0]
    v0 = latent.slice(0, HALF, dim=1).permute((1, 0))
    v1 = latent.slice(HALF, HALF, dim=1).permute((1, 0))
    acc0 = hopper.warpgroup_mma(v0, weights, acc0, is_async=True)
    acc1 = hopper.warpgroup_mma(v1, weights, acc1, is_async=True)
    acc0, acc1 = hopper.warpgroup_mma_wait(0, deps=[acc0, acc1])
    _barrier()
    return new, norm, acc0, acc1


@gluon.jit
def _finish(
    peak, norm, acc0, acc1, item, first, last, out, part, lse, meta, o_st, o_sh,
    HEADS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Write what a run holds of an item: its output, or a part.

    A part is number (program + item): those of one item follow one another. part: [.., BLOCK_M,
    VDIM]; lse: [.., BLOCK_M] in log2 units; meta: int32 [items, 2], the first part of an item and
    the one after its last. first, last: whether the run holds these tiles of the item.
    """
    BLOCK_M: gl.constexpr = acc0.shape[1]
    HALF: gl.constexpr = acc0.shape[0]
    layout: gl.constexpr = acc0.type.layout
    sums = gl.sum(norm, 0)
    inverse = gl.convert_layout(1.0 / sums, gl.SliceLayout(0, layout))
    real = HEADS - item % TILES * BLOCK_M
    number = gl.program_id(0) + item
    gl.store(meta + 2 * item, number, mask=first)
    gl.store(meta + 2 * item + 1, number + 1, mask=last)
    if first & last:
        to = out + (item // TILES).to(gl.int64) * o_st + item % TILES * BLOCK_M * o_sh
        _write(to, o_sh, real, acc0, inverse, 0, layout)
        _write(to, o_sh, real, acc1, inverse, HALF, layout)
    else:
        m = gl.arange(0, BLOCK_M, layout=peak.type.layout)
        gl.store(lse + number * BLOCK_M + m, peak + gl.log2(sums))
        at = part + number.to(gl.int64) * (2 * HALF * BLOCK_M)
        _write(at, 2 * HALF, real, acc0, inverse, 0, layout)
        _write(at, 2 * HALF, real, acc1, inverse, HALF, layout)


@gluon.jit(
    do_not_specialize=["items", "ring", "zero", "first_row", "table_ss", "table_sg", "lens_ss"],
    do_not_specialize_on_alignment=["table", "starts", "widths", "lens", "meta"],
)
def _latent_kernel(
    q, pool, table, starts, widths, first_row, table_ss, table_sg, lens, out, part, lse, meta,
    scale, cap, items, ring, zero, q_st, q_sh, o_st, o_sh, pool_sn, pool_sp, lens_ss,
    HEADS: gl.constexpr, TILES: gl.constexpr, VDIM: gl.constexpr, ROPE: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_M: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    SPANS: gl.constexpr, LEAST: gl.constexpr, PACKED: gl.constexpr, SOFTCAP: gl.constexpr,
    LAG: gl.constexpr,
):  # fmt: skip
    """One run of tiles. Items of one part are written to out, empty ones not at all.

    ring, zero: STAGES - 1 and 0, which the compiler must not know: it would keep the addresses of
    all operands in registers, which are short, instead of making them where they are used.
    """
    WARPS: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = _product(BLOCK_M, 4, WARPS // 4)
    o_layout: gl.constexpr = _product(BLOCK_M, WARPS, 1)
    # 8 threads take 128 bytes of a row, so that each needs the places of few rows.
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = pool.dtype.element_ty
    tables = (table, starts, widths, first_row, table_ss, table_sg)
    start, stop, item, begin = _run(lens, lens_ss, items, TILES, TILE, SPANS, LEAST)
    if start < stop:
        latents = gl.allocate_shared_memory(dtype, [STAGES, TILE, VDIM], _swizzled(VDIM))
        ropes = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROPE], _swizzled(ROPE))
        x = gl.allocate_shared_memory(dtype, [1, BLOCK_M, VDIM], _swizzled(VDIM))
        y = gl.allocate_shared_memory(dtype, [1, BLOCK_M, ROPE], _swizzled(ROPE))
        weights = gl.allocate_shared_memory(dtype, [TILE, BLOCK_M], _swizzled(BLOCK_M))
        n0, hi = (start - begin) * TILE, _length(lens, lens_ss, item, TILES)
        far = (item, n0, hi, _pages(tables, item, TILES, PACKED))  # the tile to fetch next
        at = _place(far[3], far[1], far[2], pool_sn, pool_sp, copy, PAGE, TILE)
        for i in gl.static_range(STAGES):
            far, at = _fetch_ahead(
                latents.index(i), ropes.index(i), pool, at, far, tables, lens, lens_ss,
                stop - start - i, pool_sn, pool_sp, copy, TILES, PAGE, PACKED,
            )  # fmt: skip
        stage, same, t = 0, 0, start
        while t < stop:
            _load_queries(q, x.index(0), y.index(0), item, q_st, q_sh, copy, HEADS, TILES)
            peak = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(0, s_layout))
            norm = gl.zeros([TILE, BLOCK_M], gl.float32, layout=s_layout)
            acc0 = gl.zeros([VDIM // 2, BLOCK_M], gl.float32, layout=o_layout)
            acc1 = acc0
            first, end = n0 == 0, gl.minimum(t + gl.cdiv(hi - n0, TILE), stop)
            while t < end:
                peak, norm, acc0, acc1 = _attend(
                    peak, norm, acc0, acc1, latents.index(stage), ropes.index(stage),
                    x.index(same), y.index(same), weights, hi - n0, scale, cap,
                    STAGES, SOFTCAP, LAG,
                )  # fmt: skip
                far, at = _fetch_ahead(
                    latents.index(stage), ropes.index(stage), pool, at, far, tables, lens, lens_ss,
                    stop - t - STAGES, pool_sn, pool_sp, copy, TILES, PAGE, PACKED,
                )  # fmt: skip
                stage, same = (stage + 1) & ring, (same + 1) & zero
                n0, t = n0 + TILE, t + 1
            _finish(peak, norm, acc0, acc1, item, first, n0 >= hi, out, part, lse, meta, o_st, o_sh,
                    HEADS, TILES)  # fmt: skip
            if t < stop:
                item, hi = _following(item, lens, lens_ss, TILES)
                n0 = 0


@triton.jit(do_not_specialize=["lens_ss"], do_not_specialize_on_alignment=["lens", "meta"])
def _merge_parts(
    part, lse, meta, lens, out, lens_ss, o_st, o_sh,
    HEADS: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, VDIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Merge the parts of BLOCK_H heads of one span, BLOCK_V channels. Empty rows become zeros."""
    GROUPS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    span, h0 = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS * BLOCK_H
    item = span * TILES + h0 // BLOCK_M
    empty = tl.load(lens + span * lens_ss) == 0
    first, end = tl.load(meta + 2 * item), tl.load(meta + 2 * item + 1)
    first, end = tl.where(empty, 0, first), tl.where(empty, 0, end)
    if end - first != 1:
        head = h0 + tl.arange(0, BLOCK_H)
        c = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        real = head < HEADS
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
        for k0 in range(first, end, BLOCK_K):
            k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
            row = k[:, None] * BLOCK_M + (head % BLOCK_M)[None, :]
            x = tl.load(lse + row, mask=(k < end)[:, None], other=float("-inf"))
            used = ((k < end)[:, None] & real[None, :])[:, :, None]
            y = tl.load(part + row[:, :, None] * VDIM + c[None, None, :], mask=used, other=0.0)
            new = tl.maximum(peak, tl.max(x, 0))
            weight = tl.exp2(x - new[None, :])
            alpha = tl.exp2(peak - new)
            acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * y, 0)
            norm = norm * alpha + tl.sum(weight, 0)
            peak = new
        acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
        to = out + span * o_st + (head * o_sh)[:, None] + c[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None])


def serves(q: Tensor, keys: Keys, value_dim: int) -> bool:
    """Whether the kernel takes these rows: 16-bit, aligned, of the usual 512 + 64 channels."""
    pool, heads = keys.k, _heads_at_once(q.shape[1])
    rows = _TILE * _TUNINGS[heads].stages + heads
    held = (rows * pool.shape[3] + _TILE * heads) * pool.element_size() + 2048
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and pool.dtype == q.dtype
        and (value_dim, pool.shape[3] - value_dim) == (512, 64)
        and all(n % 16 == 0 for n in (pool.data_ptr(), pool.stride(0), pool.stride(2)))
        and held <= shared_memory_bytes(q.device)
    )


def _heads_at_once(heads: int) -> int:
    return min(max(_TUNINGS), max(min(_TUNINGS), int(triton.next_power_of_2(heads))))


def latent_decode(q: Tensor, keys: Keys, out: Tensor, scale: float, softcap: float) -> None:
    """One query per span: q [S, Hq, D] over its rows, into out [S, Hq, Dv] (all written)."""
    spans, q_heads, _ = q.shape
    value_dim, rope = out.shape[2], keys.k.shape[3] - out.shape[2]
    heads = _heads_at_once(q_heads)
    tuning, tiles = _TUNINGS[heads], triton.cdiv(q_heads, heads)
    programs, items = tuning.programs * multiprocessors(q.device), spans * tiles
    part = torch.empty(programs + items, heads, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(programs + items, heads, dtype=torch.float32, device=q.device)
    meta = torch.empty(items, 2, dtype=torch.int32, device=q.device)
    _latent_kernel[(programs,)](
        q, keys.k, *keys.place(), keys.lens, out, part, lse, meta, *capped(scale, softcap), items,
        tuning.stages - 1, 0,
        *q.stride()[:2], *out.stride()[:2], keys.k.stride(0), keys.k.stride(2),
        keys.lens.stride(0),
        HEADS=q_heads, TILES=tiles, VDIM=value_dim, ROPE=rope, PAGE=keys.page_size,
        BLOCK_M=heads, TILE=_TILE, STAGES=tuning.stages, SPANS=_SPANS, LEAST=_LEAST,
        PACKED=isinstance(keys.table, PackedTable), SOFTCAP=softcap != 0,
        LAG=_LAG, num_warps=tuning.warps,
    )  # fmt: skip
    few = spans * q_heads < 4 * multiprocessors(q.device)  # and so many parts of each
    block = (1, value_dim // 4, 16) if few else (4, value_dim, 2)
    _merge_parts[(spans * triton.cdiv(q_heads, block[0]), value_dim // block[1])](
        part, lse, meta, keys.lens, out, keys.lens.stride(0), *out.stride()[:2],
        HEADS=q_heads, TILES=tiles, BLOCK_M=heads, VDIM=value_dim,
        BLOCK_H=block[0], BLOCK_V=block[1], BLOCK_K=block[2], num_warps=1 if few else 4,
    )  # fmt: skip
