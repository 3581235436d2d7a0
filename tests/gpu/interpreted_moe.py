"""Mixture-of-experts kernels against their twins on the CPU; run by tests/unit/test_moe.py, which
sets TRITON_INTERPRET=1 in a process of its own: Triton reads it when it is first imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_checks import seeded_and_poisoned
from moe_checks import (
    ROUTERS,
    ROUTES,
    Layer,
    check_experts,
    check_poisoned_rows,
    check_route,
    check_row_tiles,
    check_sort,
)

from sparseengine.ops.triton.moe import Tile, moe_experts

F32, F16 = torch.float32, torch.float16  # the interpreter's dot misreads bfloat16


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with seeded_and_poisoned(11):
        yield


@pytest.mark.parametrize("route", ROUTES)
def test_experts(route: str) -> None:
    check_experts(Layer(), 20, route, F32, "cpu")


@pytest.mark.parametrize("count", [1, 60])
def test_experts_of_few_and_many_tokens(count: int) -> None:
    check_experts(Layer(experts=2, top_k=2, hidden=48, inner=40), count, "even", F16, "cpu")


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_every_kind_of_tile(swap: bool, tma: bool) -> None:
    """Widths that the tiles do not divide; tiles at most half of whose rows are in use."""
    tile = Tile(rows=32, cols=16, depth=32, swap=swap, tma=tma, half=True)
    check_experts(Layer(experts=4, hidden=40, inner=24), 40, "first", F32, "cpu", (tile, tile))


def test_widths_that_descriptors_cannot_have() -> None:
    tile = Tile(rows=16, cols=16, depth=16, tma=True)
    check_experts(Layer(experts=3, hidden=35, inner=18), 9, "even", F32, "cpu", (tile, tile))


def test_no_tokens() -> None:
    x, stack = torch.empty(0, 32), torch.randn(4, 48, 32)
    out = moe_experts(x, stack, torch.randn(4, 32, 24), torch.empty(0, 2).int(), torch.empty(0, 2))
    assert out.shape == (0, 32)


def test_poisoned_rows() -> None:
    check_poisoned_rows(Layer(), 21, F32, "cpu")


def test_row_tiles() -> None:
    check_row_tiles(Layer(), 30, F32, "cpu")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("count", [1, 50, 3000])
def test_sort(route: str, count: int) -> None:
    check_sort(6, count, 2, 16, route, "cpu")


@pytest.mark.parametrize("router", ROUTERS)
def test_route(router: str) -> None:
    check_route(ROUTERS[router], 9, "cpu")
