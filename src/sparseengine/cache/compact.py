"""Keeps -> rows: who loses what, which pages move, which come free.

A batch of keeps becomes one boolean mask [M, L] over the M rows of a group it names. Three ways to
carry a row's mask out, cheapest first:

    kept      nothing is dropped: the row is left alone
    spliced   only whole pages (and the row's end) go: the table closes up, no data moves
              table  [a b c d e]   mask 1111 0000 1111 1111 11..   ->  [a c d e]
    compacted kept slots move to the row's first slots, in order; side tensors move along
              pages from the first dropped slot on are written, so shared ones are copied before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseengine import ops
from sparseengine.cache.group import GroupCache
from sparseengine.cache.plan import Geometry
from sparseengine.cache.tables import Index, Ints
from sparseengine.cache.tensors import upload
from sparseengine.core.specs import LayerKind, Ragged
from sparseengine.core.view import Keep

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMasks:
    """The keeps of one call that concern one group: rows (slots[i], rows[i]) keep mask[i]."""

    slots: Index
    rows: Index
    mask: Tensor  # bool [M, L], False past a row's length; host or device
    lead: Index  # [M] first slots whose keys will be rewritten


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What applying row masks to a group will do; nothing is changed before all groups have one.

    kept, first: tokens kept and the first dropped index of each changed row. spliced: its new table
    [m, W] replaces the old one. copy_*: shared pages that compaction would write.
    """

    slots: Index
    rows: Index
    mask: Tensor
    kept: Ints
    first: Ints
    spliced: Bools
    order: Index
    copy_slot: Index
    copy_row: Index
    copy_col: Index
    copy_page: Ints


def concerns(geo: Geometry, keep: Keep) -> bool:
    """Whether a keep acts on a group; `layer=None` means the layers a sparse method acts on."""
    if keep.layer is None:
        return geo.spec.kind in (LayerKind.FULL, LayerKind.LATENT)
    return keep.layer in geo.group.layers


def _target(geo: Geometry, keep: Keep) -> tuple[range, int]:
    """Rows that a keep names, and how often its masks repeat over them."""
    who = f"keep of request {keep.request}, layer {keep.layer}"
    if keep.layer is not None and geo.group.ragged is Ragged.REQUEST and geo.num_layers > 1:
        raise AssertionError(
            f"{who}: rows are shared by layers {geo.group.layers}; plan Ragged.LAYER or HEAD"
        )
    if geo.window is not None:
        raise AssertionError(
            f"{who}: a WINDOW layer holds its newest {geo.window} tokens; methods act on others"
        )
    if len(keep.masks) not in (1, geo.row_groups):
        raise AssertionError(
            f"{who}: {len(keep.masks)} masks for {geo.row_groups} row groups; give 1, or plan "
            f"Ragged.HEAD for one per head"
        )
    span = slice(0, geo.rows) if keep.layer is None else geo.layer_rows(keep.layer)
    rows = range(span.start, span.stop)
    return rows, len(rows) // len(keep.masks)


def collect(group: GroupCache, keeps: Sequence[Keep], slot_of: dict[int, int]) -> RowMasks | None:
    """Stack the masks of all keeps that concern a group. A wrong length names its row."""
    geo = group.geo
    mine = [k for k in keeps if concerns(geo, k)]
    if not mine:
        return None
    masks = [m for k in mine for m in k.masks]
    device = next((m.device for m in masks if m.device.type != "cpu"), torch.device("cpu"))
    length = max(m.numel() for m in masks)
    targets = [_target(geo, k) for k in mine]
    count = sum(len(rows) for rows, _ in targets)
    out = torch.zeros((count, length), dtype=torch.bool, device=device)
    slots, rows, lens, lead = (np.zeros(count, np.int64) for _ in range(4))
    at = 0
    for keep, (span, repeat) in zip(mine, targets, strict=True):
        end = at + len(span)
        slots[at:end], rows[at:end] = slot_of[keep.request], np.arange(span.start, span.stop)
        lead[at:end] = _lead(group, keep)
        sizes = [m.numel() for m in keep.masks]
        lens[at:end] = sizes * repeat
        if len(set(sizes)) == 1:
            stacked = torch.stack([m.reshape(-1).to(device) for m in keep.masks])
            out[at:end, : sizes[0]] = stacked.repeat(repeat, 1)
        else:
            for i, m in enumerate(list(keep.masks) * repeat):
                out[at + i, : m.numel()] = m.to(device)
        at = end
    _check_rows(group, slots, rows, lens, {s: r for r, s in slot_of.items()})
    return RowMasks(slots=slots, rows=rows, mask=out, lead=lead) if length else None


def _lead(group: GroupCache, keep: Keep) -> int:
    """How many first slots of the rows in this group get other keys."""
    layers = [i for i in group.geo.group.layers if keep.layer in (None, i)]
    counts = {keep.keys[i].shape[1] if i in keep.keys else 0 for i in layers}
    assert len(counts) == 1, (
        f"keep of request {keep.request}: keys for {sorted(keep.keys)}, layers {layers} share rows"
    )
    return int(counts.pop())


def _check_rows(
    group: GroupCache, slots: Index, rows: Index, lens: Index, ids: dict[int, int]
) -> None:
    have = group.rows.lens[slots, rows]
    for i in np.flatnonzero(have != lens)[:1]:
        raise AssertionError(
            f"the mask of request {ids[int(slots[i])]}, {_row_name(group.geo, int(rows[i]))} has "
            f"{lens[i]} entries, the row has {have[i]} tokens"
        )
    unique, count = np.unique(slots * group.geo.rows + rows, return_counts=True)
    for key in unique[count > 1][:1]:
        slot, row = divmod(int(key), group.geo.rows)
        raise AssertionError(f"two keeps for request {ids[slot]}, {_row_name(group.geo, row)}")


def _row_name(geo: Geometry, row: int) -> str:
    if geo.group.ragged is Ragged.REQUEST:
        return f"layers {geo.group.layers}"
    layer = f"layer {geo.group.layers[row // geo.row_groups]}"
    return layer if geo.row_groups == 1 else f"{layer} head {row % geo.row_groups}"


def draft(group: GroupCache, masks: RowMasks) -> Compaction | None:
    """Work out what the masks do to a group, without changing it; None when all is kept."""
    old = group.rows.lens[masks.slots, masks.rows]
    kept, first = _summary(masks.mask, old)
    changed = np.flatnonzero(kept < old)
    assert not masks.lead.any() or (masks.lead <= first)[kept < old].all(), (
        "keys of slots that are not retained"
    )
    assert not masks.lead[kept == old].any(), "keys of rows that lose nothing"
    if changed.size == 0:
        return None
    mask = masks.mask
    if changed.size < old.size:
        mask = mask[upload(changed, mask.device)]
    slots, rows = masks.slots[changed], masks.rows[changed]
    kept, first, old = kept[changed], first[changed], old[changed]
    if mask.device.type == "cpu":
        spliced, order = _splices(mask.numpy(), kept, group.geo.page_size)
    else:  # on a device, finding page-aligned masks would cost another round trip
        spliced, order = np.zeros(changed.size, np.bool_), np.zeros((0, 1), np.int64)
    i, col = _written(group, kept, first, ~spliced)
    if masks.lead.any():
        i, col = _with_lead(group, masks.lead[changed], first, ~spliced, i, col)
    tables = group.rows.tables
    page = tables.arena[tables.at(slots[i], rows[i], col)]
    copy = group.pool.must_copy(page)
    i, col = i[copy], col[copy]
    return Compaction(
        slots=slots,
        rows=rows,
        mask=mask,
        kept=kept,
        first=first,
        spliced=spliced,
        order=order,
        copy_slot=slots[i],
        copy_row=rows[i],
        copy_col=col,
        copy_page=page[copy],
    )


def _summary(mask: Tensor, old: Ints) -> tuple[Ints, Ints]:
    """Tokens kept and first dropped index per row: all that the host needs of a device mask."""
    lens = upload(old, mask.device)
    inside = torch.arange(mask.shape[1], device=mask.device) < lens[:, None]
    dropped = (inside & ~mask).to(torch.uint8)
    both = torch.stack([mask.sum(1), dropped.argmax(1)]).to(torch.int32).cpu().numpy()
    return both[0], both[1]


def _splices(mask: Bools, kept: Ints, page_size: int) -> tuple[Bools, Index]:
    """Rows whose mask needs no data to move, and the kept pages' columns first, in order [M, W].

    Such a mask keeps each page whole or not at all, save the last kept page, of which it may keep
    the first slots.
    """
    num_rows, length = mask.shape
    width = -(-length // page_size)
    paged = np.zeros((num_rows, width * page_size), np.bool_)
    paged[:, :length] = mask
    paged = paged.reshape(num_rows, width, page_size)
    count = paged.sum(2)
    some = count > 0
    last = width - 1 - some[:, ::-1].argmax(1)  # column of the last kept page
    prefix = (paged == (np.arange(page_size) < count[..., None])).all(2)
    whole = (count == 0) | (count == page_size)
    in_place = whole | (prefix & (np.arange(width) == last[:, None]))
    order = np.argsort(~some, axis=1, kind="stable")
    return np.asarray(in_place.all(1), np.bool_), order


def _written(group: GroupCache, kept: Ints, first: Ints, moving: Bools) -> tuple[Index, Index]:
    """(row i, column) of every page that compaction writes: first dropped slot to the new end."""
    p = group.geo.page_size
    begin = first // p
    count = np.where(moving, np.maximum(group.rows.held(kept) - begin, 0), 0)
    i = np.repeat(np.arange(kept.size), count)
    col = np.arange(i.size) - np.repeat(np.cumsum(count) - count - begin, count)
    return i, col


def _with_lead(
    group: GroupCache, lead: Index, first: Ints, moving: Bools, i: Index, col: Index
) -> tuple[Index, Index]:
    """The same with the pages whose keys are rewritten, none of them twice."""
    size = group.geo.page_size
    count = -(-lead // size)
    count = np.where(moving, np.minimum(count, first // size), count)
    j = np.repeat(np.arange(count.size), count)
    before = np.arange(j.size) - np.repeat(np.cumsum(count) - count, count)
    return np.concatenate([i, j]), np.concatenate([col, before])


def write_keys(group: GroupCache, keeps: Sequence[Keep], slot_of: dict[int, int]) -> None:
    """Store the keys that keeps bring, once their rows are cut and own their pages."""
    geo, table = group.geo, group.rows
    for keep in keeps:
        layers = [i for i in geo.group.layers if i in keep.keys]
        if not layers:
            continue
        slot, spans = slot_of[keep.request], [geo.layer_rows(i) for i in layers]
        rows = np.unique(np.concatenate([np.arange(s.start, s.stop) for s in spans]))
        value = torch.stack([keep.keys[i] for i in layers])  # [n, Hkv, m, D]
        value = value.reshape(rows.size, geo.units, *value.shape[2:]).transpose(1, 2)
        at = np.arange(value.shape[1])
        page, offset = np.divmod(at, geo.page_size)
        entries = table.tables.at(np.full((rows.size, 1), slot), rows[:, None], page)
        where = group.upload(table.tables.arena[entries]).long(), group.upload(offset)
        pool = group.payload[0]
        pool.transpose(1, 2)[where] = value.to(pool.dtype)  # [R, m, U, D]
        table.sealed[slot, rows] = 0


def carry_out(group: GroupCache, c: Compaction) -> None:
    """Copy what is shared, move what moves, splice the rest, free what is left over."""
    table, tables = group.rows, group.rows.tables
    if c.copy_page.size:
        fresh = group.pool.take(c.copy_page.size)
        group.copy_pages(c.copy_page, fresh)
        tables.arena[tables.at(c.copy_slot, c.copy_row, c.copy_col)] = fresh
        freed = group.pool.drop(c.copy_page)
        assert freed.size == 0, "a shared page came free while it was copied"
    moving = np.flatnonzero(~c.spliced)
    if moving.size:
        _move(group, c, moving)
    old = table.lens[c.slots, c.rows]
    dropped = [_splice(group, c, np.flatnonzero(c.spliced), old)] if c.spliced.any() else []
    slots, rows, kept = c.slots[moving], c.rows[moving], c.kept[moving]
    have, keep = table.held(old[moving]), table.held(kept)
    start = tables.at(slots, rows, keep)  # a row's entries lie side by side
    ends = start + have - keep
    dropped += [tables.arena[lo:hi] for lo, hi in zip(start.tolist(), ends.tolist(), strict=True)]
    begin = c.first[moving] // np.int32(group.geo.page_size)
    table.sealed[slots, rows] = np.minimum(table.sealed[slots, rows], begin)
    table.lens[c.slots, c.rows] = c.kept
    freed = group.pool.drop(np.concatenate(dropped))
    tables.touch(np.unique(np.concatenate([c.slots[c.spliced], c.copy_slot])))
    for slot in np.unique(c.slots):
        table.trim(int(slot))
    group.poison_pages(freed)
    group.poison_tails(c.slots, c.rows)


def _move(group: GroupCache, c: Compaction, moving: Index) -> None:
    slots, rows = c.slots[moving], c.rows[moving]
    width = int(group.rows.held(group.rows.lens[slots, rows]).max())
    table = group.upload(group.rows.tables.block(slots, rows, width))
    mask = c.mask.to(group.device)
    if moving.size < c.kept.size:
        mask = mask[group.upload(moving)]
    ops.compact(group.slot_pools, table, mask)


def _splice(group: GroupCache, c: Compaction, at: Index, old: Ints) -> Ints:
    """Close the tables up over dropped pages; returns the dropped pages."""
    table, p = group.rows, np.int32(group.geo.page_size)
    slots, rows, order = c.slots[at], c.rows[at], c.order[at]
    width = order.shape[1]
    now = np.take_along_axis(table.tables.block(slots, rows, width), order, axis=1)
    keep, have = table.held(c.kept[at]), table.held(old[at])
    # the kept pages come first, so the columns from `keep` on are the dropped ones and the padding
    i, col = np.nonzero(np.arange(width) < keep[:, None])
    table.tables.arena[table.tables.at(slots[i], rows[i], col)] = now[i, col]
    gone = (np.arange(width) >= keep[:, None]) & (order < have[:, None])
    sealed = table.sealed[slots, rows]
    still = ((np.arange(width) < keep[:, None]) & (order < sealed[:, None])).sum(1)
    table.sealed[slots, rows] = np.minimum(still, c.kept[at] // p)
    return np.asarray(now[gone])
