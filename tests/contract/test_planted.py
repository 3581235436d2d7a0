"""A planted needle is retained or lost as each method's idea predicts (5 seeds, 1,024 keys)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.driver import make
from contract.reads import drive, mark, spec_of

LENGTH, Q_HEADS, KV_HEADS, DIM = 1024, 8, 2, 64
BUDGETS = (64, 128, 256)
SEEDS = range(5)
NATS = 12.0


def planted(seed: int, is_asked: bool) -> tuple[Tensor, Tensor, int]:
    """q [L + 1, Hq, D], k [L + 1, Hkv, D] and the needle's position.

    Keys share a mean direction, as real ones do; the needle's does not, and has a large norm. A
    question's logit on the needle is NATS above the background's unit variance. The last query
    (a decode step) always asks; the prompt's last 8 queries ask if `is_asked`.
    """
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(LENGTH + 1, KV_HEADS, DIM, generator=rng)
    common, needle = torch.linalg.qr(torch.randn(DIM, 2, generator=rng)).Q.T
    k += 8 * common
    position = int(torch.randint(100, 900, (), generator=rng))
    question = math.sqrt(DIM) * needle  # q.k / sqrt(D) = needle.k: unit variance on background
    k[position] = NATS * needle
    q = torch.randn(LENGTH + 1, Q_HEADS, DIM, generator=rng)
    for direction in (common, needle):  # other queries are about something else
        q -= (q @ direction)[..., None] * direction
    asking = [LENGTH, *(range(LENGTH - 8, LENGTH) if is_asked else ())]
    q[asking] = 0.1 * q[asking] + question
    return mark(q, k), k, position


def retention(name: str, budget: int, is_asked: bool, **knobs: Any) -> float:
    """Share of (seed, KV head) whose decode step reads the needle."""
    found = 0
    for seed in SEEDS:
        q, k, position = planted(seed, is_asked)
        method = make(spec_of(Q_HEADS, KV_HEADS, DIM), name, 16, **knobs)
        block = method.prefill_block() or LENGTH
        steps = [min(block, LENGTH)] * (LENGTH // min(block, LENGTH))
        driven = drive(method, q, k, k, [*steps, 1], budget, 1, 16, attend=False)
        found += sum(position in row for row in driven.reads[-1])
    return found / (len(SEEDS) * KV_HEADS)


ALWAYS = {
    "snapkv": {"kernel": 5},
    "adakv": {"kernel": 5},
    "keydiff": {"recent": 32},
    "quest": {"dense_layers": 0},
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ALWAYS)
def test_with_the_question_last_the_needle_stays(name: str, budget: int) -> None:
    assert retention(name, budget, True, **ALWAYS[name]) == 1.0


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["keydiff", "quest"])
def test_query_free_methods_keep_it_before_the_question_is_known(name: str, budget: int) -> None:
    assert retention(name, budget, False, **ALWAYS[name]) == 1.0


@pytest.mark.parametrize("budget", BUDGETS)
def test_snapkv_is_no_better_than_chance_before_the_question_is_known(budget: int) -> None:
    assert retention("snapkv", budget, False, kernel=5) <= 0.3 + budget / LENGTH


@pytest.mark.parametrize(("budget", "most"), [(64, 0.0), (128, 0.0), (256, 0.4)])
def test_streaming_loses_what_is_outside_its_window(budget: int, most: float) -> None:
    assert retention("streaming_llm", budget, True) <= most


@pytest.mark.parametrize("budget", BUDGETS)
def test_key_norms_lose_a_needle_of_large_norm(budget: int) -> None:
    assert retention("knorm", budget, True, skip_layers=()) == 0.0


@pytest.mark.parametrize("budget", BUDGETS)
def test_random_keeps_it_about_as_often_as_its_budget_says(budget: int) -> None:
    assert retention("random", budget, True) <= 0.4 + budget / LENGTH
