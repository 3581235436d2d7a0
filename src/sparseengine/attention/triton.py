"""Triton backend: split-KV decode and paged prefill kernels over head pages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseengine.core.attention import AttentionNeed, DeviceCaps, Support
from sparseengine.core.cache import CacheManager
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView, PackedTable, Segment
from sparseengine.ops import merge_lse

if TYPE_CHECKING:
    from sparseengine.ops.triton.keys import Keys

_MAX_DIM = 256  # wider rows do not fit the registers of one program
_MAX_LATENT = (576, 512)  # channels of a latent row and of its values, which are the row's first
_MIN_ARCH = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LN2 = 0.6931471805599453


class TritonBackend:
    """The view's first `num_single` spans take the split-KV kernel, the rest the prefill kernel.

    Latent rows have one kernel for both, which reads a row once for keys and values.

    Bits depend on batch and chunking: the number of splits does.
    """

    name = "triton"
    graph_safe = True

    def supports(self, need: AttentionNeed, device: DeviceCaps) -> Support:
        layer = need.layer
        dims = (layer.head_dim, layer.value_dim)
        if not device.has_triton:
            return Support(False, "Triton is not installed")
        if device.kind != "cuda" and not device.interpreted:
            return Support(False, "Triton kernels need a CUDA device (or TRITON_INTERPRET=1)")
        if device.arch is not None and device.arch < _MIN_ARCH:
            return Support(False, f"needs compute capability >= 8.0, this device has {device.arch}")
        if need.codec:
            return Support(False, f"reads raw pages only, not codec {need.codec}")
        if need.deterministic:
            return Support(False, "its bits depend on batch size: the number of splits does")
        if need.dtype not in _DTYPES:
            return Support(False, f"dtype {need.dtype} is not bfloat16, float16 or float32")
        if layer.kind is LayerKind.LATENT:
            if need.block_masks:
                return Support(False, "the kernel of latent rows reads all keys: no sparse prefill")
            return _latent_support(dims, need.dtype)
        if max(dims) > _MAX_DIM:
            return Support(False, f"head dims {dims} exceed {_MAX_DIM} channels")
        return Support(True, f"paged Triton kernels for {need.dtype}, head dims {dims}")

    def plan(self, plan: StepPlan, cache: CacheManager) -> None:
        """Nothing to prepare: launches are sized by the view's host facts."""

    def run(
        self, q: Tensor, view: AttentionView, layer: LayerSpec, scores: Tensor | None
    ) -> Tensor:
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty(
            q.shape[0], layer.q_heads, layer.value_dim, dtype=q.dtype, device=q.device
        )
        singles, spans = view.num_single, view.cu_q.shape[0] - 1
        if layer.kind is LayerKind.LATENT:
            self._latent(q, view, layer, out)
            return out
        if singles:
            self._decode(q[:singles], view, layer, out[:singles])
        for first, stop in _dense_runs(view, spans):
            self._prefill(q, _cut(view, first, stop), layer, out)
        for span in view.masks:
            self._masked(q, view, span, layer, out)
        return out

    def _decode(self, q: Tensor, view: AttentionView, layer: LayerSpec, out: Tensor) -> None:
        from sparseengine.ops.triton.attention import paged_decode

        keys = _keys(view, layer, walks_packed=True)
        cap = layer.softcap
        paged_decode(q, keys, out, layer.softmax_scale, view.window, view.max_len, cap)

    def _latent(self, q: Tensor, view: AttentionView, layer: LayerSpec, out: Tensor) -> None:
        from sparseengine.ops.triton.latent import paged_latent

        keys, singles = _keys(view, layer, walks_packed=True), view.num_single
        logits = layer.softmax_scale, layer.softcap
        if singles:
            few = view.cu_q[: singles + 1]
            paged_latent(
                q[:singles], keys, few, out[:singles], *logits, max_q=1, max_len=view.max_len
            )
        paged_latent(
            q[singles:], keys, view.cu_q, out[singles:], *logits,
            max_q=view.max_q, max_len=view.max_len, first_span=singles,
        )  # fmt: skip

    def _prefill(self, q: Tensor, view: AttentionView, layer: LayerSpec, out: Tensor) -> None:
        """Every span but the single ones."""
        self._paged(q, view, layer, out, _keys(view, layer, walks_packed=False), view.num_single)

    def _paged(
        self,
        q: Tensor,
        view: AttentionView,
        layer: LayerSpec,
        out: Tensor,
        keys: list[Keys],
        first: int,
        stop: int | None = None,
        max_q: int = 0,
    ) -> None:
        """Spans first .. stop (of views of several segments: all from the first long one on).

        max_q: the longest of them, 0 for that of the view.
        """
        from sparseengine.ops.triton.attention import paged_prefill

        scale = layer.softmax_scale
        if len(keys) == 1:
            cu_q = view.cu_q if stop is None else view.cu_q[: stop + 1]
            paged_prefill(
                q, keys[0], cu_q, out, None, scale, view.window,
                max_q=max_q or view.max_q, first_span=first, softcap=layer.softcap,
            )  # fmt: skip
            return
        outs, lses = [], []
        for part in keys:
            o = torch.zeros(*out.shape, dtype=torch.float32, device=q.device)
            lse = torch.full(out.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
            paged_prefill(
                q, part, view.cu_q, o, lse, scale, view.window,
                max_q=view.max_q, first_span=first, softcap=layer.softcap,
            )  # fmt: skip
            outs.append(o[first:])  # single spans come first and hold one query each
            lses.append(lse[first:] * _LN2)
        out[first:] = merge_lse(outs, lses)[0].to(out.dtype)

    def _masked(
        self, q: Tensor, view: AttentionView, span: int, layer: LayerSpec, out: Tensor
    ) -> None:
        from sparseengine.ops.triton.blocks import masked_prefill

        assert view.window is None, "layers with a window have no block masks"
        keys = _keys(view, layer, walks_packed=False)
        assert len(keys) == 1, "block masks are of rows in one segment"
        cap = layer.softcap
        masked_prefill(q, keys[0], view.cu_q, span, view.masks[span], out, layer.softmax_scale, cap)


def _dense_runs(view: AttentionView, spans: int) -> list[tuple[int, int]]:
    """Spans behind the single ones that have no block mask, as ranges."""
    edges = [view.num_single - 1, *sorted(view.masks), spans]
    return [(a + 1, b) for a, b in pairwise(edges) if a + 1 < b]


def _cut(view: AttentionView, first: int, stop: int) -> AttentionView:
    """A view whose first `first` spans are left alone and which ends before span `stop`."""
    host = view.host
    if host is not None:
        host = replace(host, starts=host.starts[: stop + 1], lens=host.lens[:stop])
    return replace(view, cu_q=view.cu_q[: stop + 1], num_single=first, host=host, masks={})


def _latent_support(dims: tuple[int, int], dtype: torch.dtype) -> Support:
    if dims[0] > _MAX_LATENT[0] or dims[1] > _MAX_LATENT[1]:
        return Support(False, f"latent rows of {dims} channels exceed {_MAX_LATENT}")
    return Support(True, f"a Triton kernel reads each latent row of {dims} channels once, {dtype}")


def _keys(view: AttentionView, layer: LayerSpec, *, walks_packed: bool) -> list[Keys]:
    """The view's segments as kernels take them, each with its place in the whole row."""
    from sparseengine.ops.triton.keys import Keys  # here: Triton may be absent

    several = len(view.segments) > 1
    lens = [s.lens.expand(-1, layer.kv_heads) for s in view.segments]
    total = torch.stack(lens).sum(0, dtype=torch.int32) if several else None
    base = torch.zeros_like(total) if total is not None else None
    keys = []
    for segment, own in zip(view.segments, lens, strict=True):
        is_packed = walks_packed and isinstance(segment.table, PackedTable)
        k = segment.payload[0][0]
        v = k if segment.values_in_keys else segment.payload[1][0]
        keys.append(
            Keys(
                k=k,
                v=v,
                table=segment.table if is_packed else _dense_columns(segment),
                lens=segment.lens,
                page_size=segment.page_size,
                total=total,
                base=base,
            )
        )
        base = base + own if base is not None else None
    return keys


def _dense_columns(segment: Segment) -> Tensor:
    table = segment.dense_table()
    return table if table.stride(2) == 1 else table.contiguous()
