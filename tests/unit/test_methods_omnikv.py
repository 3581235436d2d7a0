"""OmniKV: which layers choose and which follow, what passes between them within a step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract.driver import Driver, Reads, make, solo
from contract.reads import drive, random_layer, spec_of
from contract.toy import VOCAB, Toy, toy_spec
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.plan import merge_plans
from sparseengine.core.context import StepContext
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.view import Selection
from sparseengine.engine.controller import Controller
from sparseengine.errors import RequestError, UnsupportedError
from sparseengine.methods import check_model
from sparseengine.methods.omnikv import OmniKV


def build(kinds: str, **knobs: Any) -> OmniKV:
    method = make(toy_spec(kinds), "omnikv", **knobs)
    assert isinstance(method, OmniKV)
    return method


def test_builtin_filters_are_those_of_llama3_8b_by_depth() -> None:
    method = build("f" * 32)
    expected = [i for i in range(3, 32) if i not in (8, 18)]
    assert method.layers == tuple(expected)
    assert build("f" * 32, preset="llama3_8b").layers == tuple(
        i for i in expected if i not in (3, 9, 19)
    ), "the layer after a filter waits"
    assert build("f" * 64).dense_layers() == {*range(5), 16, 36}


def test_filters_skip_layers_of_other_kinds() -> None:
    method = build("wfwfwf", filter_layers=[1])
    assert method.layers == (3, 5)
    with pytest.raises(RequestError, match=r"layers \[0\] are no layers of full or latent"):
        build("wfwfwf", filter_layers=[0])


def test_all_layers_as_filters_are_dense_but_for_the_last() -> None:
    assert build("fff", filter_layers=[0, 1, 2]).layers == (2,), "nothing follows it"
    late = build("ff", filter_layers=[0], wait=5)
    with pytest.raises(UnsupportedError, match="would leave every layer"):
        check_model(late, late.model)


def test_followers_get_the_very_tensor_that_their_filter_chose() -> None:
    """And filters choose by their own queries and keys, of this step."""
    toy = Toy("flffw")
    method = make(toy.spec, "omnikv", filter_layers=[0, 2], sink=1, recent=2)
    assert isinstance(method, OmniKV)
    driver = Driver(toy, {"m": method})
    chosen: list[Selection] = []
    given: dict[int, list[Selection | None]] = {i: [] for i in range(5)}
    choose, select = method.choose, method.select

    def choose_spy(at: Any, width: int) -> Selection:
        chosen.append(choose(at, width))
        keys = at.gather("keys", 0).double().repeat_interleave(at.spec.group_size, 0)  # [Hq, L, D]
        logits = torch.einsum("hd,hld->hl", at.q[0].double(), keys).amax(0)
        length = len(logits)
        logits[[0, length - 2, length - 1]] = float("inf")
        assert chosen[-1].index[0, 0].tolist() == sorted(logits.topk(8).indices.tolist())
        return chosen[-1]

    def select_spy(at: Any) -> Selection | None:
        found = select(at)
        given[at.layer].append(found)
        return found

    method.choose = choose_spy  # type: ignore[method-assign]
    method.select = select_spy  # type: ignore[method-assign]
    request = driver.add(0, _prompt(40), 4, "m", 8)
    driver.finish([request])
    assert len(chosen) == 2 * 3, "two filters in each of three decode steps"
    for step in range(3):
        assert given[0][step] is None
        assert given[2][step] is None
        assert given[1][step] is chosen[2 * step]
        assert given[3][step] is chosen[2 * step + 1]
    assert given[4] == [], "a window layer is not asked"


def test_neighbours_that_come_and_go_change_nothing() -> None:
    """Other budgets, other methods and short rows in the same steps, over several layers."""
    knobs: dict[str, Any] = {"filter_layers": (0, 2), "sink": 2, "recent": 4}
    toy = Toy("ffflf")
    quest = {"dense_layers": 1}
    jobs = [("omnikv", 12, 48, 9), ("omnikv", 20, 33, 4), ("quest", 20, 47, 6), ("omnikv", 9, 7, 8)]
    methods = {
        "omnikv": make(toy.spec, "omnikv", **knobs),
        "quest": make(toy.spec, "quest", **quest),
    }
    expected = [
        solo("ffflf", m, _prompt(n), new, b, **(knobs if m == "omnikv" else quest))
        for m, b, n, new in jobs
    ]
    driver = Driver(toy, methods)
    requests = [driver.add(i, _prompt(n), new, m, b) for i, (m, b, n, new) in enumerate(jobs)]
    assert driver.finish(requests, 19) == expected


def test_needle_seen_by_the_filter_is_read_and_recent_tokens_always_are() -> None:
    length, needle = 400, 137
    q, k, v = random_layer(length + 1, 4, 2, 32, seed=3)
    k[needle, 1, 1:], q[-1, 3, 1:] = 3.0, 1.0  # one head of four asks for it
    method = make(spec_of(4, 2, 32), "omnikv", sink=2, recent=10)
    got = drive(method, q, k, v, [length, 1], 32, 1, attend=False)
    for row in got.reads[-1]:
        assert {0, 1, needle, *range(length - 9, length + 1)} <= set(row)
        assert len(row) == 32


def _read_by_second_layer(visible_in: int) -> list[list[int]]:
    """Two layers; the newest query asks for key 137 in one of them alone."""
    length, dim = 400, 32
    model = replace(spec_of(4, 2, dim), layers=spec_of(4, 2, dim).layers * 2)
    method = make(model, "omnikv", sink=2, recent=10)
    cache = PagedCache(
        model, merge_plans(model, [method.cache_plan()]), num_pages=512, dtype=model.dtype
    )
    backend = Reads(attend=False)
    controller = Controller(model, cache, {"m": method})
    request = Request(0, list(range(length + 1)), length, 2, method="m", budget=32)
    cache.admit(request, cache.match(request))
    inputs = [random_layer(length + 1, 4, 2, dim, seed=7 + layer) for layer in range(2)]
    q, k, _ = inputs[visible_in]
    k[137, :, 1:], q[-1, :, 1:] = 3.0, 1.0
    for start, stop in ((0, length), (length, length + 1)):
        purpose = Purpose.DECODE if start else Purpose.PREFILL
        chunk = Chunk(request, tuple(request.tokens[start:stop]), start, purpose, True)
        plan = StepPlan((chunk,))
        cache.reserve(plan)
        ctx = StepContext(plan, cache, controller, (backend,) * 2, model)
        for layer, qkv in enumerate(inputs):
            ctx.attend(layer, *(x[start:stop] for x in qkv))
        controller.end_step(plan)
    assert backend.log[-2][0] == [list(range(length + 1))] * 2, "the filter reads everything"
    return backend.log[-1][0]


def test_followers_see_what_the_filter_sees_and_nothing_else() -> None:
    """The assumption of the method: a needle that only followers ask for is not found."""
    assert all(137 in row for row in _read_by_second_layer(0))
    assert all(137 not in row for row in _read_by_second_layer(1))


@pytest.mark.parametrize("kinds", ["ff", "ll", "wff"])
def test_a_budget_of_everything_is_dense(kinds: str) -> None:
    dense = solo(kinds, "full", _prompt(48), 5, None)
    assert solo(kinds, "omnikv", _prompt(48), 5, 53) == dense


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]
