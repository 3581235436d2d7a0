"""H2O: sums over all queries, bursts while decoding, forks, blocks, planted needles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contract import oracles
from contract.cases import CASES
from contract.driver import Driver, make, solo
from contract.reads import drive, random_layer, spec_of
from contract.test_contract import prompt
from contract.test_planted import BUDGETS, LENGTH, retention
from contract.test_read_sets import CHUNKINGS, HEADS, run
from contract.toy import Toy
from sparseengine.methods import h2o


def scores_of(qkv: tuple[Tensor, Tensor, Tensor], steps: list[int], **knobs: Any) -> Tensor:
    """What the prompt's end scored: fp32 [Hkv, L]."""
    q, k, v = qkv
    method = make(spec_of(q.shape[1], k.shape[1], k.shape[2]), "h2o", **knobs)
    assert isinstance(method, h2o.H2O)
    seen: list[Tensor] = []
    retain = method.retain

    def spy(scores: Tensor, lens: Tensor, budget: int) -> Tensor:
        seen.append(scores[0])
        return retain(scores, lens, budget)

    method.retain = spy  # type: ignore[method-assign]
    drive(method, q, k, v, steps, 20, 0)
    return seen[0]


def dense_mass(q: Tensor, k: Tensor) -> Tensor:
    """Column sums of causal attention over queries and query group, in float64: [Hkv, L]."""
    length, group = len(q), q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, 1).double()
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) / q.shape[2] ** 0.5
    dead = torch.ones(length, length, dtype=torch.bool).triu(1)
    mass = logits.masked_fill(dead, float("-inf")).softmax(-1).sum(1)
    return mass.view(k.shape[1], group, length).sum(1)


@pytest.mark.parametrize("steps", [[70], [64, 6], [1] * 70, [33, 1, 36]])
@pytest.mark.parametrize("tile", [1, 1 << 24])
def test_sums_do_not_depend_on_chunks_and_tiles(
    steps: list[int], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h2o, "_TILE_LOGITS", tile)
    qkv = random_layer(70, 8, 2)
    got = scores_of(qkv, steps)
    expected = dense_mass(*qkv[:2])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(got.sum(1), torch.tensor(70 * 4.0)), "each query hands out 1"


def test_the_kvpress_preset_is_the_mean_over_the_queries_that_could_see() -> None:
    """Observed attention: column sums / (L, L - 1, ..., 1); a mean over the group ranks alike."""
    qkv = random_layer(60, 8, 2)
    for steps in ([60], [17, 43]):
        got = scores_of(qkv, steps, preset="kvpress")
        expected = dense_mass(*qkv[:2]) / torch.arange(60, 0, -1)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("knobs", [{}, {"average": True}, {"block": 16}], ids=str)
def test_bursts_while_decoding_keep_what_the_oracle_keeps(
    heads: tuple[int, int], chunking: str, knobs: dict[str, Any]
) -> None:
    length, decodes = 45, 14
    qkv = random_layer(length + decodes, *heads, seed=heads[0])
    mine = {("block_tokens" if n == "block" else n): v for n, v in knobs.items()}
    for budget, interval in ((8, 1), (17, 5), (50, 4)):  # the last one first evicts in decode
        got = run("h2o", qkv, length, budget, CHUNKINGS[chunking], interval=interval, **mine)
        for i in range(decodes):
            n = length + i
            kept = oracles.h2o(qkv[0][:n], qkv[1][:n], budget, length, interval, **knobs)
            assert got.reads[i - decodes] == [[*row, n] for row in kept], f"{budget}, {i}"
            assert max(got.kept[i - decodes]) < budget + interval


def test_an_interval_of_zero_never_evicts_while_decoding() -> None:
    qkv = random_layer(60)
    got = run("h2o", qkv, 45, 20, None, interval=0)
    assert got.kept[-1] == (35, 35)


def test_decay_of_zero_leaves_the_newest_query_alone() -> None:
    length, budget = 45, 12
    q, k, v = random_layer(length + 2)
    got = run("h2o", (q, k, v), length, budget, decay=0.0, interval=1, recent_ratio=0.0)
    mass = dense_mass(q[:length], k[:length]).tolist()
    for h in range(2):
        row = [*oracles.best(mass[h], budget), length]
        logits = q[length, 2 * h : 2 * h + 2].double() @ k[row, h].double().T / 8**0.5
        paid = logits.softmax(-1).sum(0).tolist()
        kept = [row[j] for j in oracles.best(paid, budget)]
        assert got.reads[-1][h] == [*kept, length + 1]


@pytest.mark.parametrize("mix", ["ff", "ll", "wf"])
@pytest.mark.parametrize("at", [7, 30, 48])
def test_forks_gather_apart(mix: str, at: int) -> None:
    """Two owners of one row add to sums of their own, also when one runs ahead of the other."""
    case, toy = CASES["h2o"], Toy(mix)
    shared = prompt(48)
    texts = [shared[:at] + prompt(48, seed)[at:] for seed in (1, 2)]
    expected = [solo(mix, "h2o", t, 12, case.budget, **case.knobs) for t in texts]
    for order in (0, 1):
        driver = Driver(toy, {"m": make(toy.spec, "h2o", **case.knobs)})
        first = driver.add(0, texts[0], 12, "m", case.budget)
        driver.advance([first], at)
        second = driver.add(1, texts[1], 12, "m", case.budget)
        driver.cache.release(1)
        driver.cache.fork(0, 1)
        second.computed = at
        if first.num_generated:
            second.tokens.append(first.tokens[-1])
        pair = [first, second]
        driver.finish([pair[order]], 9)
        driver.finish([pair[1 - order]], 9)
        assert [r.tokens[48:] for r in pair] == expected
        assert driver.cache.free_pages() == driver.cache.total_pages()


@pytest.mark.parametrize("budget", BUDGETS)
def test_planted_needle_with_the_question_last(budget: int) -> None:
    assert retention("h2o", budget, True) == 1.0


@pytest.mark.parametrize("budget", BUDGETS)
def test_planted_needle_is_lost_before_the_question_and_by_blocks(budget: int) -> None:
    most = 0.3 + budget / LENGTH
    assert retention("h2o", budget, False) <= most
    assert retention("h2o", budget, True, block_tokens=128) <= most


def test_adakv_shares_budgets_out_by_gathered_mass() -> None:
    length, budget = 61, 20
    qkv = random_layer(length + 2, 8, 2, seed=3)
    got = run("adakv", qkv, length, budget, 7, scorer="h2o")
    scores = dense_mass(qkv[0][:length], qkv[1][:length]).tolist()
    expected = oracles.adakv(scores, budget, 0.2, 0, budget // 2)
    assert got.reads[-1] == [[*row, length, length + 1] for row in expected]
