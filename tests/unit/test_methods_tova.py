"""TOVA step by step: what each decode step reads equals a float64 simulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from contract import oracles
from contract.driver import PAGE, make
from contract.reads import Driven, drive, random_layer, spec_of
from contract.test_planted import retention
from contract.toy import toy_spec
from sparseengine.core.specs import Ragged
from sparseengine.errors import RequestError

LENGTH, DECODES = 45, 14


def simulate(
    q: Tensor, k: Tensor, length: int, budget: int, burst: int, sink: int = 0, recent: int = 1
) -> list[list[int]]:
    """Positions that each decode step reads: one list for all heads."""
    row, reads = list(range(length)), []

    def cut(now: int) -> list[int]:
        scores = oracles.tova_scores(q[now - 1 : now], k[row])
        (best, *_) = oracles.evict(scores, budget, sink, recent)
        return [row[j] for j in best]

    if length > budget:
        row = cut(length)
    for now in range(length, len(k)):
        row.append(now)
        reads.append(list(row))
        if burst and len(row) >= budget + burst:
            row = cut(now + 1)
    return reads


def run(
    qkv: tuple[Tensor, Tensor, Tensor], budget: int, chunk: int = LENGTH, **knobs: Any
) -> Driven:
    q, k, v = qkv
    steps = [min(chunk, LENGTH - at) for at in range(0, LENGTH, chunk)] + [1] * DECODES
    method = make(spec_of(q.shape[1], k.shape[1], k.shape[2]), "tova", **knobs)
    return drive(method, q, k, v, steps, budget, DECODES)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (4, 1)], ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunk", [LENGTH, 7, LENGTH - 1])
@pytest.mark.parametrize("burst", [0, 1, 4])
@pytest.mark.parametrize("budget", [1, 2, 9, 20, LENGTH - 1, LENGTH, LENGTH + 5, 200])
def test_decode_reads_what_the_newest_query_left(
    heads: tuple[int, int], chunk: int, burst: int, budget: int
) -> None:
    qkv = random_layer(LENGTH + DECODES, *heads, seed=budget + burst)
    got = run(qkv, budget, chunk, burst=burst)
    expected = simulate(qkv[0], qkv[1], LENGTH, budget, burst)
    for read, row in zip(got.reads[-DECODES:], expected, strict=True):
        assert read == [row] * heads[1]
    if burst:
        assert max(map(len, expected)) <= max(budget + burst, min(budget, LENGTH) + 1)


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (3, 0), (3, 5)])
def test_sinks_and_recent_tokens(sink: int, recent: int) -> None:
    dropped_itself = False
    for seed in range(4):
        qkv = random_layer(LENGTH + DECODES, 8, 2, seed=seed)
        got = run(qkv, 8, 10, sink=sink, recent=recent)
        expected = simulate(qkv[0], qkv[1], LENGTH, 8, 1, sink, recent)
        assert got.reads[-DECODES:] == [[row] * 2 for row in expected]
        dropped_itself |= any(LENGTH + i not in row for i, row in enumerate(expected[1:]))
    assert dropped_itself == (recent == 0), "the authors let the newest token go"


def test_bursts_and_single_steps_differ_but_the_budget_is_the_same() -> None:
    qkv = random_layer(LENGTH + DECODES, 8, 2, seed=5)
    one, four = (run(qkv, 20, burst=b) for b in (1, 4))
    assert one.reads[-1] != four.reads[-1]
    assert {row[0] for row in one.kept[-DECODES:]} == {20}
    assert [row[0] for row in four.kept[-DECODES:]] == [21, 22, 23, 20] * 3 + [21, 22]
    assert all(pages <= 2 * -(-24 // PAGE) for pages in four.pages[-DECODES:])


def test_rows_that_grow_past_the_budget_in_decode_are_cut_from_then_on() -> None:
    qkv = random_layer(LENGTH + DECODES, 4, 2, seed=6)
    got = run(qkv, LENGTH + 5)
    lengths = [row[0] for row in got.kept[-DECODES:]]
    assert lengths == [*range(LENGTH + 1, LENGTH + 6), *[LENGTH + 5] * (DECODES - 5)]


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_scores_equal_the_published_definition(heads: tuple[int, int]) -> None:
    """Attention of a window of one query, mean over heads; the newest token always wins."""
    q, k, v = random_layer(LENGTH + 1, *heads, seed=8)
    keys = k[:LENGTH].transpose(0, 1).repeat_interleave(heads[0] // heads[1], 0)  # [Hq, L, D]
    logits = (q[LENGTH - 1][:, None] @ keys.transpose(1, 2)) / q.shape[2] ** 0.5
    scores = F.pad(logits.softmax(-1)[:, 0].mean(0)[:-1], (0, 1), value=1.0)
    kept = scores.topk(20).indices.sort().values.tolist()
    method = make(spec_of(*heads), "tova", preset="kvpress")
    got = drive(method, q, k, v, [LENGTH, 1], 20, 1)
    assert got.reads[-1] == [[*kept, LENGTH]] * heads[1]


def test_the_order_of_the_row_does_not_matter() -> None:
    """Overwriting the victim's slot, as a ring would, reads what compacting reads."""
    q, k, v = (x.double() for x in random_layer(LENGTH + DECODES, 8, 2, seed=9))
    method = make(spec_of(8, 2, 8, torch.float64), "tova")
    got = drive(method, q, k, v, [LENGTH, *[1] * DECODES], 12, DECODES)
    rows = simulate(q, k, LENGTH, 12, 1)
    slots = list(rows[0][:-1])
    for i, row in enumerate(rows):
        now = LENGTH + i
        if i:
            (victim,) = set(slots) - set(row)
            slots[slots.index(victim)] = now - 1
        held = [*slots, now]
        assert set(held) == set(row)
        out = got.outs[i - DECODES][0]
        for g in range(8):
            logits = k[held, g // 4] @ q[now, g] / 8**0.5
            torch.testing.assert_close(out[g], logits.softmax(0) @ v[held, g // 4])


@pytest.mark.parametrize("budget", [64, 128, 256])
def test_a_planted_needle_stays_when_the_question_is_last(budget: int) -> None:
    assert retention("tova", budget, True) == 1.0
    assert retention("tova", budget, False) <= 0.6


@pytest.mark.parametrize("burst", [0, 1, 4, 64])
def test_demand_is_what_rows_reach(burst: int) -> None:
    method = make(toy_spec("fl"), "tova", burst=burst)
    for length, new, budget in ((45, 14, 20), (45, 14, 50), (45, 3, 50), (45, 14, 100), (9, 40, 9)):
        row, longest = min(length, budget), 0
        for _ in range(new):
            row += 1
            longest = max(longest, row)
            row = budget if burst and row >= budget + burst else row
        demand = method.demand(length, new, budget)
        assert longest <= demand.steady_tokens <= longest + PAGE
        assert demand.peak_tokens == max(length, demand.steady_tokens)


def test_the_row_is_one_per_layer_and_knobs_are_checked() -> None:
    method = make(toy_spec("ff"), "tova")
    assert [g.ragged for g in method.cache_plan()] == [Ragged.LAYER]
    assert [a.name for a in method.cache_plan()[0].aux] == ["newest_attention"]
    assert method.traits.graph_safe
    for wrong in ({"burst": -1}, {"preset": "nothing"}, {"window": 3}):
        with pytest.raises(RequestError):
            make(toy_spec("ff"), "tova", **wrong)
