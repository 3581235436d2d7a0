"""Deterministic choices under a budget."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseengine.methods.budgets import (
    largest_remainder,
    protect,
    split_protected,
    top_mask,
)

SCORES = st.lists(
    st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, math.inf]), min_size=1, max_size=12
)


def best(scores: list[float], count: int) -> list[bool]:
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count]
    return [j in order for j in range(len(scores))]


@given(SCORES, st.integers(0, 14))
def test_top_mask_takes_larger_scores_then_smaller_positions(
    scores: list[float], count: int
) -> None:
    row = torch.tensor(scores)
    assert top_mask(row, count).tolist() == best(scores, count)
    capped = min(count, len(scores))
    per_row = top_mask(row.expand(2, -1), torch.tensor([capped, 0]))
    assert per_row.tolist() == [best(scores, capped), [False] * len(scores)]
    hinted = top_mask(row.expand(2, -1), torch.tensor([capped, 0]), capped)
    assert torch.equal(hinted, per_row)


def test_top_mask_keeps_every_tie_in_order_on_many_rows() -> None:
    scores = torch.zeros(3, 4, 100)
    mask = top_mask(scores, torch.full((3, 4), 7))
    assert mask[..., :7].all()
    assert not mask[..., 7:].any()


def test_protect_forces_sinks_and_recent_and_drops_what_is_past_the_row() -> None:
    scores = torch.tensor(
        [[1.0, math.nan, math.inf, 4.0, 5.0], [1.0, 2.0, 3.0, math.nan, math.nan]]
    )
    got = protect(scores, torch.tensor([5, 3]), 1, 1)
    assert got[0].tolist() == [math.inf, -math.inf, torch.finfo(torch.float32).max, 4.0, math.inf]
    assert got[1].tolist() == [math.inf, 2.0, math.inf, -math.inf, -math.inf]


@pytest.mark.parametrize(
    ("budget", "expected"), [(1, (0, 1)), (2, (1, 1)), (7, (3, 4)), (8, (4, 4)), (36, (4, 32))]
)
def test_sinks_take_at_most_half_of_a_small_budget(budget: int, expected: tuple[int, int]) -> None:
    assert split_protected(budget, 4, 32) == expected


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.integers(0, 500))
def test_largest_remainder_is_exact_and_close(shares: list[float], total: int) -> None:
    got = largest_remainder(shares, total)
    assert sum(got) == total
    amount = sum(shares)
    if amount > 1e-6:
        assert all(
            abs(g - s * total / amount) < 1 + 1e-6 * total for g, s in zip(got, shares, strict=True)
        )


def test_largest_remainder_prefers_large_remainders_then_small_indices() -> None:
    assert largest_remainder([1.0, 1.0, 1.0], 4) == [2, 1, 1]
    assert largest_remainder([0.0, 0.0], 3) == [2, 1]
    assert largest_remainder([2.6, 1.4, 1.0], 5) == [3, 1, 1]
