# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""How attention kernels find the rows of a segment: page tables, dense or packed, and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sparseengine.core.view import PackedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """One raw segment: pools [N, Hs, P, D], table int32 [S, G, W] or packed, lens int32 [S, G].

    total, base: int32 [S, Hkv] when the view has several segments, else None (lens and 0).
    """

    k: Tensor
    v: Tensor
    table: Tensor | PackedTable
    lens: Tensor
    page_size: int
    total: Tensor | None = None
    base: Tensor | None = None

    @property
    def groups(self) -> int:
        """G of the table."""
        table = self.table
        return table.groups if isinstance(table, PackedTable) else table.shape[1]

    def longest(self, max_len: int) -> int:
        """Host bound of a row's length."""
        table = self.table
        columns = table.columns if isinstance(table, PackedTable) else table.shape[2]
        return min(max_len, columns * self.page_size)

    def place(self) -> tuple[object, ...]:
        """Kernel arguments: table, starts, widths, first row, strides of a span and of a row."""
        table = self.table
        if isinstance(table, PackedTable):
            return table.arena, table.base, table.width, table.row, 0, 0
        return table, None, None, 0, *table.stride()[:2]


@triton.jit
def row_table(
    table, starts, widths, first_row, table_ss, table_sg, span, row, PACKED: tl.constexpr
):
    """Where the page ids of one row begin."""
    if PACKED:
        return table + tl.load(starts + span) + (first_row + row) * tl.load(widths + span)
    else:
        return table + span * table_ss + row * table_sg


@triton.jit
def row_place(
    lens,
    total,
    base,
    span,
    head,
    row,
    lens_ss,
    lens_sg,
    KV_HEADS: tl.constexpr,
    MULTI: tl.constexpr,
):
    """(keys of this segment, keys of the whole row, keys before this segment)."""
    length = tl.load(lens + span * lens_ss + row * lens_sg)
    if MULTI:
        return (
            length,
            tl.load(total + span * KV_HEADS + head),
            tl.load(base + span * KV_HEADS + head),
        )
    else:
        return length, length, 0
