"""Segments of one layer and what a selection makes of them. Device work with static shapes only."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.core.view import PackedTable, Segment, Selection


def narrow(seg: Segment, sel: Selection, *, units: slice, pools: tuple[Tensor, ...]) -> Segment:
    """The segment with only the selected columns of its table.

    index [S, G, K]: G is 1 (all heads alike) or kv_heads; -1 pads point at page 0, count nothing.
    pools are the whole [N, U, P, D] pools and units the segment's heads in them: a slot selection
    addresses single slots of single heads there, so its table is always per head.
    """
    if sel.owner is None and sel.unit == "page" and isinstance(seg.table, PackedTable):
        pages, count = ops.take_pages(seg.table, sel.index, seg.lens, seg.page_size)
        return Segment(seg.payload, seg.codec, seg.values_in_keys, pages, count, seg.page_size)
    index, table, lens = sel.index.long(), seg.dense_table(), seg.lens
    if sel.owner is not None:
        table, lens = table[sel.owner], lens[sel.owner]
    spans, groups = table.shape[0], max(table.shape[1], index.shape[1])
    table, lens = table.expand(spans, groups, -1), lens.expand(spans, groups)
    index = index.expand(spans, groups, -1)
    live, column = index >= 0, index.clamp_min(0)
    if sel.unit == "page":
        # a column past the table is a padding page of somebody else's width: it holds nothing
        inside = column.clamp_max(table.shape[2] - 1)
        pages = torch.where(live, table.gather(2, inside), 0)
        fill = (lens[..., None] - column * seg.page_size).clamp(0, seg.page_size)
        count = torch.where(live, fill, 0).sum(2, dtype=torch.int32)
        return Segment(seg.payload, seg.codec, seg.values_in_keys, pages, count, seg.page_size)
    return _slots(seg, table, lens, column, live, units, pools)


def _slots(
    seg: Segment,
    table: Tensor,
    lens: Tensor,
    slot: Tensor,
    live: Tensor,
    units: slice,
    pools: tuple[Tensor, ...],
) -> Segment:
    """A page of size one per (page, head, slot): id = (page * U + unit) * P + offset."""
    total, size = pools[0].shape[1], seg.page_size
    spans, _, width = slot.shape
    live = live & (slot < lens[..., None])
    page = table.gather(2, (slot // size).clamp_max(table.shape[2] - 1)).long()
    unit = torch.arange(units.start, units.stop, device=slot.device)[None, :, None]
    ids = ((page * total + unit) * size + slot % size).expand(spans, -1, width)
    ids = torch.where(live, ids, 0).to(torch.int32)
    count = live.sum(2, dtype=torch.int32).expand(spans, ids.shape[1])
    flat = tuple((pool.view(-1, 1, 1, pool.shape[3]),) for pool in pools)
    return Segment(flat, (), seg.values_in_keys, ids, count, 1)
