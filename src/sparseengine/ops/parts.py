"""Causal attention of a row's last queries, cut into parts of few different sizes.

Fast fused operators plan every new pair of lengths for tens of milliseconds, so that the lengths
they are given must repeat. A row of L keys and n queries is cut at a multiple of `unit` at or
before the first query: the keys before it, which every query sees, into unmasked parts of powers
of two; the rest, with as many query rows, is a causal square whose size is a multiple of `unit`.
Rows in front of the first query and behind the last one are padding: their results are dropped, and
no query sees the keys behind it. The parts are merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MERGED_AT_ONCE = 8  # results of parts that exist at one time

# (query [1, Hq, n, D], keys, values [1, Hkv, L, D], causal) -> ([1, Hq, n, Dv], lse of n each)
Fused = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
# (outs of [n, Hq, Dv], lses of [Hq, n], out [n, Hq, Dv], lse [Hq, n] or None): merges into the last
Merge = Callable[[list[Tensor], list[Tensor], Tensor, Tensor | None], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Keys first .. first + rows of a row; a causal part has as many query rows."""

    first: int
    rows: int
    causal: bool


# Keys and values [rows, Hkv, D] of a part, the slots behind the row's end zero
Fetch = Callable[[Part], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Parts:
    """queries: query rows with padding, `front` of them before the first query."""

    num_q: int
    length: int
    queries: int
    front: int
    parts: tuple[Part, ...]

    @property
    def pairs(self) -> float:
        """Products of a query and a key that are computed, padding included."""
        return sum(self.queries * p.rows / (2 if p.causal else 1) for p in self.parts)

    @property
    def needed_pairs(self) -> float:
        return self.num_q * (self.length - self.num_q / 2)


def cut_row(num_q: int, length: int, unit: int, longest: int) -> Parts:
    """Parts of a row of `length` keys whose last `num_q` have queries; 0 < num_q <= length.

    longest: most keys of an unmasked part, a power of two times `unit`.
    """
    bound = (length - num_q) // unit * unit
    parts, at = [], 0
    while at < bound:
        rows = min(longest, unit << ((bound - at) // unit).bit_length() - 1)
        parts.append(Part(at, rows, causal=False))
        at += rows
    queries = -(-(length - bound) // unit) * unit
    parts.append(Part(bound, queries, causal=True))
    return Parts(num_q, length, queries, length - num_q - bound, tuple(parts))


def cut_freely(num_q: int, length: int, longest: int) -> Parts:
    """The form without padding, for operators that take any lengths."""
    old = length - num_q
    parts = [Part(n, min(longest, old - n), causal=False) for n in range(0, old, longest)]
    return Parts(num_q, length, num_q, 0, (*parts, Part(old, num_q, causal=True)))


def most_scratch(chunk: int, length: int, unit: int, longest: int) -> tuple[int, int, int]:
    """(keys of the largest part, query rows, results that exist at one time), upper bounds.

    For a chunk of `chunk` tokens at the end of a row of `length`, or of a shorter one. Of more
    than `MERGED_AT_ONCE` results, one is wide: a merge of others.
    """
    old = max(length - chunk, 0)
    queries = min(chunk, length) + (2 * unit if old else unit)
    kinds = (min(old, longest) // unit).bit_length()
    parts = 1 + old // longest + kinds
    return max(min(old, longest), queries), queries, min(parts, MERGED_AT_ONCE + 1)


def result_bytes(queries: int, heads: int, value_dim: int, itemsize: int, results: int) -> int:
    """Bytes of that many results with their log-sum-exps."""
    rows, wide = queries * heads, results > MERGED_AT_ONCE
    channels = (results - wide) * value_dim * itemsize + wide * value_dim * 4
    return rows * (channels + 4 * results)


def attend_parts(
    q: Tensor, row: Parts, fetch: Fetch, fused: Fused, merge: Merge, out: Tensor
) -> None:
    """q [n, Hq, D] -> out [n, Hq, Dv]."""
    query = padded(q, row.front, row.queries).transpose(0, 1)[None]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for part in row.parts:
        if len(outs) == MERGED_AT_ONCE:
            wide = torch.promote_types(outs[0].dtype, torch.float32)
            both = torch.empty_like(outs[0], dtype=wide), torch.empty_like(lses[0])
            merge(outs, lses, *both)
            outs, lses = [both[0]], [both[1]]
        keys, values = (x.transpose(0, 1)[None] for x in fetch(part))
        found, lse = fused(query, keys, values, part.causal)
        outs.append(found[0].transpose(0, 1))
        lses.append(lse.reshape(query.shape[1:3]))
    real = slice(row.front, row.front + row.num_q)
    if len(outs) == 1:
        out.copy_(outs[0][real])
    else:
        merge([o[real] for o in outs], [x[:, real] for x in lses], out, None)


def padded(x: Tensor, front: int, rows: int) -> Tensor:
    """x [n, H, D] between zero rows, `rows` in all; in x's strides, which are planned for, too."""
    if x.shape[0] == rows:
        return x
    whole = x.new_empty(rows * x.stride(0)).as_strided((rows, *x.shape[1:]), x.stride())
    end = front + x.shape[0]
    whole[:front], whole[front:end], whole[end:] = 0, x, 0
    return whole
