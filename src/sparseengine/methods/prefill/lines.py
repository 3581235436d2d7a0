"""Vertical and slash lines of the newest queries' attention, in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine.core.method import LayerStep
from sparseengine.methods.prefill.base import TILE, Grid, by_head, products
from sparseengine.ops.reference.scores import soft_capped


class Lines(NamedTuple):
    """Attention mass of the w newest queries, all fp32 [Hq, nK B]: by key, and by distance.

    vertical[h, s] is on slot s, slash[h, o] on keys o slots before their query. Both sum to w.
    """

    vertical: Tensor
    slash: Tensor


def newest_mass(at: LayerStep, chunk: int, count: int, keys: Tensor) -> Iterator[Tensor]:
    """Attention of the chunk's `count` newest queries: fp32 [h, w, L] of some query heads in order.

    keys: [Hkv, L, D] as `at.gather` gives them. Softmax over all keys a query sees, causal. L is a
    row's own length, and the heads of one share a KV head.
    """
    spec, hi = at.spec, at.span(chunk)[1]
    queries = at.q[hi - count : hi].transpose(0, 1)  # [Hq, w, D]
    lens, size = at.lens(chunk), spec.group_size
    late = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    for group, row in enumerate(keys):
        length = lens[group if len(lens) > 1 else 0]
        mine = queries[group * size : (group + 1) * size]
        for part in torch.split(mine, max(1, TILE // (count * length))):
            logits = products(part.flatten(0, 1), row[:length]).mul_(spec.softmax_scale)
            logits = soft_capped(torch.unflatten(logits, 0, (-1, count)), spec.softcap)
            logits[:, :, length - count :].masked_fill_(late, float("-inf"))
            yield logits.softmax(-1)


def lines(at: LayerStep, chunk: int, count: int, grid: Grid, keys: Tensor) -> Lines:
    """Sums of `newest_mass` along columns and along diagonals."""
    width = grid.num_columns * grid.block
    vertical, slash = [], []
    for mass in newest_mass(at, chunk, count, keys):
        room = (0, width - mass.shape[2])
        vertical.append(pad(mass.sum(1), room))
        slash.append(pad(along_diagonals(mass), room))
    return Lines(torch.cat(vertical), torch.cat(slash))


def along_diagonals(mass: Tensor) -> Tensor:
    """mass [h, w, L] of the w newest queries of a row -> [h, L]: the sum at each distance.

    Query i sits at slot L - w + i. Rows laid end to end behind w - 1 zeros each, and read again
    with one column more, put equal distances above each other.
    """
    heads, count, length = mass.shape
    padded = pad(mass, (count - 1, 0)).contiguous()
    width = padded.shape[2]
    sheared = padded.as_strided((heads, count, length), (count * width, width + 1, 1))
    return sheared.sum(1).flip(1)


def pooled(mass: Tensor, block: int) -> Tensor:
    """[..., n B] -> [..., n]."""
    return torch.unflatten(mass, -1, (-1, block)).sum(-1)


def read_lines(vertical: Tensor, slash: Tensor, grid: Grid) -> Tensor:
    """Blocks that chosen lines touch: bool [Hq, nQ, nK].

    vertical: bool [Hq, nK], blocks of keys. slash: bool [Hq, nK], blocks of distances: entry d
    holds the distances d B .. d B + B - 1, which touch two blocks of keys behind an aligned block
    of queries and three behind any other.
    """
    far = grid.last_slot - grid.columns  # [G, nQ, nK], longest distance between two blocks
    near = grid.first_slot - grid.columns - (grid.block - 1)  # and the shortest
    high = far.clamp_min(0) // grid.block
    low = near.clamp_min(0) // grid.block
    heads = slash.shape[0]
    found = vertical[:, None]
    for step in (low, (low + 1).minimum(high), high):
        index = by_head(step, heads).expand(heads, -1, -1)
        found = found | slash.gather(1, index.flatten(1)).view(index.shape)
    return found
