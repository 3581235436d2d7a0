"""Importance of stored keys: attention mass of given queries, and page summaries; plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine.ops.reference.storage import gather_rows

_BOUNDS_TILE_PAGES = 8192


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), which lies within -cap .. cap; the logits themselves for cap 0."""
    return logits if cap == 0 else (logits / cap).tanh_().mul_(cap)


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
    """Attention mass of a row's last w queries on each of its keys.

    q: [w, Hq, D]. k_pool: [N, Hs, P, D]. table: int32 [G, W]. lens: int32 [G], this chunk included.
    Query i sees the first lens - w + i + 1 keys (causal, bottom-right). Softmax in fp32 (fp64 for
    fp64 inputs) over all keys it sees, of scaled logits x or, with `softcap` c, of c tanh(x / c);
    then the sum or the max over the queries.
    Returns fp32 [Hq, max_len], zero past a row's length.
    """
    window, q_heads, _ = q.shape
    kv_heads = max(table.shape[0], k_pool.shape[1])
    dtype = _compute_dtype(q)
    keys = gather_rows(k_pool, table, lens, kv_heads, max_len).to(dtype)  # [H, L, D]
    rows = lens.to(q.device).expand(kv_heads)
    visible = rows[:, None] - window + 1 + torch.arange(window, device=q.device)  # [H, w]
    dead = torch.arange(max_len, device=q.device) >= visible[..., None]  # [H, w, L]
    group = q_heads // kv_heads
    out = torch.empty(q_heads, max_len, dtype=dtype, device=q.device)
    for h in range(kv_heads):  # one KV head at a time bounds the scratch memory
        heads = slice(h * group, (h + 1) * group)
        logits = q[:, heads].to(dtype).transpose(0, 1) @ keys[h].T * scale  # [g, w, L]
        mass = soft_capped(logits, softcap).masked_fill(dead[h], float("-inf")).softmax(-1)
        mass = mass.masked_fill(dead[h], 0.0)  # queries that see no key: NaN rows become zero
        out[heads] = mass.sum(1) if reduce == "sum" else mass.amax(1)
    return out


def page_bounds(k_pool: Tensor, pages: Tensor, kmin: Tensor, kmax: Tensor) -> None:
    """Channel-wise bounds of whole pages: kmin[pages], kmax[pages] = min, max over the P slots.

    k_pool: [N, Hs, P, D]. pages: int64 [M]. kmin, kmax: [N, Hs, D], K's dtype: nothing is rounded.
    """
    for part in torch.split(pages, _BOUNDS_TILE_PAGES):
        low, high = k_pool[part].aminmax(dim=2)
        kmin[part], kmax[part] = low.to(kmin.dtype), high.to(kmax.dtype)


def page_scores(q: Tensor, kmin: Tensor, kmax: Tensor, table: Tensor, group_size: int) -> Tensor:
    """Upper bound of q.k over each page, the largest of a group's query heads.

    q: [S, Hq, D]. kmin, kmax: [N, Hs, D]. table: int32 [S, G, W].
    Returns fp32 [S, Hkv, W]: max over the group of sum_d max(q_d kmin_d, q_d kmax_d).
    Columns whose page is not summarised hold whatever its bounds give, NaN included: mask them.
    """
    spans, q_heads, dim = q.shape
    kv_heads = q_heads // group_size
    dtype = _compute_dtype(q)
    heads = torch.arange(kv_heads, device=q.device)
    inner = heads if kmin.shape[1] > 1 else torch.zeros_like(heads)
    pages = table.long().expand(spans, kv_heads, -1)  # [S, H, W]
    low = kmin[pages, inner[:, None]].to(dtype)  # [S, H, W, D]
    high = kmax[pages, inner[:, None]].to(dtype)
    grouped = q.to(dtype).reshape(spans, kv_heads, group_size, dim)
    # max(q_d kmin_d, q_d kmax_d) takes kmax where q_d > 0 and kmin elsewhere: two products, no
    # [S, H, g, W, D] intermediate.
    scores = grouped.clamp_min(0) @ high.mT + grouped.clamp_max(0) @ low.mT  # [S, H, g, W]
    return scores.amax(2)
