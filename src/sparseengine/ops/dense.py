"""Causal attention over plain tensors by torch's fused operators. Twin: `ops/reference/dense.py`.

The chunk's own keys are a causal square; the keys before it are seen by every query, so that they
need no mask. Both parts are computed apart and merged by their log-sum-exp: torch's causal mask is
top-left aligned, and no masked half is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_MAX_DIM = 256
# cuDNN runs large parts more than twice as fast as torch's flash attention, but plans every new
# pair of lengths for 50 to 90 ms. Parts of fewer operations than this win less back in a model.
_CUDNN_OPERATIONS = 4e11


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """q [n, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv] -> [n, Hq, Dv]; None where torch has no operator.

    Heads of different sizes are padded to the wider one where the operator wants equal ones.
    """
    num_q, old = q.shape[0], k.shape[0] - q.shape[0]
    if q.device.type == "cpu":
        if q.dtype not in _CPU_DTYPES:
            return None
    elif q.dtype not in _CUDA_DTYPES or max(q.shape[2], v.shape[2]) > _CUDA_MAX_DIM:
        return None
    if num_q == 0:
        return q.new_empty(0, q.shape[1], v.shape[2])
    query, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, n, D]
    value_dim = v.shape[2]
    own = keys[:, :, old:], values[:, :, old:]
    out, lse = _fused(query, *own, scale, causal=True)
    if old:
        earlier = keys[:, :, :old], values[:, :, :old]
        old_out, old_lse = _fused(query, *earlier, scale, causal=False)
        # The old keys' weight is near 1 behind a long text: rounded to 16 bits, 1 - weight is lost.
        wide = torch.promote_types(out.dtype, torch.float32)
        share = torch.sigmoid(old_lse - lse).unsqueeze(-1)
        out = torch.lerp(out.to(wide), old_out.to(wide), share.to(wide)).to(q.dtype)
    return out[0, ..., :value_dim].transpose(0, 1)


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """([1, Hq, n, >= Dv], log-sum-exp [1, Hq, n]); a causal part has as many keys as queries."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        query, keys, values = _equal_widths(query, keys, values)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, scale=scale
        )
        return out, lse
    keys, values = _repeated(keys, query.shape[1]), _repeated(values, query.shape[1])
    if _takes_cudnn(query, keys, values, causal):
        found: Any = aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, causal, False, scale=scale
        )
        return found[0], found[1].reshape(query.shape[:3])
    query, keys, values = _equal_widths(query, keys, values)
    found = aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def _takes_cudnn(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> bool:
    _, heads, num_q, dim = query.shape
    pairs = num_q * keys.shape[2] / (2 if causal else 1)
    if 2 * heads * pairs * (dim + values.shape[3]) < _CUDNN_OPERATIONS:
        return False
    params = torch.backends.cuda.SDPAParams(query, keys, values, None, 0.0, causal, False)
    return torch.backends.cuda.can_use_cudnn_attention(params, False)


def _equal_widths(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero channels change neither products nor the results that are kept."""
    width = max(query.shape[3], values.shape[3])
    query, keys, values = (
        x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))
        for x in (query, keys, values)
    )
    return query, keys, values


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[1, Hkv, L, D] -> [1, Hq, L, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
