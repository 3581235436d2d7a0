"""Rows that wait for the end of a step to be cut, alone or together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine.methods.error_targets import Target, least_budget


@dataclass(frozen=True, slots=True)
class Pending:
    """Scores of one layer, waiting for the end of the step: fp32 [H, L] and the row lengths.

    target: of a request that names an error; `budget` is the most that a row may retain then.
    """

    scores: Tensor
    lens: tuple[int, ...]
    budget: int
    target: Target | None = None


def expand_lens(lens: tuple[int, ...], num_heads: int) -> tuple[int, ...]:
    """Row lengths per scored head: the cache may be coarser or finer than the scores."""
    if len(lens) == num_heads:
        return lens
    if len(set(lens)) != 1:
        raise AssertionError(f"{num_heads} score rows for rows of lengths {lens}")
    return lens[:1] * num_heads


def cut_together(items: Sequence[Pending], retain: Callable[[int], Tensor], least: int) -> Tensor:
    """What rows that share their budget retain, the rows of the items one after another.

    retain: a budget -> bool [..., L]. By an error it is the smallest budget, but `least`, that
    loses no more in the rows' mean.
    """
    target, budget = items[0].target, items[0].budget
    if target is None:
        return retain(budget)
    longest = max(found.scores.shape[1] for found in items)
    parts = [
        pad(found.target.masses.expand(len(found.scores), -1), (0, longest - found.scores.shape[1]))
        for found in items
        if found.target is not None
    ]
    together = Target(torch.cat(parts), target.error)
    return retain(least_budget(retain, together, budget, min(least, budget)))
