"""Choosing pages and looking them up, against loops over Python numbers."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseengine import ops
from sparseengine.core.view import PackedTable

SCORES = st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, math.nan, -math.inf, math.inf])


@given(
    st.lists(SCORES, min_size=1, max_size=12),
    st.integers(0, 48),
    st.integers(0, 60),
    st.integers(0, 2),
)
def test_top_pages_are_those_a_sort_finds(
    scores: list[float], length: int, budget: int, sinks: int
) -> None:
    page, least, columns = 4, 3, len(scores)
    length = min(length, page * columns)
    used = -(-length // page)
    count = used if length <= budget else min(used, max(budget // page, least))
    rank = [-math.inf if math.isnan(s) else min(s, 1e38) for s in scores]
    for c in range(used):
        if c < sinks or c == used - 1:
            rank[c] = math.inf
    best = sorted(range(used), key=lambda c: (-rank[c], c))[:count]
    width = max(least, columns)
    found = ops.top_pages(
        torch.tensor([[scores]]),
        torch.tensor([[length]], dtype=torch.int32),
        torch.tensor([budget], dtype=torch.int32),
        page,
        sinks=sinks,
        least=least,
        width=width,
    )
    assert found.dtype == torch.int32
    want = sorted(best)
    assert found.tolist() == [[want + [-1] * (found.shape[2] - len(want))]]


def test_pages_are_taken_from_packed_tables() -> None:
    arena = torch.arange(100, 200, dtype=torch.int32)
    table = PackedTable(
        arena, torch.tensor([3, 40]), torch.tensor([5, 4]), row=1, groups=2, columns=4
    )
    index = torch.tensor([[[0, 3, -1], [1, 2, 3]], [[1, -1, -1], [0, 1, 2]]], dtype=torch.int32)
    lens = torch.tensor([[14, 16], [6, 9]], dtype=torch.int32)
    pages, count = ops.take_pages(table, index, lens, 4)
    assert pages.tolist() == [
        [[108, 111, 0], [114, 115, 116]],  # span 0: rows start at 3 + 5 and 3 + 10
        [[145, 0, 0], [148, 149, 150]],  # span 1: at 40 + 4 and 40 + 8
    ]
    assert count.tolist() == [[4 + 2, 12], [2, 4 + 4 + 1]]
    assert torch.equal(table.dense()[0, 0], torch.arange(108, 112, dtype=torch.int32))
