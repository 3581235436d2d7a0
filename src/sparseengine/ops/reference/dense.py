"""Causal attention over keys and values that lie in order, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_LOGITS = 1 << 24  # logits of some queries of all heads that exist at one time


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Attention of a row's last n queries; query i sees the first L - n + i + 1 keys.

    q: [n, Hq, D], k: [L, Hkv, D], v: [L, Hkv, Dv], with L >= n and Hq a multiple of Hkv. Logits x
    are q.k * scale, bounded to softcap * tanh(x / softcap) if softcap is not 0. Softmax in fp32
    (fp64 for fp64 inputs). Returns [n, Hq, Dv] in q's dtype.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_q, length, heads = q.shape[0], k.shape[0], k.shape[1]
    keys = k.to(dtype).permute(1, 2, 0)[:, None]  # [H, 1, D, L]
    values = v.to(dtype).transpose(0, 1)[:, None]  # [H, 1, L, Dv]
    out = q.new_empty(num_q, q.shape[1], v.shape[2])
    tile = max(1, _LOGITS // (q.shape[1] * length))
    key = torch.arange(length, device=q.device)
    for lo in range(0, num_q, tile):
        part = q[lo : lo + tile].to(dtype).transpose(0, 1)
        part = torch.unflatten(part, 0, (heads, -1))  # [H, g, n, D]
        logits = part @ keys * scale
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        last = torch.arange(lo, lo + part.shape[2], device=q.device) + length - num_q
        logits = logits.masked_fill(key > last[:, None], float("-inf"))
        mixed = logits.softmax(-1) @ values  # [H, g, n, Dv]
        out[lo : lo + tile] = mixed.flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out
