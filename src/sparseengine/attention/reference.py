"""Reference backend: loops and full softmax, every view. The oracle for all other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.core.attention import AttentionNeed, DeviceCaps, Support
from sparseengine.core.cache import CacheManager
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerSpec
from sparseengine.core.view import AttentionView, BlockMask, Segment
from sparseengine.ops.reference.scores import soft_capped


def segment_rows(segment: Segment, span: int, layer: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [H, L, D], values [H, L, Dv], lens [H]) of one span; zeros past a row's length."""
    table, lens = segment.dense_table()[span], segment.lens[span]
    max_len = int(lens.max())
    keys = ops.gather_rows(segment.payload[0][0], table, lens, layer.kv_heads, max_len)
    if segment.values_in_keys:
        values = keys[..., : layer.value_dim]
    else:
        values = ops.gather_rows(segment.payload[1][0], table, lens, layer.kv_heads, max_len)
    return keys, values, lens.expand(layer.kv_heads)


def span_rows(view: AttentionView, span: int, layer: LayerSpec) -> list[tuple[Tensor, Tensor]]:
    """(keys [L_h, D], values [L_h, Dv]) of each KV head of one span, all segments concatenated."""
    parts = [segment_rows(segment, span, layer) for segment in view.segments]
    rows = []
    for h in range(layer.kv_heads):
        keys = torch.cat([k[h, : int(n[h])] for k, _, n in parts])
        values = torch.cat([v[h, : int(n[h])] for _, v, n in parts])
        rows.append((keys, values))
    return rows


class ReferenceBackend:
    """Plain torch, one span and one KV head at a time, in fp32 (fp64 for fp64 queries)."""

    name = "reference"
    graph_safe = False

    def supports(self, need: AttentionNeed, device: DeviceCaps) -> Support:
        if need.codec:
            return Support(False, f"reads raw pages only, not codec {need.codec}")
        if need.deterministic:
            return Support(False, "its bits depend on chunking; the deterministic backend's do not")
        return Support(True, "plain torch runs every view on every device")

    def plan(self, plan: StepPlan, cache: CacheManager) -> None:
        """Nothing to prepare."""

    def run(
        self, q: Tensor, view: AttentionView, layer: LayerSpec, scores: Tensor | None
    ) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(q.shape[0], layer.q_heads, layer.value_dim)
        cu_q = view.cu_q.tolist()
        group = layer.group_size
        for span in range(len(cu_q) - 1):
            lo, hi = cu_q[span], cu_q[span + 1]
            for h, (keys, values) in enumerate(span_rows(view, span, layer)):
                heads = slice(h * group, (h + 1) * group)
                logits = q[lo:hi, heads].to(dtype).transpose(0, 1) @ keys.to(dtype).T  # [g, n, L]
                dead = _dead(hi - lo, keys.shape[0], view.window, q.device)
                if span in view.masks:
                    dead = dead | unread(view.masks[span], heads, hi - lo, keys.shape[0])
                logits = soft_capped(logits * layer.softmax_scale, layer.softcap)
                logits = logits.masked_fill(dead, float("-inf"))
                mass = logits.softmax(-1).masked_fill(dead, 0.0)
                out[lo:hi, heads] = (mass @ values.to(dtype)).transpose(0, 1).to(q.dtype)
        return out


def unread(mask: BlockMask, heads: slice, num_q: int, num_k: int) -> Tensor:
    """bool [g or 1, n, L]: keys that a block mask leaves out for some query heads."""
    blocks = mask.mask if mask.mask.shape[0] == 1 else mask.mask[heads]
    device = blocks.device
    row = (torch.arange(num_q, device=device) + mask.offset) // mask.block
    column = torch.arange(num_k, device=device) // mask.block
    inside = column.clamp_max(blocks.shape[2] - 1)
    return ~blocks[:, row][:, :, inside] | (column > inside)


def _dead(num_q: int, num_k: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, L]: keys that a query does not see; causal is bottom-right aligned."""
    query = torch.arange(num_q, device=device)[:, None] + num_k - num_q
    key = torch.arange(num_k, device=device)
    dead = key > query
    if window is not None:
        dead |= key <= query - window
    return dead
