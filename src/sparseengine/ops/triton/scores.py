# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""Kernels that score stored keys and pages. Twins: `ops/reference/scores.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseengine.ops.triton.attention import capped, soft_cap
from sparseengine.ops.triton.launch import dot_precision, multiprocessors

_LN2 = 0.6931471805599453


@triton.jit
def key_tile(
    k, table, n, bound, k_sn, k_sp,
    d0, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Channels d0.. of the keys of row slots n: [BLOCK_N, BLOCK_D], zeros at and past `bound`.

    Slots at and past `bound` are never read.
    """
    d = d0 + tl.arange(0, BLOCK_D)
    ok = n < bound
    page = tl.load(table + n // PAGE, mask=ok, other=0).to(tl.int64)
    at = page * k_sn + (n % PAGE) * k_sp
    return tl.load(k + at[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def query_tile(q, at, ok, d0, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Channels d0.. of the queries that start at `at`: [BLOCK_M, BLOCK_D], zeros where not ok."""
    d = d0 + tl.arange(0, BLOCK_D)
    return tl.load(q + at[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def wide_products(
    q, at, ok, k, table, n, bound, k_sn, k_sp,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q.k [BLOCK_M, BLOCK_N] of heads with more channels than a tile holds."""
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for d0 in tl.range(0, DIM, BLOCK_D, num_stages=2):
        x = query_tile(q, at, ok, d0, DIM, BLOCK_D)
        keys = key_tile(k, table, n, bound, k_sn, k_sp, d0, PAGE, DIM, BLOCK_D)
        s = tl.dot(x, tl.trans(keys), s, input_precision=PRECISION)
    return s


def channel_block(dim: int) -> int:
    """Channels of a tile: a head's, as long as queries and keys fit the shared memory whole."""
    return max(16, int(triton.next_power_of_2(dim))) if dim <= _WHOLE_DIM else _PART_DIM


_WHOLE_DIM, _PART_DIM = 256, 64
_VARYING = ["table_sg", "lens_sg", "window"]  # no new variant of a kernel when they change


@triton.jit(
    do_not_specialize=[*_VARYING, "num_splits"], do_not_specialize_on_alignment=["table", "lens"]
)
def _mass_lse_kernel(
    q, k, table, lens, part, window, num_splits, scale, cap,
    q_st, q_sh, k_sn, k_sh, k_sp, table_sg, lens_sg,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, POOL_HEADS: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass 1: log-sum-exp (log2 units) of every query over one split of the keys.

    part: [Hkv, splits, g * w].
    """
    head, split = tl.program_id(0), tl.program_id(1)
    row = head if ROW_PER_HEAD else 0
    length = tl.load(lens + row * lens_sg)
    table += row * table_sg
    if POOL_HEADS:
        k += head * k_sh
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = m % window
    ok = m < GROUP * window
    at = i * q_st + (head * GROUP + m // window) * q_sh
    x = query_tile(q, at, ok, 0, DIM, BLOCK_D)  # unused, and so not read, for wider heads
    visible = length - window + i + 1
    size = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    lo = split * size
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for n0 in range(lo, tl.minimum(lo + size, length), BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        if DIM > BLOCK_D:
            s = wide_products(
                q, at, ok, k, table, n, length, k_sn, k_sp,
                PAGE, DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
        else:
            keys = key_tile(k, table, n, length, k_sn, k_sp, 0, PAGE, DIM, BLOCK_D)
            s = tl.dot(x, tl.trans(keys), input_precision=PRECISION)
        s = soft_cap(s, scale, cap, SOFTCAP)
        s = tl.where(n[None, :] < visible[:, None], s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
        peak = new
    lse = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(part + (head * num_splits + split) * GROUP * window + m, lse, mask=ok)


@triton.jit(
    do_not_specialize=[*_VARYING, "max_len"], do_not_specialize_on_alignment=["table", "lens"]
)
def _mass_reduce_kernel(
    q, k, table, lens, lse, out, window, max_len, scale, cap,
    q_st, q_sh, k_sn, k_sh, k_sp, table_sg, lens_sg,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, POOL_HEADS: tl.constexpr, USE_MAX: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass 2: one program owns a tile of keys and loops over the queries, so nothing is atomic."""
    head = tl.program_id(0)
    row = head if ROW_PER_HEAD else 0
    length = tl.load(lens + row * lens_sg)
    table += row * table_sg
    if POOL_HEADS:
        k += head * k_sh
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = tl.trans(key_tile(k, table, n, length, k_sn, k_sp, 0, PAGE, DIM, BLOCK_D))
    for g in range(GROUP):
        acc = tl.zeros([BLOCK_N], tl.float32)
        for i0 in range(0, window, BLOCK_M):
            i = i0 + tl.arange(0, BLOCK_M)
            ok = i < window
            at = i * q_st + (head * GROUP + g) * q_sh
            norm = tl.load(lse + (head * GROUP + g) * window + i, mask=ok, other=float("-inf"))
            if DIM > BLOCK_D:
                s = wide_products(
                    q, at, ok, k, table, n, length, k_sn, k_sp,
                    PAGE, DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
                )  # fmt: skip
            else:
                x = query_tile(q, at, ok, 0, DIM, BLOCK_D)
                s = tl.dot(x, keys, input_precision=PRECISION)
            s = soft_cap(s, scale, cap, SOFTCAP)
            seen = ok[:, None] & (n[None, :] < (length - window + i + 1)[:, None])
            seen = seen & (n < length)[None, :]
            norm = tl.where(norm == float("-inf"), 0.0, norm)
            p = tl.where(seen, tl.exp2(s - norm[:, None]), 0.0)
            if USE_MAX:
                acc = tl.maximum(acc, tl.max(p, 0))
            else:
                acc += tl.sum(p, 0)
        at = (head * GROUP + g).to(tl.int64) * max_len + n
        tl.store(out + at, acc, mask=n < max_len)


def window_scores(
    q: Tensor,
    k_pool: Tensor,
    table: Tensor,
    lens: Tensor,
    max_len: int,
    scale: float,
    reduce: str = "sum",
    softcap: float = 0.0,
) -> Tensor:
    """Attention mass of a row's last queries q [w, Hq, D] on its keys: fp32 [Hq, max_len].

    Two passes over the keys, no atomics: the same bits every time.
    """
    window, q_heads, dim = q.shape
    kv_heads = max(table.shape[0], k_pool.shape[1])
    group = q_heads // kv_heads
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q_heads, max_len, dtype=torch.float32, device=q.device)
    if max_len == 0:
        return out
    block_n, block_m = 64, 64
    tiles = triton.cdiv(group * window, block_m)
    wanted = triton.cdiv(4 * multiprocessors(q.device), kv_heads * tiles)
    splits = max(1, min(wanted, 64, triton.cdiv(max_len, 4 * block_n)))
    part = torch.empty(kv_heads, splits, group * window, dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:2], *k_pool.stride()[:3], table.stride(0), lens.stride(0))
    shape: dict[str, Any] = {
        "GROUP": group,
        "PAGE": k_pool.shape[2],
        "DIM": dim,
        "BLOCK_D": channel_block(dim),
        "BLOCK_N": block_n,
        "ROW_PER_HEAD": table.shape[0] > 1,
        "POOL_HEADS": k_pool.shape[1] > 1,
        "SOFTCAP": softcap != 0,
        "PRECISION": dot_precision(q.dtype),
        "num_warps": 4,
    }
    logits = capped(scale, softcap)
    _mass_lse_kernel[(kv_heads, splits, tiles)](
        q, k_pool, table, lens, part, window, splits, *logits, *strides, BLOCK_M=block_m, **shape
    )
    lse = (part * _LN2).logsumexp(1) / _LN2  # [Hkv, g * w]
    block_w = max(16, min(64, triton.next_power_of_2(window)))
    _mass_reduce_kernel[(kv_heads, triton.cdiv(max_len, block_n))](
        q, k_pool, table, lens, lse, out, window, max_len, *logits, *strides,
        BLOCK_M=block_w, USE_MAX=reduce == "max", **shape,
    )  # fmt: skip
    return out


@triton.jit
def _page_bounds_kernel(
    k, pages, kmin, kmax, k_sn, k_sh, k_sp, b_sn, b_sh,
    PAGE: tl.constexpr, BLOCK_P: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    page = tl.load(pages + tl.program_id(0))
    head = tl.program_id(1)
    p, d = tl.arange(0, BLOCK_P), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = (p < PAGE)[:, None] & (d < DIM)[None, :]
    at = k + page * k_sn + head * k_sh + p[:, None] * k_sp + d[None, :]
    to = page * b_sn + head * b_sh + d
    low = tl.min(tl.load(at, mask=ok, other=float("inf")).to(tl.float32), 0)
    high = tl.max(tl.load(at, mask=ok, other=float("-inf")).to(tl.float32), 0)
    tl.store(kmin + to, low.to(kmin.dtype.element_ty), mask=d < DIM)
    tl.store(kmax + to, high.to(kmax.dtype.element_ty), mask=d < DIM)


def page_bounds(k_pool: Tensor, pages: Tensor, kmin: Tensor, kmax: Tensor) -> None:
    """Channel-wise min and max of whole pages, int64 [M] ids, into [N, Hs, D] bounds."""
    if pages.numel() == 0:
        return
    if kmin.stride() != kmax.stride() or kmin.stride(2) != 1 or k_pool.stride(3) != 1:
        raise ValueError("kmin and kmax need equal strides, and channels must be contiguous")
    dim = k_pool.shape[3]
    block = min(channel_block(dim), 128)
    _page_bounds_kernel[(pages.numel(), k_pool.shape[1], triton.cdiv(dim, block))](
        k_pool, pages.contiguous(), kmin, kmax, *k_pool.stride()[:3], *kmin.stride()[:2],
        PAGE=k_pool.shape[2], BLOCK_P=triton.next_power_of_2(k_pool.shape[2]),
        DIM=dim, BLOCK_D=block, num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_ss", "table_sg", "width"], do_not_specialize_on_alignment=["table"]
)
def _page_scores_kernel(
    q, kmin, kmax, table, out, width,
    q_st, q_sh, b_sn, b_sh, table_ss, table_sg,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    ROW_PER_HEAD: tl.constexpr, POOL_HEADS: tl.constexpr, ONE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    span, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    row = head if ROW_PER_HEAD else 0
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    g = tl.arange(0, BLOCK_G)
    at = span * q_st + (head * GROUP + g) * q_sh
    page = tl.load(table + span * table_ss + row * table_sg + w, mask=w < width, other=0)
    to = page.to(tl.int64) * b_sn + (head * b_sh if POOL_HEADS else 0)
    s = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    for d0 in tl.range(0, DIM, BLOCK_D, num_stages=1):
        d = d0 + tl.arange(0, BLOCK_D)
        x = query_tile(q, at, g < GROUP, d0, DIM, BLOCK_D)
        zero = tl.zeros_like(x)
        ok = (w < width)[:, None] & (d < DIM)[None, :]
        high = tl.load(kmax + to[:, None] + d[None, :], mask=ok, other=0.0)
        if ONE:  # the bounds are one tensor
            s = tl.dot(x, tl.trans(high), s, input_precision=PRECISION)
        else:
            low = tl.load(kmin + to[:, None] + d[None, :], mask=ok, other=0.0)
            # q_d takes the page's maximum where it is positive and the minimum elsewhere.
            s = tl.dot(tl.where(x > 0, x, zero), tl.trans(high), s, input_precision=PRECISION)
            s = tl.dot(tl.where(x > 0, zero, x), tl.trans(low), s, input_precision=PRECISION)
    s = tl.max(tl.where((g < GROUP)[:, None], s, float("-inf")), 0)
    tl.store(out + (span * KV_HEADS + head) * width + w, s, mask=w < width)


def page_scores(q: Tensor, kmin: Tensor, kmax: Tensor, table: Tensor, group_size: int) -> Tensor:
    """Upper bound of q.k over each page of each row: fp32 [S, Hkv, W]."""
    spans, q_heads, dim = q.shape
    kv_heads, width = q_heads // group_size, table.shape[2]
    out = torch.empty(spans, kv_heads, width, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    if kmin.stride() != kmax.stride() or kmin.stride(2) != 1:
        raise ValueError("kmin and kmax need equal strides, and channels must be contiguous")
    q = q if q.stride(2) == 1 else q.contiguous()
    table = table if table.stride(2) == 1 else table.contiguous()
    q = q.to(kmin.dtype)
    _page_scores_kernel[(spans * kv_heads, triton.cdiv(width, 64))](
        q, kmin, kmax, table, out, width,
        *q.stride()[:2], *kmin.stride()[:2], *table.stride()[:2],
        KV_HEADS=kv_heads, GROUP=group_size, BLOCK_G=max(16, triton.next_power_of_2(group_size)),
        DIM=dim, BLOCK_D=channel_block(dim), BLOCK_W=64,
        ROW_PER_HEAD=table.shape[1] > 1, POOL_HEADS=kmin.shape[1] > 1,
        ONE=kmin.data_ptr() == kmax.data_ptr(), PRECISION=dot_precision(q.dtype), num_warps=4,
    )  # fmt: skip
    return out
