# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Gluon kernels take pointers and compile-time constants, which Python types cannot express.)
"""Latent attention by warpgroup matrix instructions (compute capability 9.x), 16-bit rows.

The products are transposed: a tile of 64 rows is the 64-row side of `wgmma`, and the (query, head)
pairs, 16 to 64 of them, are its narrow side. A tile is copied to shared memory once and serves as
key and, transposed by the instruction, as value: O^T += V^T P^T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparseengine.ops.triton import keys as _keys
from sparseengine.ops.triton.launch import shared_memory_bytes

_TILE = 64  # rows of a tile: the instruction's


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Warps of a program, tiles in shared memory, programs that a multiprocessor runs at once."""

    warps: int
    stages: int
    programs: int


TUNINGS = {  # by pairs of a tile
    16: Tuning(warps=4, stages=1, programs=2),
    32: Tuning(warps=4, stages=1, programs=2),
    64: Tuning(warps=8, stages=2, programs=1),
}
# Triton 3.6 and 3.9 name these differently.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_row_place = gluon.jit(_keys.row_place.fn)
_row_table = gluon.jit(_keys.row_table.fn)


@gluon.constexpr_function
def _wide(channels, warps):
    """Threads take 8 channels each, a row's channels first."""
    lanes = min(channels // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def _swizzled(channels):
    return gl.NVMMASharedLayout(min(128, channels * 2), 16, rank=2)


@gluon.jit
def _row_ids(ids, n0, hi, layout: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr):
    """Pages of the rows n0.. of a tile; rows past the end repeat the last, whose weight is 0."""
    n = gl.minimum(n0 + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout)), hi - 1)
    return gl.load(ids + n // PAGE)


@gluon.jit
def _fetch(
    to, pool, page, n0, hi, pool_sn, pool_sp,
    layout: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, CHANNELS: gl.constexpr,
):  # fmt: skip
    n = gl.minimum(n0 + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout)), hi - 1)
    at = page.to(gl.int64) * pool_sn + (n % PAGE) * pool_sp  # pools exceed 2^31 elements
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    _copy(to, pool + at[:, None] + c[None, :])


@gluon.jit(
    do_not_specialize=[
        "tiles", "first_span", "splits", "split_tokens", "first_split", "all_splits",
        "first_row", "table_ss", "table_sg", "lens_ss",
    ],
    do_not_specialize_on_alignment=["table", "starts", "widths", "lens", "total", "base", "cu_q"],
)  # fmt: skip
def latent_wgmma_kernel(
    q, pool, table, starts, widths, first_row, table_ss, table_sg, lens, total, base, cu_q,
    out, lse,
    scale, cap, tiles, first_span, splits, split_tokens, first_split, all_splits,
    q_st, q_sh, o_st, o_sh, o_ss, pool_sn, pool_sp, lens_ss,
    HEADS: gl.constexpr, VDIM: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_M: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    SINGLE: gl.constexpr, MULTI: gl.constexpr,
    DIRECT: gl.constexpr, PACKED: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """As `latent._latent_kernel`, whose arguments and results it shares."""
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = WARPS // 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, GROUPS], [16, BLOCK_M // GROUPS, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    c_copy: gl.constexpr = _wide(VDIM, WARPS)
    r_copy: gl.constexpr = _wide(ROPE, WARPS)
    s_pairs: gl.constexpr = gl.SliceLayout(0, s_layout)
    o_pairs: gl.constexpr = gl.SliceLayout(0, o_layout)
    dtype: gl.constexpr = pool.dtype.element_ty

    span, tile = (gl.program_id(0) // tiles).to(gl.int64), gl.program_id(0) % tiles
    split = gl.program_id(1)
    q0, queries = span, 1
    if not SINGLE:
        q0 = gl.load(cu_q + span + first_span).to(gl.int64)
        queries = (gl.load(cu_q + span + first_span + 1) - q0).to(gl.int32)
        q0 -= first_span  # the spans before the first hold one query each and are not in q
    if tile * BLOCK_M < queries * HEADS:
        span += first_span
        length, whole, before = _row_place(lens, total, base, span, 0, 0, lens_ss, 0, 1, MULTI)
        offset = whole - queries + 1 - before  # keys of this segment that the first query sees
        last = gl.minimum((tile + 1) * BLOCK_M, queries * HEADS) - 1
        end = gl.maximum(gl.minimum(offset + last // HEADS, length), 0)
        mine = gl.minimum(gl.cdiv(end, split_tokens), splits)  # splits of this tile
        size = gl.cdiv(gl.cdiv(end, gl.maximum(mine, 1)), TILE) * TILE
        lo = split * size
        hi = gl.minimum(lo + size, end)
        m = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=s_pairs)
        token = q0 + m // HEADS
        row = (token * HEADS + m % HEADS) * all_splits + first_split + split
        if hi + (1 if DIRECT else 0) > lo:  # an empty row's only split writes its zeros
            ids = _row_table(
                table, starts, widths, first_row, table_ss, table_sg, span, 0, PACKED
            )  # fmt: skip
            latents = gl.allocate_shared_memory(dtype, [STAGES, TILE, VDIM], _swizzled(VDIM))
            ropes = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROPE], _swizzled(ROPE))
            for i in gl.static_range(STAGES):
                first = lo + i * TILE
                if first < hi:
                    page = _row_ids(ids, first, hi, c_copy, PAGE, TILE)
                    _fetch(latents.index(i), pool, page, first, hi, pool_sn, pool_sp,
                           c_copy, PAGE, TILE, VDIM)  # fmt: skip
                    page = _row_ids(ids, first, hi, r_copy, PAGE, TILE)
                    _fetch(ropes.index(i), pool + VDIM, page, first, hi, pool_sn, pool_sp,
                           r_copy, PAGE, TILE, ROPE)  # fmt: skip
                async_copy.commit_group()
            x = gl.allocate_shared_memory(dtype, [BLOCK_M, VDIM], _swizzled(VDIM))
            y = gl.allocate_shared_memory(dtype, [BLOCK_M, ROPE], _swizzled(ROPE))
            p_shared = gl.allocate_shared_memory(dtype, [TILE, BLOCK_M], _swizzled(BLOCK_M))
            mq = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, c_copy))
            c = gl.arange(0, VDIM, layout=gl.SliceLayout(0, c_copy))
            at = (q0 + mq // HEADS) * q_st + (mq % HEADS) * q_sh
            x.store(gl.load(q + at[:, None] + c[None, :], mask=(mq < queries * HEADS)[:, None],
                            other=0.0))  # fmt: skip
            mq = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, r_copy))
            r = gl.arange(0, ROPE, layout=gl.SliceLayout(0, r_copy))
            at = VDIM + (q0 + mq // HEADS) * q_st + (mq % HEADS) * q_sh
            y.store(gl.load(q + at[:, None] + r[None, :], mask=(mq < queries * HEADS)[:, None],
                            other=0.0))  # fmt: skip

            peak = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=s_pairs)
            parts = gl.zeros([TILE, BLOCK_M], gl.float32, layout=s_layout)
            acc = gl.zeros([VDIM, BLOCK_M], gl.float32, layout=o_layout)
            zeros = gl.zeros([TILE, BLOCK_M], gl.float32, layout=s_layout)
            n = gl.arange(0, TILE, layout=gl.SliceLayout(1, s_layout))
            visible = gl.minimum(offset + m // HEADS, length)
            stage = 0
            page_c = _row_ids(ids, lo + STAGES * TILE, hi, c_copy, PAGE, TILE)
            page_r = _row_ids(ids, lo + STAGES * TILE, hi, r_copy, PAGE, TILE)
            for n0 in range(lo, hi, TILE):
                async_copy.wait_group(STAGES - 1)
                hopper.fence_async_shared()
                _barrier()
                latent, rope = latents.index(stage), ropes.index(stage)
                s = hopper.warpgroup_mma(rope, y.permute((1, 0)), zeros, use_acc=False,
                                         is_async=True)  # fmt: skip
                s = hopper.warpgroup_mma(latent, x.permute((1, 0)), s, is_async=True)
                s = hopper.warpgroup_mma_wait(0, deps=[s])
                s = s * scale
                if SOFTCAP:
                    s = cap - 2 * cap / (gl.exp2(s) + 1)
                if SINGLE:
                    seen = (n0 + n < hi)[:, None]
                else:
                    seen = (n0 + n)[:, None] < gl.minimum(visible, hi)[None, :]
                s = gl.where(seen, s, float("-inf"))
                new = gl.maximum(peak, gl.max(s, 0))
                ref = new
                if not SINGLE:
                    ref = gl.where(new == float("-inf"), 0.0, new)
                p = gl.exp2(s - ref[None, :])
                alpha = gl.exp2(peak - ref)
                peak = new
                parts = parts * alpha[None, :] + p
                p_shared.store(p.to(dtype))
                hopper.fence_async_shared()
                _barrier()
                acc = acc * gl.convert_layout(alpha, o_pairs)[None, :]
                acc = hopper.warpgroup_mma(latent.permute((1, 0)), p_shared, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                _barrier()
                ahead = n0 + STAGES * TILE
                if ahead < hi:
                    _fetch(latent, pool, page_c, ahead, hi, pool_sn, pool_sp,
                           c_copy, PAGE, TILE, VDIM)  # fmt: skip
                    _fetch(rope, pool + VDIM, page_r, ahead, hi, pool_sn, pool_sp,
                           r_copy, PAGE, TILE, ROPE)  # fmt: skip
                async_copy.commit_group()
                page_c = _row_ids(ids, ahead + TILE, hi, c_copy, PAGE, TILE)
                page_r = _row_ids(ids, ahead + TILE, hi, r_copy, PAGE, TILE)
                stage = (stage + 1) % STAGES
            norm = gl.sum(parts, 0)
            safe = gl.where(norm > 0, norm, 1.0)
            real = m < queries * HEADS
            if not DIRECT:
                value = gl.where(norm > 0, peak + gl.log2(safe), float("-inf"))
                gl.store(lse + row, value, mask=real)
            mo = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=o_pairs)
            to = (q0 + mo // HEADS) * o_st + (mo % HEADS) * o_sh + (first_split + split) * o_ss
            c = gl.arange(0, VDIM, layout=gl.SliceLayout(1, o_layout))
            acc = acc / gl.convert_layout(safe, o_pairs)[None, :]
            gl.store(out + to[None, :] + c[:, None], acc.to(out.dtype.element_ty),
                     mask=(mo < queries * HEADS)[None, :])  # fmt: skip
        elif not DIRECT:
            # An empty split says so in its lse; its output stays unwritten and is never read.
            gl.store(lse + row, gl.full([BLOCK_M], float("-inf"), gl.float32, layout=s_pairs),
                     mask=m < queries * HEADS)  # fmt: skip


def serves(q: Tensor, pool: Tensor, value_dim: int, pairs: int) -> bool:
    """Whether the kernel takes these rows: 16-bit, aligned, channels in powers of two."""
    rope = pool.shape[3] - value_dim
    item = q.element_size()
    tiles = _TILE * TUNINGS[pairs].stages + pairs
    held = (tiles * (value_dim + rope) + _TILE * pairs + 1024) * item
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and pool.dtype == q.dtype
        and all(n >= 64 and n & (n - 1) == 0 for n in (value_dim, rope))
        and all(n % 16 == 0 for n in (*q.stride()[:2], pool.stride(0), pool.stride(2)))
        and q.data_ptr() % 16 == pool.data_ptr() % 16 == 0
        and held <= shared_memory_bytes(q.device)
    )


def launch(grid: tuple[int, int], args: tuple[object, ...], facts: dict[str, int]) -> None:
    """Run the kernel with the arguments and facts of `latent._latent_kernel`."""
    tuning = TUNINGS[facts["BLOCK_M"]]
    latent_wgmma_kernel[grid](
        *args, **facts, TILE=_TILE, STAGES=tuning.stages, num_warps=tuning.warps
    )
