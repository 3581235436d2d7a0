"""One query per row against its slots, by loops over single numbers."""

from __future__ import annotations

import math

import pytest
import torch
from attention_views import Rows, Shape
from torch import Tensor

from sparseengine import ops
from sparseengine.core.view import PackedTable

SHAPES = [
    Shape(heads=2, group=3, dim=5, page=4, layout="shared"),
    Shape(heads=2, group=3, dim=5, page=4, layout="head"),
    Shape(heads=3, group=1, dim=7, page=1, layout="picked"),
]
LENS = [[9, 4, 1], [0, 0, 0], [13, 0, 6]]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


def _drawn(shape: Shape, dtype: torch.dtype) -> tuple[Rows, Tensor]:
    groups = 1 if shape.layout == "shared" else shape.heads
    rows = Rows(shape, [row[:groups] for row in LENS], dtype, "cpu", [shape.dim])
    return rows, torch.randn(len(LENS), shape.heads * shape.group, shape.dim).to(dtype)


def _places(rows: Rows, shape: Shape, span: int, head: int) -> list[tuple[int, int, int]]:
    """Where the slots of one row of one head are in the pool."""
    row = head if rows.lens.shape[1] > 1 else 0
    inner = head if rows.pools[0].shape[1] > 1 else 0
    pages = rows.table[span, row].tolist()
    count = int(rows.lens[span, row])
    return [(pages[n // shape.page], inner, n % shape.page) for n in range(count)]


def _logits(
    rows: Rows, shape: Shape, q: Tensor, span: int, head: int, scale: float
) -> list[list[float]]:
    """Of each query head of a KV head, on each slot of the row."""
    keys = [rows.pools[0][at].double() for at in _places(rows, shape, span, head)]
    heads = range(head * shape.group, (head + 1) * shape.group)
    return [[scale * float(q[span, h].double() @ k) for k in keys] for h in heads]


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-10 if dtype == torch.float64 else 1e-5  # the products of half numbers are exact


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.layout)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalise", [False, True])
def test_scores_are_the_largest_logit_of_the_group(
    shape: Shape, dtype: torch.dtype, normalise: bool
) -> None:
    rows, q = _drawn(shape, dtype)
    got = ops.slot_scores(q, rows.pools[0], rows.table, rows.lens, 0.3, normalise=normalise)
    assert got.shape == (3, shape.heads, rows.table.shape[2] * shape.page)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for s in range(3):
        for h in range(shape.heads):
            logits = _logits(rows, shape, q, s, h, 0.3)
            if normalise:
                lse = [math.log(sum(math.exp(x) for x in row)) if row else 0.0 for row in logits]
                logits = [[x - z for x in row] for row, z in zip(logits, lse, strict=True)]
            want = [max(column) for column in zip(*logits, strict=True)]
            assert got[s, h, : len(want)].tolist() == pytest.approx(want, abs=_tolerance(dtype))


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.layout)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mass_is_what_the_query_pays(shape: Shape, dtype: torch.dtype, softcap: float) -> None:
    rows, q = _drawn(shape, dtype)
    pool = rows.pools[0]
    mass, seen = torch.rand(pool.shape[:3]), torch.rand(pool.shape[:3])
    want, count = mass.double(), seen.double()
    for s in range(3):
        for h in range(shape.heads):
            places = _places(rows, shape, s, h)
            paid = [0.0] * len(places)
            for row in _logits(rows, shape, q, s, h, 0.3):
                capped = [softcap * math.tanh(x / softcap) if softcap else x for x in row]
                total = sum(math.exp(x) for x in capped)
                paid = [p + math.exp(x) / total for p, x in zip(paid, capped, strict=True)]
            for at, more in zip(places, paid, strict=True):
                want[at] = want[at] * 0.5 + more
                count[at] = count[at] * 0.5 + 1
    how = {"scale": 0.3, "softcap": softcap, "left": 0.5}
    ops.add_mass(q, pool, rows.table, rows.lens, mass, seen, **how)
    torch.testing.assert_close(mass.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.double(), count, rtol=0, atol=1e-6)


def test_a_view_of_some_heads_of_a_pool_and_packed_tables() -> None:
    """As a layer's keys lie in a pool of all layers: strided pages, a packed table."""
    whole = torch.randn(6, 4, 2, 3)
    arena = torch.tensor([9, 9, 5, 2, 0, 1, 3, 4], dtype=torch.int32)
    base, width = torch.tensor([2, 4]), torch.tensor([3, 2])
    table = PackedTable(arena, base, width, row=0, groups=1, columns=2)
    lens = torch.tensor([[3], [4]], dtype=torch.int32)
    q = torch.randn(2, 4, 3)
    got = ops.slot_scores(q, whole[:, 1:3], table, lens)
    for s, pages in enumerate(([5, 2], [0, 1])):
        for h in range(2):
            keys = whole[pages, 1 + h].reshape(4, 3)
            want = (q[s, 2 * h : 2 * h + 2] @ keys.T).amax(0)
            torch.testing.assert_close(got[s, h], want)


def test_no_rows_and_no_columns() -> None:
    pool = torch.randn(3, 1, 4, 5)
    lens, table = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1, 0, dtype=torch.int32)
    for normalise in (False, True):
        q = torch.randn(2, 2, 5)
        assert ops.slot_scores(q, pool, table, lens, normalise=normalise).shape == (2, 1, 0)
        found = ops.slot_scores(q[:0], pool, table[:0], lens[:0], normalise=normalise)
        assert found.shape == (0, 1, 0)
    mass = torch.rand(3, 1, 4)
    before = mass.clone()
    ops.add_mass(q, pool, table, lens, mass, scale=1.0)
    ops.add_mass(q[:0], pool, table[:0], lens[:0], mass, scale=1.0)
    assert torch.equal(mass, before)
