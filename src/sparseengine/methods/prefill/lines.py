"""Vertical and slash lines of the newest queries' attention, in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine.core.method import LayerStep
from sparseengine.methods.prefill.base import Grid, by_head, products
from sparseengine.ops.reference.scores import soft_capped


class Lines(NamedTuple):
    """Attention mass of the w newest queries, all fp32 [Hq, nK B]: by key, and by distance.

    vertical[h, s] is on slot s, slash[h, o] on keys o slots before their query. Both sum to w.
    """

    vertical: Tensor
    slash: Tensor


def newest_mass(at: LayerStep, chunk: int, count: int, keys: Tensor) -> Iterator[Tensor]:
    """Attention of the chunk's `count` newest queries: fp32 [w, L] of one query head after another.

    keys: [Hkv, L, D] as `at.gather` gives them. Softmax over all keys a query sees, causal.
    """
    spec, hi = at.spec, at.span(chunk)[1]
    queries = at.q[hi - count : hi].transpose(0, 1)
    lens = at.lens(chunk)
    slots = torch.arange(keys.shape[1], device=keys.device)
    back = torch.arange(count - 1, -1, -1, device=keys.device)[:, None]
    for head, mine in enumerate(queries):
        group = head // spec.group_size
        length = lens[group if len(lens) > 1 else 0]
        logits = soft_capped(products(mine, keys[group]).mul_(spec.softmax_scale), spec.softcap)
        yield logits.masked_fill_(slots >= length - back, float("-inf")).softmax(-1)


def lines(at: LayerStep, chunk: int, count: int, grid: Grid, keys: Tensor) -> Lines:
    """Sums of `newest_mass` along columns and along diagonals."""
    lens, group_size = at.lens(chunk), at.spec.group_size
    width = grid.num_columns * grid.block
    vertical, slash = [], []
    for head, mass in enumerate(newest_mass(at, chunk, count, keys)):
        length = lens[head // group_size if len(lens) > 1 else 0]
        vertical.append(pad(mass.sum(0), (0, width - mass.shape[1])))
        distance = along_diagonals(mass[:, :length])
        slash.append(pad(distance, (0, width - length)))
    return Lines(torch.stack(vertical), torch.stack(slash))


def along_diagonals(mass: Tensor) -> Tensor:
    """mass [w, L] of the w newest queries of a row -> [L]: the sum at each distance from them.

    Query i sits at slot L - w + i. Rows laid end to end, each w zeros longer, and read again with
    one column less put equal distances above each other.
    """
    count, length = mass.shape
    flipped = pad(mass.flip(1), (0, count)).flatten()
    stride = length + count - 1
    sheared = flipped.as_strided((count, stride), (stride, 1))
    return sheared[:, count - 1 :].sum(0)


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
