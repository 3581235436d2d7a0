"""Cuts by what they lose: how `kv_error` takes the place of a budget.

With kept mass m, an attention output changes by at most 2 (1 - m) max |v|. A method that knows how
much attention each token got keeps the fewest tokens that lose no more than asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseengine.methods.budgets import MARGIN, tokens_for_error


@dataclass(frozen=True, slots=True)
class Target:
    """masses: fp32 [H, L], attention paid to each slot. error: how much of it a cut may lose."""

    masses: Tensor
    error: float


def row_counts(
    shielded: Tensor, target: Target, lens: Tensor, budget: int, least: int, page_size: int
) -> Tensor:
    """Fewest best tokens of each row, but `least`, that lose at most the error: int64 [H].

    shielded: fp32 [H, L], what `protect` returns. Whole pages, for the rest of a page costs
    nothing; no more than the budget and the row hold.
    """
    most = lens.clamp(max=budget)
    if target.error == 0:
        return most
    counts = tokens_for_error(shielded, target.masses, target.error, page_size)
    return counts.clamp(min=-(-least // page_size) * page_size).minimum(most)


def least_counts(
    lost: Callable[[Tensor], Tensor],
    target: Target,
    lens: Tensor,
    budget: int,
    least: int,
    page_size: int,
) -> Tensor:
    """The same where what is protected grows with the budget: int64 [H].

    lost: budgets int64 [H] -> mass that each row's cut to its budget loses [H], never increasing.
    """
    most = lens.clamp(max=budget)
    if target.error == 0:
        return most
    high = -(-most // page_size)  # in pages; enough, or all that there is
    low = torch.full_like(high, -(-least // page_size)).minimum(high)
    for _ in range(budget.bit_length()):
        middle = (low + high) // 2
        enough = lost((middle * page_size).minimum(most)) <= target.error * MARGIN
        low = torch.where(enough | (low >= high), low, middle + 1)
        high = torch.where(enough, middle, high)
    return (high * page_size).minimum(most)


def least_budget(retain: Callable[[int], Tensor], target: Target, budget: int, least: int) -> int:
    """The smallest budget whose cut of rows that share it loses at most the error, in their mean.

    retain: a budget -> bool [..., L], which slots of the rows in `target` stay. From `least` up to
    `budget`, whatever is lost under it.
    """
    if target.error == 0:
        return budget
    masses, allowed = target.masses.double(), target.error * MARGIN

    def enough(some: int) -> bool:
        left_out = masses.masked_fill(retain(some).reshape(masses.shape), 0.0)
        return float(left_out.sum(-1).mean()) <= allowed

    return least + bisect_left(range(least, budget), True, key=enough)
