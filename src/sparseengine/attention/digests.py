"""Attention to digests: dense products over few pseudo-tokens, beside any backend.

A digest row is short (an eighth of what it stands for), is seen whole by every query behind the
eviction, and gives its entries weights. So no backend need know of it: its result is merged with a
backend's by log-sum-exp, which is exact for a union of key sets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.core.specs import LayerSpec
from sparseengine.core.view import Segment
from sparseengine.ops.reference.scores import soft_capped


class Partial(NamedTuple):
    """Attention of one query over some keys: out [Hkv, g, Dv], lse [Hkv, g], fp32 or fp64."""

    out: Tensor
    lse: Tensor


def _logits(q: Tensor, keys: Tensor, layer: LayerSpec) -> Tensor:
    """q [Hq, D] on keys [Hkv, L, D]: scaled and capped [Hkv, g, L]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).reshape(layer.kv_heads, layer.group_size, -1)
    return soft_capped(grouped @ keys.to(dtype).mT * layer.softmax_scale, layer.softcap)


def row_lse(q: Tensor, keys: Tensor, lens: Tensor, layer: LayerSpec) -> Tensor:
    """Log-sum-exp of one query [Hq, D] over rows [Hkv, L, D] of lens [G] tokens: [Hkv, g]."""
    slot = torch.arange(keys.shape[1], device=q.device)
    dead = (slot >= lens[:, None])[:, None]  # [G, 1, L]
    return _logits(q, keys, layer).masked_fill(dead, float("-inf")).logsumexp(-1)


def attend(q: Tensor, segment: Segment, layer: LayerSpec) -> Partial:
    """One query [Hq, D] over a segment of one span that has weights; -inf where a row is empty."""
    assert segment.log_bias is not None, "a segment of whole tokens is a backend's work"
    bias, lens = segment.log_bias[0], segment.lens[0]
    table, longest = segment.dense_table()[0], bias.shape[1]
    pools = [part[0] for part in segment.payload]
    rows = [ops.gather_rows(p, table, lens, layer.kv_heads, longest) for p in pools]
    keys, values = rows[0], rows[-1][..., : layer.value_dim]
    logits = _logits(q, keys, layer) + bias[:, None]
    dead = (torch.arange(longest, device=q.device) >= lens[:, None])[:, None]
    logits = logits.masked_fill(dead, float("-inf"))
    mass = logits.softmax(-1).masked_fill(dead, 0.0)  # of a row without digests: NaN, else
    return Partial(mass @ values.to(mass.dtype), logits.logsumexp(-1))
