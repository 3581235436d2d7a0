# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""What stands between the matrix products of a decoder layer, one kernel each.

A decode step of a few hundred tokens is bound by the number of kernels, not by their bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 4  # heads that one program of norm_rotate takes


@triton.jit
def _norm_kernel(
    x, residual, weight, total, out, eps, x_st, r_st,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < SIZE
    y = tl.load(x + row * x_st + d, mask=ok, other=0.0)
    if ADD:
        y = (y.to(tl.float32) + tl.load(residual + row * r_st + d, mask=ok, other=0.0)).to(y.dtype)
        tl.store(total + row * SIZE + d, y, mask=ok)
    y = y.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
    y = y * tl.load(weight + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + d, y.to(out.dtype.element_ty), mask=ok)


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], channels contiguous, -> its RMS norm."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        block = triton.next_power_of_2(size)
        _norm_kernel[(flat.shape[0],)](
            flat, flat, weight, flat, out, eps, flat.stride(0), 0,
            SIZE=size, BLOCK=block, ADD=False, num_warps=_warps(block),
        )  # fmt: skip
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMS norm), both [T, D]."""
    rows, size = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(size)
        _norm_kernel[(rows,)](
            x, residual, weight, total, out, eps, x.stride(0), residual.stride(0),
            SIZE=size, BLOCK=block, ADD=True, num_warps=_warps(block),
        )  # fmt: skip
    return total, out


@triton.jit
def _gated_kernel(gate_up, out, size, stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < size
    gate = tl.load(gate_up + row * stride + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + i, mask=ok, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate * tl.sigmoid(2 * inner)  # (1 + tanh z) / 2 is sigmoid(2 z)
    else:
        y = gate * tl.sigmoid(gate)
    tl.store(out + row * size + i, (y * up).to(out.dtype.element_ty), mask=ok)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of gate_up [T, 2 I] -> [T, I]; "silu" or "gelu_tanh"."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, triton.next_power_of_2(size))
        _gated_kernel[(rows, triton.cdiv(size, block))](
            gate_up, out, size, gate_up.stride(0), GELU=activation != "silu", BLOCK=block
        )
    return out


@triton.jit
def _head_weight(q_weight, k_weight, is_q, channel, SIZE: tl.constexpr):
    """fp32 [heads, channels]: the query heads' weight or the key heads'."""
    wq = tl.load(q_weight + channel, mask=channel < SIZE, other=0.0).to(tl.float32)
    wk = tl.load(k_weight + channel, mask=channel < SIZE, other=0.0).to(tl.float32)
    return tl.where(is_q, wq[None, :], wk[None, :])


@triton.jit
def _norm_rotate_kernel(
    qk, cos, sin, q_weight, k_weight, out, eps, qk_st, qk_sh,
    HEADS: tl.constexpr, Q_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: channels [0, HALF), [HALF, 2 HALF) turn, [2 HALF, DIM) pass."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    live = heads < HEADS
    turns = live[:, None] & (r < HALF)[None, :]
    rest = live[:, None] & (p < DIM - 2 * HALF)[None, :]
    at = qk + token * qk_st + heads[:, None] * qk_sh
    a = tl.load(at + r[None, :], mask=turns, other=0.0).to(tl.float32)
    b = tl.load(at + HALF + r[None, :], mask=turns, other=0.0).to(tl.float32)
    c = tl.zeros([BLOCK_H, BLOCK_P], tl.float32)
    if DIM > 2 * HALF:
        c = tl.load(at + 2 * HALF + p[None, :], mask=rest, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        scale = tl.rsqrt(square / DIM + eps)[:, None]
        is_q = (heads < Q_HEADS)[:, None]
        dtype = out.dtype.element_ty
        wa = _head_weight(q_weight, k_weight, is_q, r, HALF)
        wb = _head_weight(q_weight + HALF, k_weight + HALF, is_q, r, HALF)
        a = (a * scale * wa).to(dtype).to(tl.float32)  # the twin rounds between norm and rotation
        b = (b * scale * wb).to(dtype).to(tl.float32)
        if DIM > 2 * HALF:
            wc = _head_weight(
                q_weight + 2 * HALF, k_weight + 2 * HALF, is_q, p, DIM - 2 * HALF
            )  # fmt: skip
            c = c * scale * wc
    x = tl.load(cos + token * HALF + r, mask=r < HALF, other=0.0).to(tl.float32)[None, :]
    y = tl.load(sin + token * HALF + r, mask=r < HALF, other=0.0).to(tl.float32)[None, :]
    to = out + (token * HEADS + heads[:, None]) * DIM
    tl.store(to + r[None, :], (a * x - b * y).to(out.dtype.element_ty), mask=turns)
    tl.store(to + HALF + r[None, :], (b * x + a * y).to(out.dtype.element_ty), mask=turns)
    if DIM > 2 * HALF:
        tl.store(to + 2 * HALF + p[None, :], c.to(out.dtype.element_ty), mask=rest)


def norm_rotate(
    qk: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """See the twin. cos and sin are contiguous [T, 1, R]."""
    tokens, heads, dim = qk.shape
    half, has_norm = cos.shape[-1], q_weight is not None
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    if tokens:
        _norm_rotate_kernel[(tokens, triton.cdiv(heads, _HEADS))](
            qk, cos, sin, q_weight if has_norm else qk, k_weight if has_norm else qk, out, eps,
            *qk.stride()[:2], HEADS=heads, Q_HEADS=q_heads, DIM=dim, HALF=half,
            BLOCK_R=triton.next_power_of_2(half),
            BLOCK_P=triton.next_power_of_2(max(1, dim - 2 * half)), BLOCK_H=_HEADS,
            NORM=has_norm, num_warps=1 if dim <= 128 else 2,
        )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, x_st, x_sh, out_st, out_sh,
    HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads, r = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R)
    ok = (heads < HEADS)[:, None] & (r < HALF)[None, :]
    one, two = (2 * r, 2 * r + 1) if INTERLEAVED else (r, HALF + r)
    at, to = (
        x + token * x_st + heads[:, None] * x_sh,
        out + token * out_st + heads[:, None] * out_sh,
    )
    a = tl.load(at + one[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(at + two[None, :], mask=ok, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + r, mask=r < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * HALF + r, mask=r < HALF, other=0.0).to(tl.float32)[None, :]
    tl.store(to + one[None, :], (a * c - b * s).to(out.dtype.element_ty), mask=ok)
    tl.store(to + two[None, :], (b * c + a * s).to(out.dtype.element_ty), mask=ok)


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """See the twin. Channels of x and out are contiguous, as cos and sin are."""
    tokens, heads, _ = x.shape
    half, block_h = cos.shape[-1], 8
    if tokens:
        _rotate_kernel[(tokens, triton.cdiv(heads, block_h))](
            x, cos, sin, out, *x.stride()[:2], *out.stride()[:2],
            HEADS=heads, HALF=half, INTERLEAVED=interleaved,
            BLOCK_R=triton.next_power_of_2(half), BLOCK_H=block_h, num_warps=1,
        )  # fmt: skip


@triton.jit
def _latent_rows_kernel(
    raw, weight, cos, sin, out, eps, raw_st,
    RANK: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d, r = tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    y = tl.load(raw + token * raw_st + d, mask=d < RANK, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / RANK + eps)
    y = y * tl.load(weight + d, mask=d < RANK, other=0.0).to(tl.float32)
    to = out + token * (RANK + 2 * HALF)
    tl.store(to + d, y.to(out.dtype.element_ty), mask=d < RANK)
    one, two = (2 * r, 2 * r + 1) if INTERLEAVED else (r, HALF + r)
    ok, at = r < HALF, raw + token * raw_st + RANK
    a = tl.load(at + one, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(at + two, mask=ok, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + r, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + r, mask=ok, other=0.0).to(tl.float32)
    tl.store(to + RANK + one, (a * c - b * s).to(out.dtype.element_ty), mask=ok)
    tl.store(to + RANK + two, (b * c + a * s).to(out.dtype.element_ty), mask=ok)


def latent_rows(
    raw: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """See the twin. Channels of raw are contiguous, as cos and sin are."""
    rank, half = weight.shape[0], cos.shape[-1]
    out = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    if raw.shape[0]:
        block = triton.next_power_of_2(rank)
        _latent_rows_kernel[(raw.shape[0],)](
            raw, weight, cos, sin, out, eps, raw.stride(0),
            RANK=rank, HALF=half, INTERLEAVED=interleaved, BLOCK=block,
            BLOCK_R=triton.next_power_of_2(half), num_warps=_warps(block),
        )  # fmt: skip
    return out
