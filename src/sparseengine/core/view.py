"""What attention reads. S query spans x G row groups; G is 1 or kv_heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedTable:
    """Page tables of S spans where they are stored, without a padded copy.

    Entry (s, g, w) is arena[base[s] + (row + g) * width[s] + w]. arena: int32. base, width: int64
    [S]. columns: how many the longest row may use, a host fact; entries past a row's end, and past
    its width, are arbitrary.
    """

    arena: Tensor
    base: Tensor
    width: Tensor
    row: int
    groups: int
    columns: int

    def take(self, column: Tensor) -> Tensor:
        """int32 page ids of columns int64 [S, G, K] (G may be 1), padded with ids in range."""
        row = torch.arange(self.row, self.row + self.groups, device=self.base.device)
        start = self.base[:, None] + row * self.width[:, None]  # [S, G]
        inside = torch.minimum(column, (self.width - 1).clamp_min(0)[:, None, None])
        return self.arena[start[:, :, None] + inside]

    def dense(self) -> Tensor:
        """int32 [S, G, W]."""
        column = torch.arange(self.columns, device=self.base.device)
        return self.take(column.expand(self.base.shape[0], 1, -1))

    def leading(self, spans: int) -> PackedTable:
        """The first spans."""
        return replace(self, base=self.base[:spans], width=self.width[:spans])


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of keys in one physical layout.

    payload: per stored tensor (K, V) or (latent,): (raw,) or its codec's packed parts. A raw tensor
      is [N, Hs, P, D]: N pages, Hs heads in a page. Hs is 1 when a page holds one head and the
      table is per head; else Hs is kv_heads, and head h of page n is raw[n, h].
    table: int32 [S, G, W] page ids, strided; entries past a row's end are arbitrary but in range.
      Or the same, packed, for backends that can walk it; the others take `dense_table`.
    lens: int32 [S, G] valid tokens (0 is legal: the row contributes nothing).
    log_bias: fp32 [S, G, L], added to the logits of its slots, for entries that stand for several
      tokens. Segments with one are attended to by `attention.digests`, not by backends.
    """

    payload: tuple[tuple[Tensor, ...], ...]
    codec: tuple[str, ...]
    values_in_keys: bool
    table: Tensor | PackedTable
    lens: Tensor
    page_size: int
    log_bias: Tensor | None = None

    @property
    def row_groups(self) -> int:
        """G of the table."""
        table = self.table
        return table.groups if isinstance(table, PackedTable) else table.shape[1]

    def dense_table(self) -> Tensor:
        """The table as int32 [S, G, W]."""
        table = self.table
        return table.dense() if isinstance(table, PackedTable) else table


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Which blocks of keys the queries of one span read, on top of causality.

    mask: bool [H, nQ, nK] on the device; H is the number of query heads, or 1 when all are alike.
    block: queries and keys per block. offset: the span's first query is the `offset`-th of block 0,
    so that query i is in block (offset + i) // block; slot s of the whole row (all segments) is in
    key block s // block. Blocks that hold a slot of their queries are set, so that a query sees
    itself at least; blocks behind all of their queries are not.
    """

    mask: Tensor
    block: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a view's spans: `cu_q` as numbers, and row lengths int32 [S, G].

    first: lengths of the spans before it are known to the device only.
    """

    starts: tuple[int, ...]
    lens: npt.NDArray[np.int32]
    first: int = 0


@dataclass(frozen=True, slots=True)
class AttentionView:
    """All that an attention backend sees: no policy, no request ids, no method name.

    segments: oldest first, merged by log-sum-exp; the last ends with this step's tokens.
    cu_q: int32 [S + 1], query offsets; causal is bottom-right aligned within a span: query i of a
      span with n queries sees the first (total length - n + i + 1) keys.
    num_single: the first num_single spans have exactly one query each (host fact).
    max_q: longest span; max_len: an upper bound of the total row length (host facts).
    masks: by span, none of them among the first num_single; the other spans read everything.
    host: exact sizes of spans and rows, None where the device alone knows them.
    """

    segments: tuple[Segment, ...]
    cu_q: Tensor
    window: int | None
    num_single: int
    max_q: int
    max_len: int
    host: HostRows | None = None
    masks: Mapping[int, BlockMask] = field(default_factory=dict)

    def masked(self, masks: Mapping[int, BlockMask]) -> AttentionView:
        """The same view with block masks for some spans."""
        if not masks:
            return self
        return replace(self, masks=masks, num_single=min(self.num_single, *masks))


def leading(view: AttentionView, spans: int) -> AttentionView:
    """The first `spans` spans of a view; each of them has one query, or all spans are taken."""
    if spans == view.cu_q.shape[0] - 1:
        return view
    assert spans <= view.num_single, f"{spans} spans wanted, {view.num_single} have one query"
    segments = tuple(
        replace(
            s,
            table=s.table.leading(spans) if isinstance(s.table, PackedTable) else s.table[:spans],
            lens=s.lens[:spans],
        )
        for s in view.segments
    )
    return replace(
        view,
        segments=segments,
        cu_q=view.cu_q[: spans + 1],
        num_single=spans,
        max_q=min(spans, 1),
        masks={},
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Tokens of a step whose hidden states somebody reads: the newest ones of each chunk.

    counts: how many of each chunk, at least one. rows: int64 [N], where they are among the step's
    tokens, ascending, fewer than all. cu_q: int32 [S + 1], their offsets by chunk.
    """

    counts: tuple[int, ...]
    rows: Tensor
    cu_q: Tensor

    def can_ask(self, view: AttentionView) -> bool:
        """Whether a view can be asked for these alone; block masks are of whole chunks."""
        return not view.masks and view.cu_q.shape[0] == self.cu_q.shape[0]

    def asking(self, view: AttentionView) -> AttentionView:
        """The same rows, asked by these queries alone."""
        counts = self.counts
        starts = tuple(accumulate(counts, initial=0))
        singles = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        host = None if view.host is None else replace(view.host, starts=starts)
        return replace(view, cu_q=self.cu_q, num_single=singles, max_q=max(counts), host=host)


@dataclass(frozen=True, slots=True)
class Selection:
    """A READ decision: columns of the oldest segment's table.

    index: int32 [S, G, K] ascending, -1 pads at the end; K is static, so that a graph can hold it.
    unit: "page" (a column is a table column) or "slot" (a column is a slot of the row).
    cu_q, owner: finer query spans than one per chunk, for block-sparse prefill; owner int64 [S] is
      the chunk of each span.
    whole_from: spans from here on read all of their columns (a host fact); None: not known.
    """

    index: Tensor
    unit: Literal["page", "slot"] = "page"
    cu_q: Tensor | None = None
    owner: Tensor | None = None
    whole_from: int | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """A RETAIN decision: a mask cannot be unsorted, duplicated or out of range.

    request: the request's id. layer: None keeps the same tokens in all layers.
    masks: bool [L_g] per row group: one (all heads alike) or kv_heads of them, whose lengths may
      already differ. They may live on the host or on the device.
    keys: by layer, [Hkv, m, D]: what the stored keys of the first m slots of the layer's rows are
      to be. Every row named loses something behind those slots; of layers that share rows all are
      named. Pages that are shared are copied before, and pages of these rows are sealed again.
    """

    request: int
    layer: int | None
    masks: tuple[Tensor, ...]
    keys: Mapping[int, Tensor] = field(default_factory=dict)
