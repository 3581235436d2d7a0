"""Ops against independent formulas, written as loops over tokens, heads and slots."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from attention_views import Rows, Shape
from torch import Tensor

from sparseengine import ops
from sparseengine.ops.reference import storage

F64 = torch.float64
NAN = float("nan")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)
    random.seed(11)


def pool_of(pages: int, heads: int, page: int, *shape: int) -> Tensor:
    return torch.full((pages, heads, page, *shape), NAN, dtype=F64)


@pytest.mark.parametrize("layout", ["shared", "head", "picked"])
def test_store_puts_every_token_into_its_slot_and_skips_minus_one(layout: str) -> None:
    heads, page, tokens = 3, 4, 7
    inner = 1 if layout == "head" else heads
    groups = 1 if layout == "shared" else heads
    pools = [pool_of(12, inner, page, d) for d in (2, 5)]
    values = [torch.randn(tokens, heads, d, dtype=F64) for d in (2, 5)]
    if layout == "head":
        slots = torch.randperm(12 * page)[: heads * tokens].reshape(heads, tokens)
    else:
        slots = torch.stack([torch.randperm(12 * page)[:tokens] for _ in range(groups)])
    slots[:, 3] = -1
    ops.store(pools, values, slots)
    for pool, value in zip(pools, values, strict=True):
        want = torch.full_like(pool, NAN)
        for t in range(tokens):
            for h in range(heads):
                slot = int(slots[h if groups > 1 else 0, t])
                if slot >= 0:
                    want[slot // page, h if inner > 1 else 0, slot % page] = value[t, h]
        assert torch.equal(pool.nan_to_num(-1), want.nan_to_num(-1))


@pytest.mark.parametrize("groups", [1, 2])
def test_store_into_a_slice_of_a_wider_pool(groups: int) -> None:
    """Layers that share a table see their heads as a slice of one pool."""
    wide = pool_of(3, 5, 4, 2)
    pool = wide[:, 1:3] if groups == 1 else wide[:, 4:5]
    value = torch.randn(2, 2, 2, dtype=F64)
    slots = torch.tensor([[5, 2]]) if groups == 1 else torch.tensor([[5, 2], [8, 11]])
    ops.store((pool,), (value,), slots)
    if groups == 1:
        assert torch.equal(wide[1, 1:3, 1], value[0])
        assert torch.equal(wide[0, 1:3, 2], value[1])
    else:
        assert torch.equal(wide[1, 4, 1], value[0, 0])
        assert torch.equal(wide[2, 4, 3], value[1, 1])
    assert int(wide.isfinite().sum()) == 8


def test_store_casts_to_the_pools_dtype() -> None:
    pool = torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16)
    ops.store((pool,), (torch.ones(1, 1, 2),), torch.tensor([[2]]))
    assert pool[0, 0].sum(1).tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("tile", [4096, 5])
def test_compact_keeps_order_and_moves_every_pool(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_COMPACT_TILE_SLOTS", tile)
    page, lens, heads = 4, [13, 0, 9, 16], 2
    table = torch.randperm(20)[:16].reshape(4, 4).int()
    pools = [torch.randn(20, heads, page, 3), torch.randint(0, 99, (20, heads, page))]
    rows = [
        [[p[table[r, i // page], :, i % page].clone() for i in range(n)] for p in pools]
        for r, n in enumerate(lens)
    ]
    mask = torch.rand(4, 16) < 0.5
    mask &= torch.arange(16) < torch.tensor(lens)[:, None]
    others = [p.clone() for p in pools]
    ops.compact(pools, table, mask)
    for r, n in enumerate(lens):
        kept = [i for i in range(n) if mask[r, i]]
        for p, entries in zip(pools, rows[r], strict=True):
            for to, i in enumerate(kept):
                assert torch.equal(p[table[r, to // page], :, to % page], entries[i])
    unused = [i for i in range(20) if i not in table.flatten().tolist()]
    assert all(torch.equal(p[unused], o[unused]) for p, o in zip(pools, others, strict=True))


def test_copy_pages_copies_whole_pages_only() -> None:
    pool = torch.randn(6, 2, 4, 3)
    before = pool.clone()
    ops.copy_pages((pool,), torch.tensor([1, 4]), torch.tensor([0, 5]))
    assert torch.equal(pool[0], before[1])
    assert torch.equal(pool[5], before[4])
    assert torch.equal(pool[1:5], before[1:5])


@pytest.mark.parametrize("layout", ["shared", "head", "picked"])
@pytest.mark.parametrize("max_len", [3, 11, 40])
def test_gather_rows_is_in_slot_order_and_zero_past_the_length(layout: str, max_len: int) -> None:
    shape = Shape(heads=3, dim=2, page=4, layout=layout)
    lens = [11] if layout == "shared" else [11, 0, 3]
    rows = Rows(shape, [lens], F64, "cpu", [2])
    got = ops.gather_rows(rows.pools[0], rows.table[0], rows.lens[0], 3, max_len)
    assert got.shape == (3, max_len, 2)
    for h in range(3):
        g = h if len(lens) > 1 else 0
        for i in range(max_len):
            if i < lens[g]:
                inner = 0 if layout == "head" else h
                want = rows.pools[0][int(rows.table[0, g, i // 4]), inner, i % 4]
                assert torch.equal(got[h, i], want)
            else:
                assert (got[h, i] == 0).all()


def test_gather_rows_serves_tensors_without_channels() -> None:
    pool = torch.arange(24).reshape(6, 1, 4)
    table = torch.tensor([[5, 2], [1, 0]], dtype=torch.int32)
    got = ops.gather_rows(pool, table, torch.tensor([5, 2]), 2, 6)
    assert got.tolist() == [[20, 21, 22, 23, 8, 0], [4, 5, 0, 0, 0, 0]]


@pytest.mark.parametrize("layout", ["shared", "head", "picked"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("cap", [0.0, 0.4])
def test_window_scores_equal_softmax_by_hand(layout: str, reduce: str, cap: float) -> None:
    heads, group, dim, window = 2, 3, 4, 5
    shape = Shape(heads=heads, group=group, dim=dim, page=4, layout=layout)
    lens = [14] if layout == "shared" else [14, 6]
    rows = Rows(shape, [lens], F64, "cpu", [dim])
    q = torch.randn(window, heads * group, dim, dtype=F64)
    got = ops.window_scores(q, rows.pools[0], rows.table[0], rows.lens[0], 17, 0.3, reduce, cap)
    assert got.shape == (6, 17)
    for hq in range(heads * group):
        h = hq // group
        n = lens[h if len(lens) > 1 else 0]
        keys = ops.gather_rows(rows.pools[0], rows.table[0], rows.lens[0], heads, 14)[h]
        columns = [[0.0] * 17 for _ in range(window)]
        for i in range(window):
            seen = n - window + i + 1
            logits = [0.3 * float(q[i, hq] @ keys[j]) for j in range(seen)]
            if cap:
                logits = [cap * math.tanh(x / cap) for x in logits]
            total = sum(math.exp(x - max(logits)) for x in logits)
            for j in range(seen):
                columns[i][j] = math.exp(logits[j] - max(logits)) / total
        fold = sum if reduce == "sum" else max
        want = torch.tensor([fold(c) for c in zip(*columns, strict=True)], dtype=F64)
        torch.testing.assert_close(got[hq], want, rtol=0, atol=1e-10)
        if reduce == "sum":
            assert float(got[hq].sum()) == pytest.approx(window, abs=1e-10)


def test_window_scores_of_rows_shorter_than_the_window_are_finite() -> None:
    rows = Rows(Shape(heads=2, dim=4, page=4), [[2, 0]], F64, "cpu", [4])
    q = torch.randn(5, 4, 4, dtype=F64)
    got = ops.window_scores(q, rows.pools[0], rows.table[0], rows.lens[0], 8, 0.5)
    torch.testing.assert_close(got[:2].sum(1), torch.full((2,), 2.0, dtype=F64))
    assert (got[2:] == 0).all()


def test_window_scores_are_fp32_for_bf16_keys() -> None:
    rows = Rows(Shape(heads=1, dim=4, page=4), [[9]], torch.bfloat16, "cpu", [4])
    q = torch.randn(3, 2, 4).bfloat16()
    got = ops.window_scores(q, rows.pools[0], rows.table[0], rows.lens[0], 9, 0.5)
    assert got.dtype == torch.float32


def test_page_bounds_are_exact_and_touch_their_pages_only() -> None:
    pool = torch.randn(9, 2, 4, 3).bfloat16()
    low, high = (torch.full((9, 2, 3), 7.0, dtype=torch.bfloat16) for _ in range(2))
    ops.page_bounds(pool, torch.tensor([8, 2]), low, high)
    for n in range(9):
        for h in range(2):
            for d in range(3):
                column = [float(pool[n, h, p, d]) for p in range(4)]
                want = (min(column), max(column)) if n in (2, 8) else (7.0, 7.0)
                assert (float(low[n, h, d]), float(high[n, h, d])) == want


@pytest.mark.parametrize("layout", ["shared", "head"])
def test_page_scores_follow_the_definition_and_bound_every_logit(layout: str) -> None:
    heads, group, dim, page, spans, width = 2, 3, 5, 4, 2, 3
    inner, groups = (1, heads) if layout == "head" else (heads, 1)
    pages = spans * groups * width
    pool = torch.randn(pages, inner, page, dim, dtype=F64)
    low, high = torch.empty(pages, inner, dim, dtype=F64), torch.empty(pages, inner, dim, dtype=F64)
    ops.page_bounds(pool, torch.arange(pages), low, high)
    table = torch.randperm(pages).reshape(spans, groups, width).int()
    q = torch.randn(spans, heads * group, dim, dtype=F64)
    got = ops.page_scores(q, low, high, table, group)
    assert got.shape == (spans, heads, width)
    for s in range(spans):
        for h in range(heads):
            for w in range(width):
                n, k = int(table[s, h if groups > 1 else 0, w]), h if inner > 1 else 0
                bounds, logits = [], []
                for hq in range(h * group, (h + 1) * group):
                    terms = [
                        max(float(q[s, hq, d] * low[n, k, d]), float(q[s, hq, d] * high[n, k, d]))
                        for d in range(dim)
                    ]
                    bounds.append(sum(terms))
                    logits += [float(q[s, hq] @ pool[n, k, p]) for p in range(page)]
                assert float(got[s, h, w]) == pytest.approx(max(bounds), abs=1e-10)
                assert float(got[s, h, w]) >= max(logits) - 1e-12


def test_page_scores_of_pages_of_one_slot_are_the_logits() -> None:
    pool = torch.randn(6, 1, 1, 5, dtype=F64)
    low, high = torch.empty(6, 1, 5, dtype=F64), torch.empty(6, 1, 5, dtype=F64)
    ops.page_bounds(pool, torch.arange(6), low, high)
    q = torch.randn(1, 1, 5, dtype=F64)
    got = ops.page_scores(q, low, high, torch.arange(6).reshape(1, 1, 6).int(), 1)
    torch.testing.assert_close(got[0, 0], pool[:, 0, 0] @ q[0, 0], rtol=0, atol=1e-14)


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    logits = q @ k.T
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_merge_of_any_split_equals_the_unsplit(ways: int) -> None:
    q, k, v = (torch.randn(n, 6, dtype=F64) for n in (5, 40, 40))
    q = q * 4
    want_out, want_lse = attend(q, k, v)
    for _ in range(20):
        cuts = [0, *sorted(random.sample(range(1, 40), ways - 1)), 40]
        parts = [attend(q, k[a:b], v[a:b]) for a, b in pairwise(cuts)]
        random.shuffle(parts)
        out, lse = ops.merge_lse([o for o, _ in parts], [x for _, x in parts])
        torch.testing.assert_close(out, want_out, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)


def test_merge_ignores_empty_sets_even_when_their_output_is_garbage() -> None:
    q, k, v = (torch.randn(n, 6, dtype=F64) for n in (3, 8, 8))
    out, lse = attend(q, k, v)
    empty = torch.full_like(out, NAN), torch.full_like(lse, -math.inf)
    got, got_lse = ops.merge_lse([empty[0], out], [empty[1], lse])
    torch.testing.assert_close(got, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(got_lse, lse, rtol=0, atol=1e-12)
    nothing, nothing_lse = ops.merge_lse([empty[0], empty[0]], [empty[1], empty[1]])
    assert (nothing == 0).all()
    assert nothing_lse.isneginf().all()
