"""Deterministic backend: the bits of a query's output depend on its row alone.

Every query is computed by matrix products of one fixed shape: a tile of 16 queries against a tile
of 64 keys, all KV heads together. Tiles are anchored at the row, not at the chunk:

      keys      0         64        128        192
                |---------|---------|---------|       online softmax, left to right
      queries   query with index i of its row sits in line i % 16 of its tile, always

so neither the batch, nor where a chunk was cut, nor what else sits in the tile changes its bits.
Keys a query does not see get probability 0 exactly and leave its sums as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine.attention.reference import segment_rows
from sparseengine.core.attention import AttentionNeed, DeviceCaps, Support
from sparseengine.core.cache import CacheManager
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerSpec
from sparseengine.core.view import AttentionView
from sparseengine.ops.reference.scores import soft_capped

_TILE_QUERIES = 16
_TILE_KEYS = 64
WINDOW_ALIGN = _TILE_KEYS  # where rows that lose leading pages must start, for tiles to stay put


class DeterministicBackend:
    """Fixed tiles of 16 queries x 64 keys in plain torch, fp32 (fp64 for fp64 queries)."""

    name = "deterministic"
    graph_safe = False

    def supports(self, need: AttentionNeed, device: DeviceCaps) -> Support:
        if need.codec:
            return Support(False, f"reads raw pages only, not codec {need.codec}")
        if need.block_masks:
            return Support(False, "reads all keys: it has no sparse prefill")
        return Support(True, "fixed 16 x 64 tiles: bits depend neither on batch nor on chunking")

    def plan(self, plan: StepPlan, cache: CacheManager) -> None:
        """Nothing to prepare."""

    def run(
        self, q: Tensor, view: AttentionView, layer: LayerSpec, scores: Tensor | None
    ) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.empty(
            q.shape[0], layer.q_heads, layer.value_dim, dtype=q.dtype, device=q.device
        )
        cu_q = view.cu_q.tolist()
        for span in range(len(cu_q) - 1):
            lo, hi = cu_q[span], cu_q[span + 1]
            keys, values, lens = _padded_rows(view, span, layer, dtype)
            first = int(lens[0]) - (hi - lo)  # row index of the span's first query, by head 0
            at = lo
            while at < hi:
                line = (first + at - lo) % _TILE_QUERIES
                stop = min(at + _TILE_QUERIES - line, hi)
                # How far each query of the tile looks, per KV head: [H, 16]
                visible = lens[:, None] - (hi - at) + 1 - line
                visible = visible + torch.arange(_TILE_QUERIES, device=q.device)
                tile = _query_tile(q[at:stop].to(dtype), line, layer)
                result = _tile_attention(tile, keys, values, visible, view.window, layer)
                result = result.reshape(layer.kv_heads, layer.group_size, _TILE_QUERIES, -1)
                result = result.permute(2, 0, 1, 3)[line : line + stop - at]
                out[at:stop] = result.flatten(1, 2).to(q.dtype)
                at = stop
        return out


def _query_tile(q: Tensor, line: int, layer: LayerSpec) -> Tensor:
    """Queries [n, Hq, D] at lines line.. of a zero tile [Hkv, g * 16, D]."""
    tile = q.new_zeros(layer.kv_heads, layer.group_size, _TILE_QUERIES, q.shape[2])
    grouped = q.reshape(q.shape[0], layer.kv_heads, layer.group_size, q.shape[2])
    tile[:, :, line : line + q.shape[0]] = grouped.permute(1, 2, 0, 3)
    return tile.flatten(1, 2)


def _padded_rows(
    view: AttentionView, span: int, layer: LayerSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [H, L, D], values [H, L, Dv], lens [H]): segments joined, L a multiple of 64."""
    parts = [segment_rows(segment, span, layer) for segment in view.segments]
    lens = torch.stack([n for _, _, n in parts]).sum(0)
    tiles = -(-int(lens.max()) // _TILE_KEYS)
    keys = parts[0][0].new_zeros(layer.kv_heads, tiles * _TILE_KEYS, layer.head_dim, dtype=dtype)
    values = keys.new_zeros(layer.kv_heads, tiles * _TILE_KEYS, layer.value_dim)
    for h in range(layer.kv_heads):
        at = 0
        for k, v, n in parts:
            stop = at + int(n[h])
            keys[h, at:stop], values[h, at:stop] = k[h, : stop - at], v[h, : stop - at]
            at = stop
    return keys, values, lens


def _tile_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    window: int | None,
    layer: LayerSpec,
) -> Tensor:
    """q [H, g * 16, D]; keys [H, L, D], values [H, L, Dv]; visible [H, 16] -> [H, g * 16, Dv]."""
    visible = visible.repeat(1, layer.group_size)[..., None]  # [H, g * 16, 1]
    peak = q.new_full((*q.shape[:2], 1), float("-inf"))
    norm = q.new_zeros(*q.shape[:2], 1)
    acc = q.new_zeros(*q.shape[:2], layer.value_dim)
    for n0 in range(0, min(keys.shape[1], int(visible.max())), _TILE_KEYS):
        n = torch.arange(n0, n0 + _TILE_KEYS, device=q.device)
        k, v = keys[:, n0 : n0 + _TILE_KEYS], values[:, n0 : n0 + _TILE_KEYS]
        logits = torch.bmm(q, k.contiguous().mT) * layer.softmax_scale
        logits = soft_capped(logits, layer.softcap)
        dead = n >= visible
        if window is not None:
            dead = dead | (n < visible - window)
        logits = logits.masked_fill(dead, float("-inf"))
        new = torch.maximum(peak, logits.amax(-1, keepdim=True))
        base = torch.where(new.isneginf(), torch.zeros_like(new), new)
        mass = (logits - base).exp()
        alpha = (peak - base).exp()
        norm = norm * alpha + mass.sum(-1, keepdim=True)
        acc = acc * alpha + torch.bmm(mass, v.contiguous())
        peak = new
    return acc / torch.where(norm > 0, norm, torch.ones_like(norm))
