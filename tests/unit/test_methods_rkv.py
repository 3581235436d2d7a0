"""R-KV: importance minus redundancy, in tiles, again while decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contract import oracles
from contract.driver import make
from contract.reads import drive, random_layer, spec_of
from contract.test_planted import BUDGETS, retention
from contract.test_read_sets import CHUNKINGS, HEADS, run
from sparseengine.errors import RequestError
from sparseengine.methods import METHODS, rkv


def scores_of(qkv: tuple[Tensor, Tensor, Tensor], steps: list[int], **knobs: Any) -> Tensor:
    """What the prompt's end scored: [Hkv, L]."""
    q, k, v = qkv
    method = make(spec_of(q.shape[1], k.shape[1], k.shape[2]), "rkv", **knobs)
    assert isinstance(method, rkv.RKV)
    seen: list[Tensor] = []
    retain = method.retain

    def spy(scores: Tensor, lens: Tensor, budget: int) -> Tensor:
        seen.append(scores[0])
        return retain(scores, lens, budget)

    method.retain = spy  # type: ignore[method-assign]
    drive(method, q, k, v, steps, 20, 0)
    return seen[0]


def reference(q: Tensor, k: Tensor, weight: float) -> Tensor:
    """The published scores with whole matrices, heads first: q [Hq, L, D], k [Hkv, L, D]."""
    window, length = 8, k.shape[1]
    keys = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    logits = (q[:, -window:] @ keys.mT / q.shape[2] ** 0.5).view(k.shape[0], -1, window, length)
    attention = logits.amax(1)[..., :-window].softmax(-1).mean(1)
    important = torch.nn.functional.max_pool1d(attention, 7, stride=1, padding=3)
    unit = k / k.norm(dim=-1, keepdim=True)
    cosine = unit @ unit.mT
    cosine[:, torch.arange(length), torch.arange(length)] = 0
    newest = torch.where(cosine > 0.5, torch.arange(length), 0).max(-1, keepdim=True).values
    cosine.scatter_(-1, newest, 0)
    redundant = cosine.mean(1).softmax(-1)[:, :-window]
    return weight * important - (1 - weight) * redundant


@pytest.mark.parametrize("tile", [1, 1000, 1 << 24])
@pytest.mark.parametrize(("weight", "preset"), [(0.07, "authors"), (0.1, "paper"), (1.0, "")])
def test_scores_equal_the_published_definition_whatever_the_tiles(
    tile: int, weight: float, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rkv, "_TILE_ENTRIES", tile)
    qkv = random_layer(90, 8, 2, dim=4, seed=5)
    knobs = {"preset": preset} if preset else {"importance": weight}
    q, k = (x.double().transpose(0, 1) for x in qkv[:2])
    expected = reference(q, k, weight)
    for steps in ([90], [50, 40], [86, 3, 1]):
        got = scores_of(qkv, steps, **knobs)[:, :-8]
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_bursts_while_decoding_keep_what_the_oracle_keeps(
    heads: tuple[int, int], chunking: str
) -> None:
    length, decodes = 45, 14
    qkv = random_layer(length + decodes, *heads, seed=heads[0])
    for budget, interval in ((8, 1), (17, 5), (50, 4)):  # the last one first evicts in decode
        knobs = {"interval": interval, "window": 4, "kernel": 3}
        got = run("rkv", qkv, length, budget, CHUNKINGS[chunking], **knobs)
        for i in range(decodes):
            n = length + i
            kept = oracles.rkv(qkv[0][:n], qkv[1][:n], budget, length, **knobs)
            assert got.reads[i - decodes] == [[*row, n] for row in kept], f"{budget}, {i}"
            assert max(got.kept[i - decodes]) < budget + interval


def test_an_answer_that_outgrows_the_budget_after_a_short_prompt() -> None:
    """Reasoning: nearly all tokens are generated, from a prompt shorter than the window."""
    qkv = random_layer(80)
    got = run("rkv", qkv, 5, 16, None, interval=8)
    kept = oracles.rkv(qkv[0][:79], qkv[1][:79], 16, 5, interval=8)
    assert got.reads[-1] == [[*row, 79] for row in kept]
    assert max(max(n) for n in got.kept) < 24


@pytest.mark.parametrize("seed", range(4))
def test_of_many_copies_few_stay_and_the_newest_is_among_them(seed: int) -> None:
    length, copies = 200, list(range(20, 180, 8))
    q, k, v = random_layer(length + 1, dim=32, seed=seed)
    k[copies, :, 1:] = k[copies[0], :, 1:].clone()
    q *= 0.01  # attention hardly tells tokens apart
    got = run("rkv", (q, k, v), length, length - len(copies) + 2, None)
    for row in got.reads[-1]:
        left = sorted(set(row) & set(copies))
        assert 1 <= len(left) <= 3
        assert left[-1] == copies[-1]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("is_asked", [True, False])
def test_planted_needle_stays_asked_or_not(budget: int, is_asked: bool) -> None:
    assert retention("rkv", budget, is_asked) == 1.0


def test_even_kernels_are_refused() -> None:
    with pytest.raises(RequestError, match="must be odd"):
        METHODS.get("rkv").config_class(kernel=4)
