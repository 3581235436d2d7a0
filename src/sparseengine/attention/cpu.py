"""CPU backend: spans of one query walk the page tables, longer ones gather K and V once."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from sparseengine.core.attention import AttentionNeed, DeviceCaps, Support
from sparseengine.core.cache import CacheManager
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerSpec
from sparseengine.core.view import AttentionView, Segment
from sparseengine.ops.reference.scores import soft_capped

_WALKED_DTYPES = (torch.float32, torch.bfloat16)
_GATHERED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LANES = 16  # channel counts that the walking kernel takes are multiples of this
_TILE = 256  # queries whose logits exist at one time where torch's fused attention cannot run
_MAX_SEGMENTS = 8  # that the walking kernel has words for
_THREADED_BYTES = 1 << 17  # K and V of less than this are walked by one thread


class CpuBackend:
    """Decode walks page tables with a compiled kernel (numba); everything else is torch.

    Spans of one query at the front of a view take the kernel when numba is installed, the dtype is
    float32 or bfloat16 and head sizes are multiples of 16. Other spans gather their rows once and
    run torch's fused CPU attention: a full part over the older keys and a causal part over the
    span's own, merged by log-sum-exp, so that no masked half is computed. That attention knows no
    soft cap: layers with one run a plain softmax, some queries at a time. Spans are independent.
    In a span with a block mask, each block of queries gets a copy of the blocks of keys it reads.
    """

    name = "cpu"
    graph_safe = False

    def __init__(self) -> None:
        self._scratch: _Scratch | None = None
        self._walked: dict[tuple[LayerSpec, torch.dtype], bool] = {}

    def supports(self, need: AttentionNeed, device: DeviceCaps) -> Support:
        if device.kind != "cpu":
            return Support(False, f"runs on CPUs, not on {device.kind}")
        if need.codec:
            return Support(False, f"reads raw pages only, not codec {need.codec}")
        if need.deterministic:
            return Support(False, "a query's bits depend on its chunk's size")
        if need.dtype not in _GATHERED_DTYPES:
            return Support(False, f"{need.dtype} is none of {_GATHERED_DTYPES}")
        obstacle = _walk_obstacle(need.layer, need.dtype)
        if obstacle is None:
            return Support(True, "decode walks page tables (numba), prefill is torch's fused one")
        return Support(True, f"decode and prefill gather rows for torch attention: {obstacle}")

    def plan(self, plan: StepPlan, cache: CacheManager) -> None:
        """Nothing to prepare."""

    def run(
        self, q: Tensor, view: AttentionView, layer: LayerSpec, scores: Tensor | None
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv], in q's dtype."""
        singles = view.num_single
        if singles and (not self._walks(q, view, layer)):
            singles = 0
        if singles and singles == q.shape[0]:
            return self._walk(q, view, layer)
        out = q.new_empty(q.shape[0], layer.q_heads, layer.value_dim)
        if singles:
            out[:singles] = self._walk(q[:singles], view, layer)
        cu_q = view.cu_q.tolist()
        for span in range(singles, len(cu_q) - 1):
            queries = slice(cu_q[span], cu_q[span + 1])
            attend = _attend_blocks if span in view.masks else _attend_span
            out[queries] = attend(q[queries], view, span, layer)
        return out

    def _walks(self, q: Tensor, view: AttentionView, layer: LayerSpec) -> bool:
        if len(view.segments) > _MAX_SEGMENTS:
            return False
        if any(part[0].dtype != q.dtype for seg in view.segments for part in seg.payload):
            return False
        key = (layer, q.dtype)
        if key not in self._walked:  # looking for a package is slow
            self._walked[key] = _walk_obstacle(*key) is None
        return self._walked[key]

    def _walk(self, q: Tensor, view: AttentionView, layer: LayerSpec) -> Tensor:
        if self._scratch is None:
            from sparseengine.attention import cpu_walk

            self._scratch = _Scratch(cpu_walk)
        return self._scratch.run(q, view, layer)


def _walk_obstacle(layer: LayerSpec, dtype: torch.dtype) -> str | None:
    """Why the compiled kernel cannot run, or None."""
    if dtype not in _WALKED_DTYPES:
        return f"the decode kernel reads float32 and bfloat16, not {dtype}"
    if layer.head_dim % _LANES or layer.value_dim % _LANES:
        dims = f"{layer.head_dim} and {layer.value_dim}"
        return f"the decode kernel wants head sizes in multiples of {_LANES}, not {dims}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    return None


class _Scratch:
    """Argument words and reused buffers of the decode kernel."""

    def __init__(self, kernel: ModuleType) -> None:
        self.kernel = kernel
        self.args = np.zeros(kernel.ARGS_SIZE, np.int64)
        self.address = int(self.args.ctypes.data)
        self.scale = np.zeros(2, np.float32)  # softmax scale, soft cap
        self.args[kernel.SCALE] = self.scale.ctypes.data
        self.items = self.first = self.sums = self.stats = torch.empty(0)
        self.kept: list[Tensor] = []  # copies that the kernel reads during a call

    def run(self, q: Tensor, view: AttentionView, layer: LayerSpec) -> Tensor:
        """q [S, Hq, D], the view's first S spans -> [S, Hq, Dv]."""
        kernel, args = self.kernel, self.args
        spans, heads = q.shape[0], layer.kv_heads
        whole = all(seg.row_groups == 1 for seg in view.segments)
        block = heads if whole else 1
        query = q if q.dtype == torch.float32 else q.float()
        out = torch.empty(spans, layer.q_heads, layer.value_dim)
        size = query.element_size()
        args[kernel.SPANS], args[kernel.KV_HEADS] = spans, heads
        args[kernel.GROUP], args[kernel.BLOCK] = layer.group_size, block
        args[kernel.DIM], args[kernel.VALUE_DIM] = layer.head_dim, layer.value_dim
        args[kernel.WINDOW] = -1 if view.window is None else view.window
        args[kernel.SEGMENTS] = len(view.segments)
        args[kernel.QUERY] = query.data_ptr()
        args[kernel.QUERY_T], args[kernel.QUERY_H] = query.stride(0) * size, query.stride(1) * size
        args[kernel.OUT] = out.data_ptr()
        args[kernel.OUT_T], args[kernel.OUT_H] = out.stride(0) * size, out.stride(1) * size
        self.scale[:] = layer.softmax_scale, layer.softcap
        pieces = sum(self._segment(i, seg, view) for i, seg in enumerate(view.segments))
        rows = spans * (heads // block)
        self._grow(rows, rows * pieces, block * layer.group_size, layer.value_dim)
        channels = layer.head_dim + layer.value_dim
        small = spans * view.max_len * heads * channels * q.element_size() < _THREADED_BYTES
        kernel.run(args, self.address, 1 if small else torch.get_num_threads())
        self.kept.clear()
        return out if q.dtype == torch.float32 else out.to(q.dtype)

    def _segment(self, index: int, seg: Segment, view: AttentionView) -> int:
        """Fill the segment's words; returns an upper bound of its items per row."""
        kernel, args = self.kernel, self.args
        word = kernel.segment_word(index, 0)
        keys = seg.payload[0][0]
        values = keys if seg.values_in_keys else seg.payload[1][0]
        size = keys.element_size()
        for pool, base in ((keys, kernel.KEY), (values, kernel.VALUE)):
            by_page, by_head, by_slot, by_channel = pool.stride()
            assert by_channel == 1, "channels of a pool are contiguous"
            args[word + base] = pool.data_ptr()
            args[word + base + 1] = by_page * size
            args[word + base + 2] = by_head * size if pool.shape[1] > 1 else 0
            args[word + base + 3] = by_slot * size
        table, lens = seg.dense_table(), seg.lens
        if table.stride(2) != 1:
            table = table.contiguous()
            self.kept.append(table)
        grouped = table.shape[1] > 1
        args[word + kernel.TABLE], args[word + kernel.LENS] = table.data_ptr(), lens.data_ptr()
        args[word + kernel.TABLE_S], args[word + kernel.LENS_S] = (
            table.stride(0) * 4,
            lens.stride(0) * 4,
        )
        args[word + kernel.TABLE_G] = table.stride(1) * 4 if grouped else 0
        args[word + kernel.LENS_G] = lens.stride(1) * 4 if lens.shape[1] > 1 else 0
        args[word + kernel.PAGE_SIZE] = seg.page_size
        args[word + kernel.HALF] = int(keys.dtype == torch.bfloat16)
        longest = min(table.shape[2] * seg.page_size, view.max_len)
        return -(-longest // kernel.CHUNK)

    def _grow(self, rows: int, items: int, q_heads: int, dim: int) -> None:
        """Buffers for `items` items of `q_heads` query heads; the kernel fills them."""
        kernel = self.kernel
        wanted = {
            "first": (rows + 1, torch.int64, kernel.FIRST),
            "items": (items * kernel.ITEM_WORDS, torch.int64, kernel.ITEMS),
            "sums": (items * q_heads * dim, torch.float32, kernel.SUMS),
            "stats": (items * q_heads * 2, torch.float32, kernel.STATS),
        }
        for name, (size, dtype, word) in wanted.items():
            if getattr(self, name).numel() < size:
                setattr(self, name, torch.empty(2 * size, dtype=dtype))
                self.args[word] = getattr(self, name).data_ptr()


def _attend_span(q: Tensor, view: AttentionView, span: int, layer: LayerSpec) -> Tensor:
    """q [n, Hq, D], one span -> [n, Hq, Dv]."""
    lens = [_host_lens(seg, span, layer.kv_heads) for seg in view.segments]
    parts = [_rows(seg, span, layer, max(n)) for seg, n in zip(view.segments, lens, strict=True)]
    if all(len(set(n)) == 1 for n in lens):
        keys = _joined([k for k, _ in parts])
        values = _joined([v for _, v in parts])
        return _attend(q, keys, values, view.window, layer)
    out = q.new_empty(q.shape[0], layer.q_heads, layer.value_dim)
    for h in range(layer.kv_heads):
        keys = _joined([k[h : h + 1, : n[h]] for (k, _), n in zip(parts, lens, strict=True)])
        values = _joined([v[h : h + 1, : n[h]] for (_, v), n in zip(parts, lens, strict=True)])
        heads = slice(h * layer.group_size, (h + 1) * layer.group_size)
        out[:, heads] = _attend(q[:, heads], keys, values, view.window, layer)
    return out


def _attend_blocks(q: Tensor, view: AttentionView, span: int, layer: LayerSpec) -> Tensor:
    """q [n, Hq, D], one span with a block mask -> [n, Hq, Dv]; copies the blocks that are read."""
    assert view.window is None, "layers with a window have no block masks"
    lens = [_host_lens(seg, span, layer.kv_heads) for seg in view.segments]
    parts = [_rows(seg, span, layer, max(n)) for seg, n in zip(view.segments, lens, strict=True)]
    mask, num_q = view.masks[span], q.shape[0]
    out = q.new_empty(num_q, layer.q_heads, layer.value_dim)
    together = len(mask.mask) == 1 and all(len(set(n)) == 1 for n in lens)
    size = layer.q_heads if together else 1  # query heads that read the same slots
    for head in range(0, layer.q_heads, size):
        group, heads = head // layer.group_size, slice(head, head + size)
        mine = slice(None) if together else slice(group, group + 1)
        keys = _joined([k[mine, : n[group]] for (k, _), n in zip(parts, lens, strict=True)])
        values = _joined([v[mine, : n[group]] for (_, v), n in zip(parts, lens, strict=True)])
        reads: list[list[bool]] = mask.mask[head if len(mask.mask) > 1 else 0].tolist()
        for row, blocks in enumerate(reads):
            lo = max(row * mask.block - mask.offset, 0)
            hi = min((row + 1) * mask.block - mask.offset, num_q)
            ranges = _ranges(blocks, mask.block, keys.shape[1] - num_q + hi)
            k, v = (_joined([x[:, a:b] for a, b in ranges]) for x in (keys, values))
            out[lo:hi, heads] = _attend(q[lo:hi, heads], k, v, None, layer)
    return out


def _ranges(blocks: list[bool], size: int, stop: int) -> list[tuple[int, int]]:
    """Slots of the blocks that are set, before `stop`, as ranges; neighbours are joined."""
    found: list[tuple[int, int]] = []
    for block, is_set in enumerate(blocks):
        first, end = block * size, min((block + 1) * size, stop)
        if is_set and first < stop:
            start = found.pop()[0] if found and found[-1][1] == first else first
            found.append((start, end))
    return found


def _host_lens(segment: Segment, span: int, heads: int) -> list[int]:
    lens: list[int] = segment.lens[span].tolist()
    return lens if len(lens) == heads else lens * heads


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rows(seg: Segment, span: int, layer: LayerSpec, length: int) -> tuple[Tensor, Tensor]:
    """Keys [H, L, D] and values [H, L, Dv] of one span, in row order; garbage past a row's end."""
    columns = -(-length // seg.page_size)
    pages = seg.dense_table()[span, :, :columns].long().expand(layer.kv_heads, columns)

    def gather(pool: Tensor) -> Tensor:
        one_head = pool.shape[1] == 1
        heads = torch.zeros(1, 1, dtype=torch.int64) if one_head else _column(layer.kv_heads)
        return pool[pages, heads].flatten(1, 2)[:, :length]  # [H, L, D]

    keys = gather(seg.payload[0][0])
    if seg.values_in_keys:
        return keys, keys[..., : layer.value_dim]
    return keys, gather(seg.payload[1][0])


def _column(heads: int) -> Tensor:
    return torch.arange(heads)[:, None]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, window: int | None, layer: LayerSpec
) -> Tensor:
    """q [n, Hq, D], keys [H, L, D], values [H, L, Dv] -> [n, Hq, Dv]; causal, bottom-right."""
    num_q, length = q.shape[0], keys.shape[1]
    if length < num_q:  # the first queries see nothing
        out = q.new_zeros(num_q, q.shape[1], values.shape[2])
        if length:
            out[num_q - length :] = _attend(q[num_q - length :], keys, values, window, layer)
        return out
    scale = layer.softmax_scale
    query = q.transpose(0, 1)  # [Hq, n, D]
    if window is not None and window < length:
        return _attend_window(query, keys, values, window, layer).transpose(0, 1)
    if not _is_fused(query, values, layer):
        return _attend_tiles(query, keys, values, None, layer).transpose(0, 1)
    old = length - num_q
    out, lse = _fused(query, keys[:, old:], values[:, old:], scale, causal=True)
    if old:
        old_out, old_lse = _fused(query, keys[:, :old], values[:, :old], scale)
        share = torch.sigmoid(old_lse - lse).unsqueeze(-1)  # fp32 weight of the old keys
        out = torch.lerp(out.to(share.dtype), old_out.to(share.dtype), share).to(out.dtype)
    return out.transpose(0, 1)


def _is_fused(query: Tensor, values: Tensor, layer: LayerSpec) -> bool:
    """Whether torch's flash attention can run."""
    alike = query.shape[2] == values.shape[2]
    return alike and query.dtype != torch.float16 and layer.softcap == 0


def _attend_window(
    query: Tensor, keys: Tensor, values: Tensor, window: int, layer: LayerSpec
) -> Tensor:
    """query [Hq, n, D]; tiles of queries, each against the keys that one of them sees."""
    num_q, length = query.shape[1], keys.shape[1]
    outs = []
    for start in range(0, num_q, _TILE):
        tile = query[:, start : start + _TILE]
        size = tile.shape[1]
        stop = length - num_q + start + size
        seen = slice(max(stop - size - window + 1, 0), stop)
        k, v = keys[:, seen], values[:, seen]
        if not _is_fused(tile, v, layer):
            outs.append(_attend_tiles(tile, k, v, window, layer))
            continue
        dead = _dead(size, k.shape[1], window, k.shape[1] - size)
        mask = torch.zeros(dead.shape, dtype=tile.dtype).masked_fill(dead, float("-inf"))
        outs.append(_fused(tile, k, v, layer.softmax_scale, mask=mask)[0])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """torch's flash attention on CPU, with grouped heads: ([Hq, n, Dv], log-sum-exp [Hq, n])."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, causal, attn_mask=mask, scale=scale
    )
    return out[0], lse[0]


def _dead(num_q: int, length: int, window: int | None, first: int) -> Tensor:
    """bool [n, L]: keys that queries `first` .. first + n do not see, the last being at L - 1."""
    query = torch.arange(first, first + num_q)[:, None]
    key = torch.arange(length)
    dead = key > query
    if window is not None:
        dead |= key <= query - window
    return dead


def _attend_tiles(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None, layer: LayerSpec
) -> Tensor:
    """Plain softmax in float32 or wider, some queries at a time: what flash does not take."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads, num_q, length = keys.shape[0], query.shape[1], keys.shape[1]
    keys, values = keys.to(dtype)[:, None], values.to(dtype)[:, None]  # [H, 1, L, D]
    outs = []
    for start in range(0, num_q, _TILE):
        tile = query[:, start : start + _TILE].to(dtype).unflatten(0, (heads, -1))  # [H, g, n, D]
        logits = soft_capped((tile @ keys.transpose(2, 3)) * layer.softmax_scale, layer.softcap)
        dead = _dead(tile.shape[2], length, window, length - num_q + start)
        mass = logits.masked_fill(dead, float("-inf")).softmax(-1)
        outs.append((mass @ values).flatten(0, 1))
    return torch.cat(outs, dim=1).to(query.dtype)
