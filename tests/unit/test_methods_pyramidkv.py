"""Pyramids of budgets, what each layer then keeps, and what the scheduler is promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract import oracles
from contract.driver import PAGE, Reads, make
from contract.reads import random_layer
from contract.toy import KINDS, toy_spec
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.plan import merge_plans
from sparseengine.core.context import StepContext
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.engine.controller import Controller
from sparseengine.errors import RequestError
from sparseengine.methods.pyramidkv import (
    PyramidKV,
    exact_pyramid,
    kvpress_pyramid,
    stepped_pyramid,
)


def linear(layers: int, length: int, budget: int, window: int, beta: int) -> list[float]:
    """The pyramid before rounding, in float64: ends that sum to twice the mean, equal steps."""
    mean = float(budget - window)
    if layers == 1 or mean <= 0 or length < 2 * mean:
        return [float(budget)] * layers
    last = float((budget - window) // beta)
    first = min(2 * mean - last, float(length - window))
    last = 2 * mean - first
    return [window + first + (last - first) * i / (layers - 1) for i in range(layers)]


SHAPES = st.tuples(
    st.integers(1, 40),  # layers
    st.integers(2, 5000),  # length
    st.integers(1, 4999),  # budget
    st.integers(1, 128),  # window
    st.integers(1, 64),  # beta
).filter(lambda s: s[2] < s[1])


@given(SHAPES)
def test_exact_budgets_sum_fall_and_stay_within_a_token_of_the_line(
    shape: tuple[int, int, int, int, int],
) -> None:
    layers, length, budget, window, beta = shape
    got = exact_pyramid(*shape)
    assert sum(got) == layers * budget
    assert list(got) == sorted(got, reverse=True)
    assert all(min(budget, window) <= n <= length for n in got)
    assert all(abs(a - b) < 1 + 1e-9 for a, b in zip(got, linear(*shape), strict=True))
    if beta == 1:
        assert set(got) == {budget}


@given(SHAPES)
def test_other_forms_never_exceed_the_row(shape: tuple[int, int, int, int, int]) -> None:
    for form in (stepped_pyramid, kvpress_pyramid):
        got = form(*shape)
        assert list(got) == sorted(got, reverse=True)
        assert all(0 < n <= shape[1] for n in got)


def test_the_authors_integer_steps_miss_the_total() -> None:
    assert stepped_pyramid(4, 1000, 32, 8, 20) == (55, 40, 25, 10)  # 130 of 128
    assert exact_pyramid(4, 1000, 32, 8, 20) == (55, 40, 24, 9)


def test_a_first_layer_that_would_exceed_the_prompt_gives_to_the_last() -> None:
    assert exact_pyramid(3, 80, 48, 8, 20) == (80, 48, 16)
    assert exact_pyramid(3, 79, 48, 8, 20) == (48, 48, 48), "shorter than twice the share"


def test_kvpress_is_uniform_where_its_pyramid_does_not_hold_the_window() -> None:
    """window 64, beta 20: S=400 and S=1600 at half, and the fallback at a quarter of 4,096."""
    assert kvpress_pyramid(4, 400, 200, 64, 20) == (336, 245, 155, 64)
    assert kvpress_pyramid(2, 1600, 800, 64, 20) == (1536, 64)
    assert kvpress_pyramid(2, 4096, 1024, 64, 20) == (1024, 1024)
    assert kvpress_pyramid(2, 4096, 1280, 64, 20) == (2496, 64)


def decode_reads(
    kinds: str, length: int, budget: int, chunk: int, seed: int = 0, **knobs: Any
) -> tuple[list[list[list[int]]], list[tuple[torch.Tensor, torch.Tensor]], PagedCache]:
    """Positions that each layer's heads read in the step after the prompt, and q, k per layer."""
    model = toy_spec(kinds)
    method = make(model, "pyramidkv", **knobs)
    groups = merge_plans(model, [method.cache_plan()])
    cache = PagedCache(model, groups, num_pages=2048, dtype=model.dtype, poison=True)
    controller = Controller(model, cache, {"m": method})
    layers = [
        random_layer(length + 1, s.q_heads, s.kv_heads, s.head_dim, seed=seed + i)
        for i, s in enumerate(model.layers)
    ]
    request = Request(0, list(range(length + 1)), length, 2, method="m", budget=budget)
    cache.admit(request, cache.match(request))
    backends = tuple(Reads(attend=False) for _ in model.layers)
    at = 0
    while at <= length:
        stop = min(at + chunk, length) if at < length else length + 1
        purpose = Purpose.PREFILL if at < length else Purpose.DECODE
        plan = StepPlan((Chunk(request, tuple(range(at, stop)), at, purpose, True),))
        cache.reserve(plan)
        ctx = StepContext(plan, cache, controller, backends, model)
        for i, (q, k, v) in enumerate(layers):
            value = (
                v if KINDS[kinds[i]].kind.name != "LATENT" else k[..., : model.layers[i].value_dim]
            )
            ctx.attend(i, q[at:stop], k[at:stop], value[at:stop])
        controller.end_step(plan)
        cache.check()
        at = stop
    return [b.log[-1][0] for b in backends], [(q, k) for q, k, _ in layers], cache


@pytest.mark.parametrize("kinds", ["ffff", "lll", "fwff", "wffw", "gfl"])
@pytest.mark.parametrize("chunk", [1000, 17, 1])
@pytest.mark.parametrize("budget", [5, 12, 20, 33])
def test_each_layer_keeps_the_best_of_its_own_budget(kinds: str, chunk: int, budget: int) -> None:
    length, window = 60, 8
    knobs = {"window": window, "kernel": 5, "sink": 3}
    reads, layers, _ = decode_reads(kinds, length, budget, chunk, **knobs)
    acting = [i for i, kind in enumerate(kinds) if kind != "w"]
    budgets = exact_pyramid(len(acting), length, budget, window, 20)
    assert len(set(budgets)) > 1 or budget <= window
    for i, n in zip(acting, budgets, strict=True):
        q, k = (x[:length] for x in layers[i])
        kept = oracles.evict(oracles.snapkv_scores(q, k, window, 5), n, 3, window)
        assert reads[i] == [[*row, length] for row in kept], f"layer {i}"


def test_with_beta_one_it_is_snapkv() -> None:
    knobs: dict[str, Any] = {"window": 8, "kernel": 5, "sink": 3}
    reads, layers, _ = decode_reads("fff", 60, 20, 1000, beta=1, **knobs)
    for got, (q, k) in zip(reads, layers, strict=True):
        kept = oracles.evict(oracles.snapkv_scores(q[:60], k[:60], 8, 5), 20, 3, 8)
        assert got == [[*row, 60] for row in kept]


def test_a_prompt_that_is_not_longer_than_the_budget_is_left_alone() -> None:
    for budget in (60, 61, 500):
        reads, _, _ = decode_reads("fff", 60, budget, 1000, window=8)
        assert reads == [[list(range(61))] * 2] * 3


@pytest.mark.parametrize("kinds", ["ffff", "gfg", "ll", "wfwf"])
@pytest.mark.parametrize("form", ["exact", "steps", "kvpress"])
@pytest.mark.parametrize("beta", [1, 3, 20])
def test_demand_covers_the_pages_of_all_layers(kinds: str, form: str, beta: int) -> None:
    model = toy_spec(kinds)
    for length in (30, 61, 200):
        for budget in (5, 16, 29, 70):
            method = make(model, "pyramidkv", window=6, beta=beta, form=form)
            assert isinstance(method, PyramidKV)
            for new in (1, 2, 3, 7):
                demand = method.demand(length, new, budget)
                assert demand.peak_tokens >= max(length, demand.steady_tokens)
                if length <= budget:
                    assert demand == (length + new, length + new)
                    continue
                rows = method.budgets_of(length, budget)
                heads = [model.layers[i].kv_heads for i in method.layers]
                pages = sum(h * -(-(n + new) // PAGE) for h, n in zip(heads, rows, strict=True))
                promised = -(-demand.steady_tokens // PAGE) * sum(heads)
                assert pages <= promised < pages + sum(heads)


def test_presets_and_refusals() -> None:
    model = toy_spec("ff")
    authors = make(model, "pyramidkv", preset="authors").config
    assert (authors.window, authors.kernel, authors.pooling, authors.form) == (8, 7, "max", "steps")
    kvpress = make(model, "pyramidkv", preset="kvpress", beta=10).config
    assert (kvpress.window, kvpress.kernel, kvpress.form, kvpress.beta) == (64, 5, "kvpress", 10)
    for wrong in ({"beta": 0}, {"form": "round"}, {"preset": "paper"}, {"kernel": 4}):
        with pytest.raises(RequestError):
            make(model, "pyramidkv", **wrong)
