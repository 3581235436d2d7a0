# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""Block-sparse prefill: a tile of queries of one head walks the list of key blocks it reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseengine.core.view import BlockMask
from sparseengine.ops.triton.attention import PREFILL, PREFILL_WIDE, _tile, capped
from sparseengine.ops.triton.keys import Keys
from sparseengine.ops.triton.launch import Tuning, dot_precision, shared_memory_bytes
from sparseengine.ops.tuned import launch_shape

_VARYING = ["span", "offset", "table_ss", "table_sg", "lens_ss", "lens_sg", "width"]
_VARYING_POINTERS = ["table", "lens", "cu_q", "index", "counts"]


def block_lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    """bool [H, nQ, nK] -> (int32 [H, nQ, nK + 1], int32 [H, nQ]).

    Ascending ids of the blocks that are set, followed by anything in range, and their number. The
    last column is room for the others. Device work of static shapes.
    """
    width = mask.shape[-1]
    place = torch.where(mask, mask.cumsum(-1) - 1, width)
    ids = torch.arange(width, dtype=torch.int32, device=mask.device).expand(mask.shape)
    index = torch.zeros(*mask.shape[:-1], width + 1, dtype=torch.int32, device=mask.device)
    return index.scatter_(-1, place, ids), mask.sum(-1, dtype=torch.int32)


@triton.jit
def _walk_list(
    x, k, v, table, index, full, count, length, visible, scale, cap, k_sn, k_sp, v_sn, v_sp,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VDIM: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first `full` blocks of a list, which every query sees, then the others, causally."""
    PARTS: tl.constexpr = BLOCK // BLOCK_N
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    early = tl.zeros([BLOCK_M], tl.int32)  # there is no window
    # The next block's id is loaded a round ahead: keys then wait for one address less.
    ahead = tl.load(index)
    for i in range(0, full * PARTS):
        n0 = ahead * BLOCK + i % PARTS * BLOCK_N
        ahead = tl.load(index + (i + 1) // PARTS)
        peak, norm, acc = _tile(
            x, k, v, table, n0, length, visible, early, peak, norm, acc, scale, cap, k_sn, k_sp,
            v_sn, v_sp, DIM, BLOCK_D, VDIM, BLOCK_V, PAGE, BLOCK_N, 0, SOFTCAP, PRECISION,
        )  # fmt: skip
    for i in range(full * PARTS, count * PARTS):
        n0 = tl.load(index + i // PARTS) * BLOCK + i % PARTS * BLOCK_N
        peak, norm, acc = _tile(
            x, k, v, table, n0, length, visible, early, peak, norm, acc, scale, cap, k_sn, k_sp,
            v_sn, v_sp, DIM, BLOCK_D, VDIM, BLOCK_V, PAGE, BLOCK_N, 2, SOFTCAP, PRECISION,
        )  # fmt: skip
    return peak, norm, acc


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_POINTERS)
def _masked_kernel(
    q, k, v, table, lens, cu_q, index, counts, out, scale, cap, span, offset, width,
    q_st, q_sh, o_st, o_sh, k_sn, k_sh, k_sp, v_sn, v_sh, v_sp,
    table_ss, table_sg, lens_ss, lens_sg,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VDIM: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, POOL_HEADS: tl.constexpr, ALIKE: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M queries, a part of one block of queries, of one span and one query head."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # longest first
    kv_head = head // GROUP
    row = kv_head if ROW_PER_HEAD else 0
    q0 = tl.load(cu_q + span)
    queries = tl.load(cu_q + span + 1) - q0
    length = tl.load(lens + span * lens_ss + row * lens_sg)
    i = tile * BLOCK_M - offset + tl.arange(0, BLOCK_M)
    real = (i >= 0) & (i < queries)
    start, end = tl.maximum(tile * BLOCK_M - offset, 0), tile * BLOCK_M - offset + BLOCK_M
    if (start < queries) & (end > 0):
        token = (q0 + i).to(tl.int64)
        d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        x = tl.load(
            q + (token * q_st + head * q_sh)[:, None] + d[None, :],
            mask=real[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        old = length - queries
        visible = tl.minimum(old + 1 + i, length)
        line = tile * BLOCK_M // BLOCK
        rows = (tl.num_programs(1) * BLOCK_M // BLOCK) * (0 if ALIKE else head) + line
        count = tl.load(counts + rows)
        index += rows.to(tl.int64) * width
        # Only blocks that reach past the keys that the first query sees need the causal mask.
        first = old + 1 + tl.maximum(line * BLOCK - offset, 0)
        last = old + tl.minimum((line + 1) * BLOCK - offset, queries) - 1
        ragged = tl.maximum(last // BLOCK - first // BLOCK + 1, 0)
        full = tl.maximum(count - ragged, 0)
        table += span.to(tl.int64) * table_ss + row * table_sg
        if POOL_HEADS:
            k += kv_head * k_sh
            v += kv_head * v_sh
        _, norm, acc = _walk_list(
            x, k, v, table, index, full, count, length, visible, scale, cap,
            k_sn, k_sp, v_sn, v_sp,
            DIM, BLOCK_D, VDIM, BLOCK_V, PAGE, BLOCK_M, BLOCK_N, BLOCK, SOFTCAP, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
        tl.store(
            out + (token * o_st + head * o_sh)[:, None] + dv[None, :],
            acc.to(out.dtype.element_ty),
            mask=real[:, None] & (dv < VDIM)[None, :],
        )  # fmt: skip


def masked_prefill(
    q: Tensor,
    keys: Keys,
    cu_q: Tensor,
    span: int,
    mask: BlockMask,
    out: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """One span of q [T, Hq, D] over the blocks of keys that its mask names, into out [T, Hq, Dv].

    keys: one segment that is the whole row. cu_q: int32 [S + 1]. Causal, bottom-right.
    """
    heads, dim = q.shape[1:]
    value_dim, kv_heads = out.shape[2], max(keys.groups, keys.k.shape[1])
    index, counts = block_lists(mask.mask)
    tuning = _tuning(q, keys, mask.block, max(16, triton.next_power_of_2(max(dim, value_dim))))
    tiles = mask.mask.shape[1] * (mask.block // tuning.pairs)
    _masked_kernel[(heads, tiles)](
        q, keys.k, keys.v, keys.table, keys.lens, cu_q, index, counts, out,
        *capped(scale, softcap), span, mask.offset, index.shape[2],
        *q.stride()[:2], *out.stride()[:2], *keys.k.stride()[:3], *keys.v.stride()[:3],
        *keys.table.stride()[:2], *keys.lens.stride(),
        GROUP=heads // kv_heads, DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        VDIM=value_dim, BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        PAGE=keys.page_size, BLOCK_M=tuning.pairs, BLOCK_N=tuning.keys, BLOCK=mask.block,
        ROW_PER_HEAD=keys.groups > 1, POOL_HEADS=keys.k.shape[1] > 1,
        ALIKE=mask.mask.shape[0] == 1, SOFTCAP=softcap != 0,
        PRECISION=dot_precision(q.dtype), num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


def _tuning(q: Tensor, keys: Keys, block: int, channels: int) -> Tuning:
    """The dense kernel's launch shape, with tiles that a block holds a whole number of."""
    wide = channels > 128 or q.dtype == torch.float32
    kind = f"{2 * channels} channels of {keys.k.element_size()} bytes"
    best = launch_shape("prefill", kind, PREFILL_WIDE if wide else PREFILL)
    best = best.fitted(2 * channels * keys.k.element_size(), shared_memory_bytes(keys.k.device))
    pairs, size = min(best.pairs, block), min(best.keys, block)
    return Tuning(
        keys=size, pairs=pairs, warps=best.warps if pairs >= 64 else 4, stages=best.stages
    )
