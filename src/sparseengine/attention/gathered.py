"""Backends that decode as `triton` does and give long prompt chunks to a faster fused operator.

Such operators want keys and values in order, so that a chunk's row is gathered from its pages
first: some microseconds beside the milliseconds that a chunk worth it takes.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.attention.triton import TritonBackend, _keys
from sparseengine.core.attention import AttentionNeed, DeviceCaps, Support
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView
from sparseengine.ops.dense import LONGEST, UNIT, cut_for_cudnn, fused_cudnn
from sparseengine.ops.parts import Fetch, Part, Parts, attend_parts, most_scratch, result_bytes

_MIN_ARCH = (9, 0)  # what these operators' fast kernels are written for
_MIN_CUDNN = 90100
_USUAL_DIM, _WIDE_ARCH, _MIN_CUDNN_WIDE = 128, (9, 0), 91000  # where it takes up to 256 channels


class GatheredBackend(TritonBackend):
    """Chunks that `cut` accepts go to `attend`, everything else to the Triton kernels.

    A chunk can be gathered when all heads of its row have one length that the host knows, which
    eviction per head and selections end.
    """

    operator = ""

    def supports(self, need: AttentionNeed, device: DeviceCaps) -> Support:
        paged, layer = super().supports(need, device), need.layer
        if not paged.ok:
            return Support(False, f"decodes by the triton backend: {paged.reason}")
        if layer.kind is not LayerKind.FULL:
            return Support(False, f"{layer.kind.name} layers read no long rows of keys and values")
        if layer.softcap:
            return Support(False, "knows no soft cap of logits")
        if need.dtype not in (torch.bfloat16, torch.float16):
            return Support(False, f"takes bfloat16 and float16, not {need.dtype}")
        if device.arch is not None and device.arch < _MIN_ARCH:
            return Support(False, f"no faster than triton below capability 9.0: {device.arch}")
        if layer.head_dim % 8 or layer.value_dim % 8:
            dims = f"{layer.head_dim} and {layer.value_dim}"
            return Support(False, f"wants head dims in multiples of 8, not {dims}")
        obstacle = self.obstacle(device, layer)
        if obstacle:
            return Support(False, obstacle)
        return Support(True, f"{self.operator} for long prompt chunks, else {paged.reason}")

    def obstacle(self, device: DeviceCaps, layer: LayerSpec) -> str:
        """Why the operator cannot run such a layer here; empty when it can."""
        raise NotImplementedError

    def cut(self, num_q: int, length: int, layer: LayerSpec) -> Parts | None:
        """Parts of a row whose last `num_q` tokens ask, None where it does not pay."""
        raise NotImplementedError

    def attend(self, q: Tensor, row: Parts, fetch: Fetch, layer: LayerSpec, out: Tensor) -> None:
        """q [n, Hq, D] -> out [n, Hq, Dv]."""
        raise NotImplementedError

    def _prefill(self, q: Tensor, view: AttentionView, layer: LayerSpec, out: Tensor) -> None:
        rows = self._long_rows(view, layer)
        if not rows:
            super()._prefill(q, view, layer, out)
            return
        assert view.host is not None
        keys, starts = _keys(view, layer, walks_packed=False), view.host.starts
        first, spans = view.num_single, len(starts) - 1
        for span in (*rows, spans):
            if span > first:  # the shorter ones between two long ones, in one launch
                longest = max(starts[i + 1] - starts[i] for i in range(first, span))
                self._paged(q, view, layer, out, keys, first, span, longest)
            first = span + 1
            if span < spans:
                mine, table = slice(starts[span], starts[first]), keys[0].table
                assert isinstance(table, Tensor)
                fetch = _fetching((keys[0].k, keys[0].v), table[span], rows[span], layer.kv_heads)
                self.attend(q[mine], rows[span], fetch, layer, out[mine])

    def _long_rows(self, view: AttentionView, layer: LayerSpec) -> dict[int, Parts]:
        """Spans that the operator takes, in order."""
        host = view.host
        if host is None or len(view.segments) > 1 or view.window is not None or layer.softcap:
            return {}
        found = {}
        for span in range(max(view.num_single, host.first), len(host.starts) - 1):
            lens = host.lens[span]
            length = int(lens[0])
            row = self.cut(host.starts[span + 1] - host.starts[span], length, layer)
            if row is not None and bool((lens == length).all()):
                found[span] = row
        return found

    def scratch_bytes(self, layer: LayerSpec, tokens: int, length: int, itemsize: int) -> int:
        """The most that a chunk of up to `tokens` takes in a row of up to `length`."""
        if self.cut(tokens, length, layer) is None:
            return 0
        rows, queries, results = most_scratch(tokens, length, UNIT, self.longest(length))
        gathered = rows * layer.kv_heads * (layer.head_dim + layer.value_dim) * itemsize
        query = queries * (layer.q_heads + layer.kv_heads) * layer.head_dim * itemsize
        found = result_bytes(queries, layer.q_heads, layer.value_dim, itemsize, results)
        return gathered + query + found

    def longest(self, length: int) -> int:
        """Most keys of a part of such a row."""
        return LONGEST


def _fetching(pools: tuple[Tensor, Tensor], table: Tensor, row: Parts, heads: int) -> Fetch:
    """Gathers parts of a row (table int32 [G, W]) into memory that the next part uses again."""
    rows = max(part.rows for part in row.parts)
    room = [pool.new_empty(rows, heads, pool.shape[3]) for pool in pools]

    def fetch(part: Part) -> tuple[Tensor, Tensor]:
        keys, values = (x[: part.rows] for x in room)
        ops.gather_part(pools, table, row.length, part.first, (keys, values))
        return keys, values

    return fetch


class CudnnBackend(GatheredBackend):
    """torch's cuDNN attention over parts of canonical lengths (`ops.parts`)."""

    name = "cudnn"
    operator = f"cuDNN over parts of {UNIT} to {LONGEST} gathered keys"

    def obstacle(self, device: DeviceCaps, layer: LayerSpec) -> str:
        wide = max(layer.head_dim, layer.value_dim) > _USUAL_DIM
        if wide and device.arch != _WIDE_ARCH:
            return f"takes more than {_USUAL_DIM} channels on capability 9.0 only: {device.arch}"
        least = _MIN_CUDNN_WIDE if wide else _MIN_CUDNN
        if device.cudnn >= least:
            return ""
        found = f"found {device.cudnn}" if device.cudnn else "torch has none"
        return f"needs cuDNN {least} or newer: {found}"

    def cut(self, num_q: int, length: int, layer: LayerSpec) -> Parts | None:
        return cut_for_cudnn(num_q, length, layer.q_heads, layer.head_dim + layer.value_dim)

    def attend(self, q: Tensor, row: Parts, fetch: Fetch, layer: LayerSpec, out: Tensor) -> None:
        fused = partial(fused_cudnn, scale=layer.softmax_scale)
        attend_parts(q, row, fetch, fused, ops.merge_parts, out)


_FLASH_MODULES = ("flash_attn_interface", "flash_attn.cute")  # FlashAttention 3 and 4
_FLASH_OPERATIONS = 2e10  # below it, gathering and launching cost what it wins


@cache
def flash_module() -> str | None:
    """The first installed module that has FlashAttention 3 or 4."""
    for name in _FLASH_MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:  # the package around it is missing
            continue
    return None


class FlashBackend(GatheredBackend):
    """FlashAttention 3 or 4, where installed: one call over the whole gathered row."""

    name = "flash"
    operator = "FlashAttention over gathered rows"

    def __init__(self) -> None:
        self._function: Any = None

    def obstacle(self, device: DeviceCaps, layer: LayerSpec) -> str:
        if flash_module() is None:
            return f"none of {', '.join(_FLASH_MODULES)} is installed"
        return ""

    def cut(self, num_q: int, length: int, layer: LayerSpec) -> Parts | None:
        whole = Parts(num_q, length, num_q, 0, (Part(0, length, causal=True),))
        channels = layer.head_dim + layer.value_dim
        operations = 2 * layer.q_heads * channels * whole.needed_pairs
        return whole if operations >= _FLASH_OPERATIONS else None

    def longest(self, length: int) -> int:
        return length

    def attend(self, q: Tensor, row: Parts, fetch: Fetch, layer: LayerSpec, out: Tensor) -> None:
        if self._function is None:
            name = flash_module()
            assert name is not None, "supports() comes first"
            self._function = importlib.import_module(name).flash_attn_func
        keys, values = fetch(row.parts[0])
        batch = (x[None] for x in (q, keys, values))
        found = self._function(*batch, softmax_scale=layer.softmax_scale, causal=True)
        out.copy_((found[0] if isinstance(found, tuple) else found)[0])  # some return the lse, too
