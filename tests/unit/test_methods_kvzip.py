"""KVzip: replays that leave nothing, scores in any order, one threshold over layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract import oracles
from contract.cases import CASES, Case
from contract.driver import PAGE, Driver, make, replay_chunk, solo
from contract.reads import drive, random_layer, spec_of
from contract.test_contract import prompt
from contract.test_planted import LENGTH, planted
from contract.test_scheduled import ask, drain, engine_for
from contract.toy import Toy, toy_spec
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Purpose, Request, StepPlan
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.core.view import Keep
from sparseengine.errors import RequestError
from sparseengine.methods import kvzip
from sparseengine.methods.kvzip import KVzip, KVzipConfig
from sparseengine.methods.pending import Pending

KNOBS: dict[str, Any] = {"chunk": 8, "lead": 2, "sink": 2, "recent": 4}


def method_on(model: ModelSpec, **knobs: Any) -> KVzip:
    method = make(model, "kvzip", **{**KNOBS, **knobs})
    assert isinstance(method, KVzip)
    return method


def request_of(length: int, budget: int | None) -> Request:
    return Request(0, list(range(1, length + 1)), length, 8, method="m", budget=budget)


def test_runs_are_chunks_behind_what_precedes_them() -> None:
    method = method_on(toy_spec("ff"), prefix=(60, 59))
    assert method.replay(request_of(21, 20)) == (
        (60, 59, *range(1, 9)),
        (60, 59, *range(7, 17)),
        (60, 59, *range(15, 22)),
    )
    resumed = request_of(21, 20)
    resumed.tokens.extend((3, 4))
    assert method.replay(resumed)[-1] == (60, 59, *range(15, 22)), "generated tokens are not text"


@pytest.mark.parametrize("budget", [20, 21])
def test_nothing_happens_to_short_prompts(budget: int) -> None:
    method = method_on(toy_spec("ff"))
    assert method.replay(request_of(20, budget)) == ()
    assert method.demand(20, 8, budget) == (28, 28)


@pytest.mark.parametrize("chunk", [1, 5, 8, 48, 2000])
@pytest.mark.parametrize("lead", [0, 3, 70])
@pytest.mark.parametrize("prefix", [(), (1, 2, 3)])
def test_demand_is_the_prompt_and_the_longest_run(
    chunk: int, lead: int, prefix: tuple[int, ...]
) -> None:
    method = method_on(toy_spec("ff"), chunk=chunk, lead=lead, prefix=prefix)
    longest = max(map(len, method.replay(request_of(48, 20))))
    exact = 48 + longest
    assert exact <= method.demand(48, 8, 20).peak_tokens <= exact + min(chunk, 48) - 1
    assert method.demand(48, 8, 20).steady_tokens == 20 + PAGE - 1 + 8


def test_runs_are_shorter_near_the_models_longest_text() -> None:
    model = replace(toy_spec("ff"), max_position=1000)
    longest = [
        max(map(len, method_on(model, chunk=300).replay(request_of(n, 20))))
        for n in (500, 800, 950, 999)
    ]
    assert longest == [300, 200, 66, 66]


def test_prefix_tokens_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(RequestError, match=r"kvzip: prefix holds token ids \[61\]"):
        method_on(toy_spec("ff"), prefix=(3, 61))


class Looks(KVzip):
    """Runs and scores, and cuts nothing."""

    ran = 0

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        self.ran += sum(c.purpose is Purpose.REPLAY for c in plan.chunks)
        super().evict(plan)
        return ()


@pytest.mark.parametrize("kinds", ["ff", "wf", "ll", "rf", "fg", "fwr"])
def test_runs_leave_nothing_behind(kinds: str) -> None:
    toy, tokens = Toy(kinds), prompt(48)
    method = Looks(KVzipConfig(**KNOBS), toy.spec)
    method.page_size = PAGE
    driver = Driver(toy, {"m": method})
    request = driver.add(0, tokens, 7, "m", 20)
    driver.advance([request])
    layers = [i for i, s in enumerate(toy.spec.layers) if s.kind is not LayerKind.RECURRENT]
    assert all(max(driver.cache.lens(0, layer)) <= 48 for layer in layers)
    assert driver.finish([request]) == [solo(kinds, "full", tokens, 7, None)]
    assert method.ran == 6
    if "w" not in kinds:
        heads = sum(toy.spec.layers[la].kv_heads for la in layers)
        assert driver.peak_pages[0] == heads * (48 + 8 + 4) // PAGE


def test_a_request_that_goes_between_two_runs_is_forgotten() -> None:
    toy, tokens = Toy("ff"), prompt(48)
    method = method_on(toy.spec)
    driver = Driver(toy, {"m": method})
    request = driver.add(0, tokens, 7, "m", 20)
    driver.step([driver.next_chunk(request, 48)])
    for run in method.replay(request)[:3]:
        driver.step([replay_chunk(request, run)])
    assert method._ran == {0: 3}
    driver.drop(request)
    driver.resume(request)
    expected = solo("ff", "kvzip", tokens, 7, 20, **KNOBS)
    assert driver.finish([request], 17) == [expected]
    assert not method._ran
    assert not method._pending


@pytest.mark.parametrize("kinds", ["ff", "gf", "ll"])
def test_pairs_of_all_layers_share_the_budget(kinds: str) -> None:
    toy, budget = Toy(kinds), 20
    driver = Driver(toy, {"m": method_on(toy.spec)})
    request = driver.add(0, prompt(48), 7, "m", budget)
    driver.advance([request])
    rows = [driver.cache.lens(0, layer) for layer in range(2)]
    if kinds != "gf":  # layers of two sizes have a threshold each
        assert len(set(rows)) > 1
        assert sum(map(sum, rows)) == budget * sum(map(len, rows))
    else:
        assert [sum(r) for r in rows] == [budget * len(r) for r in rows]
    assert all(n >= 6 for row in rows for n in row), "sinks and newest tokens stay"


def test_one_threshold_over_layers_and_heads_breaks_ties_by_position() -> None:
    method, length = method_on(toy_spec("fff"), sink=1, recent=2), 30
    rng = torch.Generator().manual_seed(4)
    scores = [torch.randint(0, 5, (2, length), generator=rng) / 4 for _ in range(3)]
    for budget in (1, 3, 7, 16, 29):
        items = [(la, Pending(s, (length,) * 2, budget)) for la, s in enumerate(scores)]
        keeps = method._together(9, items)
        must = oracles.forced(length, budget, 1, 2)
        ranked = [
            2.0 if j in must else float(scores[la][h, j])
            for j in range(length)
            for la in range(3)
            for h in range(2)
        ]
        best = oracles.best(ranked, 6 * budget)
        for keep in keeps:
            assert keep.request == 9
            for h, mask in enumerate(keep.masks):
                mine = [i // 6 for i in best if i % 6 == 2 * (keep.layer or 0) + h]
                assert mask.nonzero()[:, 0].tolist() == mine


def test_scores_do_not_depend_on_tiles_and_soft_caps_are_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = random_layer(46, 8, 2)
    whole = drive(method_on(spec_of(8, 2), chunk=16), q * 3, k, v, [45, 1], 20)
    monkeypatch.setattr(kvzip, "_TILE_LOGITS", 8 * 40 * 3)
    tiled = drive(method_on(spec_of(8, 2), chunk=16), q * 3, k, v, [45, 1], 20)
    assert tiled.reads == whole.reads
    spec = spec_of(8, 2)
    capped = replace(spec, layers=(replace(spec.layers[0], softcap=0.05),))
    got = drive(method_on(capped, chunk=16), q * 3, k, v, [45, 1], 20)
    assert got.reads != whole.reads


@pytest.mark.parametrize("form", ["pair", "uniform"])
def test_a_needle_that_its_own_repetition_needs_stays_before_any_question(form: str) -> None:
    """The prompt's end does not ask; whoever repeats the needle looks at it."""
    for seed in range(5):
        q, k, position = planted(seed, False)
        q[position] = q[LENGTH]
        for name, knobs in (("kvzip", {"chunk": 256, "form": form}), ("snapkv", {"kernel": 5})):
            method = make(spec_of(8, 2, 64), name, 16, **knobs)
            driven = drive(method, q, k, k, [LENGTH, 1], 64, 1, 16, attend=False)
            if name == "kvzip":
                assert all(position in row for row in driven.reads[-1])
            elif seed == 0:
                assert not any(position in row for row in driven.reads[-1])


@pytest.mark.parametrize("budget", [20, 33])
def test_records_and_tokens_of_the_engine(budget: int) -> None:
    """The record names what is left after the runs as what the prompt left."""
    case, tokens = CASES["kvzip_uniform"], prompt(48)
    engine = engine_for(Toy("wf"), [case], 90)
    sparse = SparseParams(case.method, budget=budget, record=True, **case.knobs)
    sampling = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, n=2)
    engine.add_request(tokens, sampling, sparse)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    expected = solo("wf", case.method, tokens, 7, budget, **case.knobs)
    assert [list(o.token_ids) for o in outputs[-1].outputs] == [expected] * 2
    for output in outputs[-1].outputs:
        assert output.sparse is not None
        (retained,) = output.sparse.retained
        assert (retained.event, retained.computed) == ("prefill", 48)
        assert [len(row) for row in retained.positions[1]] == [budget] * 2


def test_a_run_longer_than_a_step_has_one_of_its_own() -> None:
    knobs = {**KNOBS, "chunk": 2000}
    case = Case("kvzip", knobs)
    engine, tokens = engine_for(Toy("wf"), [case], 90), prompt(48)
    ask(engine, case, tokens, "0")
    ask(engine, case, prompt(33), "1")
    found = drain(engine)
    assert found["0"] == [solo("wf", "kvzip", tokens, 7, 20, **knobs)]
    assert found["1"] == [solo("wf", "kvzip", prompt(33), 7, 20, **knobs)]


class Speaks:
    """A vocabulary in which every character is a token."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(30 + ord(c) % 30 for c in text)

    def ending_in(self, marks: Sequence[str]) -> frozenset[int]:
        return frozenset()

    def answer_header(self) -> tuple[int, ...]:
        return (60, 59)


def test_words_ask_for_each_repetition_and_the_answer_begins_behind_them() -> None:
    method, words = method_on(toy_spec("ff")), Speaks()
    method.read(words)
    whole = words.encode("\n\nRepeat the previous context exactly.")
    part = words.encode("\n\nRepeat the part of the previous context exactly, starting with ")
    assert method.replay(request_of(21, 20)) == (
        (*whole, 60, 59, *range(1, 9)),
        (*part, 7, 8, 60, 59, *range(9, 17)),
        (*part, 15, 16, 60, 59, *range(17, 22)),
    )
    longest = max(map(len, method.replay(request_of(48, 20))))
    assert method.demand(48, 8, 20).peak_tokens == 48 + longest
    for knobs in ({"words": False}, {"prefix": (5,)}):
        silent = method_on(toy_spec("ff"), **knobs)
        silent.read(words)
        assert silent.replay(request_of(21, 20))[0] == (*knobs.get("prefix", ()), *range(1, 9))


@pytest.mark.parametrize("form", ["layer", "head"])
@pytest.mark.parametrize("budget", [7, 12, 20, 33, 44])
def test_layers_and_heads_are_chosen_as_the_definition_says(form: str, budget: int) -> None:
    """Scores that both forms see are given; the choice is compared with one by sorting."""
    rng = torch.Generator().manual_seed(budget)
    scores = torch.rand(3, 2, 45, generator=rng)
    method = method_on(toy_spec("fff"), form=form)
    method._pending[0] = {i: Pending(scores[i], (45, 45), budget) for i in range(3)}
    request = request_of(45, budget)
    keeps = method.evict(StepPlan((replay_chunk(request, (1,)),)))
    got = {k.layer: [m.nonzero().flatten().tolist() for m in k.masks] for k in keeps}
    must = oracles.forced(45, budget, 2, 4)
    if form == "layer":
        expected = {i: oracles.adakv(scores[i].tolist(), budget, 0.0, 2, 4) for i in range(3)}
    else:
        rows = scores.flatten(0, 1).tolist()
        top = [max(x for j, x in enumerate(row) if j not in must) for row in rows]
        whole = oracles.best(top, 6 * (budget - len(must)) // (45 - len(must)))
        kept = [list(range(45)) if r in whole else sorted(must) for r in range(6)]
        expected = {i: kept[2 * i : 2 * i + 2] for i in range(3)}
        assert sum(map(len, kept)) <= 6 * budget
    assert got == expected
