"""What stands between the matrix products of a decoder layer, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32 or wider, rounded to x's dtype."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), (x.shape[-1],), weight.to(wide), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMS norm), both [T, D]; the sum is rounded before it is normed."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of gate_up [T, 2 I] -> [T, I]; "silu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up


def norm_rotate(
    qk: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """RMS norm over each head (where weights are given), then rotation of the leading channels.

    qk: [T, Hq + Hkv, D], the query heads first. cos, sin: [T, 1, R], which turn the pairs
    (i, i + R). Returns a tensor like qk.
    """
    if q_weight is not None and k_weight is not None:
        q, k = qk[:, :q_heads], qk[:, q_heads:]
        qk = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)
    half = cos.shape[-1]
    first, second = qk[..., :half], qk[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, qk[..., 2 * half :]), dim=-1)


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate x [T, H, 2 R] into out, which may be x. cos, sin: [T, 1, R].

    The pair of channel i is i + R; `interleaved`: channels 2 i and 2 i + 1 are a pair.
    """
    half = cos.shape[-1]
    pairs = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (slice(0, half), slice(half, None))
    )
    first, second = x[..., pairs[0]], x[..., pairs[1]]
    turned = first * cos - second * sin, second * cos + first * sin
    out[..., pairs[0]], out[..., pairs[1]] = turned


def latent_rows(
    raw: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """RMS norm of a row's latent, rotation of the rest: raw [T, rank + 2 R] -> [T, rank + 2 R].

    weight: [rank], of the norm. The other arguments are those of `rotate_into`.
    """
    rank = weight.shape[0]
    out = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    out[:, :rank] = rms_norm(raw[:, :rank], weight, eps)
    rotate_into(out[:, None, rank:], raw[:, None, rank:], cos, sin, interleaved)
    return out
