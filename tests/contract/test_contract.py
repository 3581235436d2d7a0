"""The twelve points that every method inherits, on every layer mix its traits allow."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contract.cases import CASES, INV_FREQ, MIXES, Case
from contract.driver import PAGE, Driver, is_done, make, solo
from contract.reads import drive, random_layer, spec_of
from contract.toy import VOCAB, Toy
from sparseengine.core.params import SparseParams
from sparseengine.core.specs import LayerKind
from sparseengine.engine.admission import charge
from sparseengine.errors import UnsupportedError
from sparseengine.methods import METHODS, check_model

LONG, NEW = 48, 7


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(VOCAB) for _ in range(length)]


CELLS = [
    pytest.param(case, mix, id=f"{name}-{mix}")
    for name, case in CASES.items()
    for mix in MIXES
    if mix not in case.refused
]
EVICTING = [
    pytest.param(case, id=name)
    for name, case in CASES.items()
    if METHODS.get(case.method).traits.family == "eviction"
]


def driver_for(case: Case, mix: str, **kw: Any) -> Driver:
    toy = Toy(MIXES[mix])
    return Driver(toy, {"m": make(toy.spec, case.method, **case.knobs)}, **kw)


def alone(case: Case, mix: str, tokens: list[int], n: int = NEW) -> list[int]:
    return solo(MIXES[mix], case.method, tokens, n, case.budget, **case.knobs)


def test_every_registered_method_has_a_case() -> None:
    assert {case.method for case in CASES.values()} == set(METHODS)


@pytest.mark.parametrize(
    ("case", "mix"),
    [pytest.param(c, m, id=f"{n}-{m}") for n, c in CASES.items() for m in c.refused],
)
def test_refused_cells_say_why(case: Case, mix: str) -> None:
    spec = Toy(MIXES[mix]).spec
    with pytest.raises(UnsupportedError, match="acts on layers of kind FULL; the model has LATENT"):
        check_model(make(spec, case.method, **case.knobs), spec)


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_01_budget_of_the_whole_length_equals_dense(case: Case, mix: str) -> None:
    budget = None if case.budget is None else LONG + NEW
    dense = solo(MIXES[mix], "full", prompt(LONG), NEW, None)
    knobs = {k: LONG + NEW if k == "select_tokens" else v for k, v in case.knobs.items()}
    assert solo(MIXES[mix], case.method, prompt(LONG), NEW, budget, **knobs) == dense


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_02_chunks_and_neighbours_do_not_change_tokens(case: Case, mix: str) -> None:
    lengths = (LONG, 7, 33)
    expected = [alone(case, mix, prompt(n)) for n in lengths]
    for limit in (1000, 17, 5):
        driver = driver_for(case, mix)
        together = [driver.add(i, prompt(n), NEW, "m", case.budget) for i, n in enumerate(lengths)]
        assert driver.finish(together, limit) == expected, f"chunks of {limit}"


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_03_04_pages_are_conserved_and_demand_is_honest(case: Case, mix: str) -> None:
    driver = driver_for(case, mix)
    free = driver.cache.free_pages()
    method = driver.methods["m"]
    requests = [driver.add(i, prompt(n), NEW, "m", case.budget) for i, n in enumerate((LONG, 39))]
    steady: dict[int, int] = {}

    def note() -> None:
        for r in requests:
            if not r.in_prefill and r.num_generated < NEW:
                used = driver.cache.usage(r.id).pages
                steady[r.id] = max(steady.get(r.id, 0), used)

    driver.finish(requests, 13, note)
    for r in requests:
        demand = method.demand(r.prompt_len, NEW, case.budget)
        most, least = charge(driver.cache, method, r.prompt_len, NEW, case.budget)
        assert driver.peak_pages[r.id] <= most
        assert steady[r.id] <= least
        assert demand.steady_tokens <= demand.peak_tokens <= r.prompt_len + NEW + PAGE
    assert driver.cache.free_pages() == free


@pytest.mark.parametrize("case", EVICTING)
def test_03_eviction_frees_pages(case: Case) -> None:
    driver = driver_for(case, "full")
    request = driver.add(0, prompt(LONG), NEW, "m", case.budget)
    free = driver.cache.free_pages()
    while request.in_prefill:
        driver.advance([request])
    heads = sum(s.kv_heads for s in driver.model.spec.layers)
    assert case.budget is not None
    most = heads * (-(-case.budget // PAGE)) + heads  # a ragged row may waste a page
    assert free - driver.cache.free_pages() <= most < heads * LONG // PAGE


class NoSync(TorchDispatchMode):
    """Fails on every op whose result the host must wait for."""

    BAD = frozenset(
        f"aten::{n}"
        for n in ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal")
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.BAD:
            raise AssertionError(f"{func} needs the host")
        return func(*args, **(kwargs or {}))


class GuardedHooks:
    """A controller whose hooks run under the guard; attention itself is not the method's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def select(self, at: Any) -> Any:
        with NoSync():
            return self.inner.select(at)

    def prefill_masks(self, at: Any) -> Any:
        with NoSync():
            return self.inner.prefill_masks(at)

    def add_digests(self, at: Any, out: Any) -> Any:
        with NoSync():
            return self.inner.add_digests(at, out)

    def observe(self, at: Any) -> None:
        with NoSync():
            self.inner.observe(at)

    def layer_end(self, at: Any, hidden: Any, extra: Any = None) -> None:
        with NoSync():
            self.inner.layer_end(at, hidden, extra)

    def end_step(self, plan: Any) -> None:
        self.inner.end_step(plan)


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_06_decode_never_waits_for_the_host(case: Case, mix: str) -> None:
    driver = driver_for(case, mix)
    requests = [
        driver.add(i, prompt(n), NEW, "m", None if case.budget is None else case.budget + i)
        for i, n in enumerate((LONG, 39))
    ]
    while any(r.in_prefill for r in requests):
        driver.advance([r for r in requests if r.in_prefill])
    view = driver.cache.view

    def guarded_view(layer: int, selection: Any) -> Any:
        with NoSync():
            return view(layer, selection)

    driver.cache.view = guarded_view  # type: ignore[method-assign]
    driver.controller = GuardedHooks(driver.controller)  # type: ignore[assignment]
    driver.advance(requests)
    driver.advance(requests)
    assert [r.num_generated for r in requests] == [3, 3]


@pytest.mark.parametrize("name", ["snapkv", "adakv", "tova", "h2o"])
def test_06_digests_are_weighed_without_waiting(name: str) -> None:
    case = CASES[name]
    driver = driver_for(case, "full")
    asked = SparseParams(dropped_mass=True, compensate=True)
    request = driver.add(0, prompt(LONG), NEW, "m", case.budget, sparse=asked)
    while request.in_prefill:
        driver.advance([request])
    driver.controller = GuardedHooks(driver.controller)  # type: ignore[assignment]
    for _ in range(3):
        driver.advance([request])
    assert request.num_generated == 4


def test_06_the_guard_catches_a_wait() -> None:
    with pytest.raises(AssertionError, match="needs the host"), NoSync():
        torch.ones(1).item()


@pytest.mark.parametrize(("case", "mix"), [c for c in CELLS if c.values[0].prefixes])
def test_08_a_fork_continues_like_a_cold_run(case: Case, mix: str) -> None:
    toy = Toy(MIXES[mix])
    shared, tails = prompt(30), (prompt(30, 1), prompt(21, 2))
    cold = [alone(case, mix, shared + t) for t in tails]
    block = make(toy.spec, case.method, **case.knobs).prefill_block()
    at = 30 if block is None else block  # the prefix both have run: a forked row is unevicted
    driver = driver_for(case, mix)
    first = driver.add(0, shared + tails[0], NEW, "m", case.budget)
    driver.advance([first], at)
    assert first.computed == at
    second = driver.add(1, shared + tails[1], NEW, "m", case.budget)
    driver.cache.release(1)
    driver.cache.fork(0, 1)
    second.computed = at
    assert driver.finish([first, second], 16) == cold


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_08_siblings_forked_after_the_prompt_equal_the_parent(case: Case, mix: str) -> None:
    expected = alone(case, mix, prompt(LONG))
    driver = driver_for(case, mix)
    parent = driver.add(0, prompt(LONG), NEW, "m", case.budget)
    while parent.in_prefill:
        driver.advance([parent], 32)
    child = driver.add(1, prompt(LONG), NEW, "m", case.budget)
    driver.cache.release(1)
    driver.cache.fork(0, 1)
    child.computed, child.tokens = parent.computed, list(parent.tokens)
    assert driver.finish([parent, child]) == [expected, expected]
    assert driver.cache.free_pages() == driver.cache.total_pages()


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_09_abort_at_any_step_leaks_nothing(case: Case, mix: str) -> None:
    driver = driver_for(case, mix)
    free = driver.cache.free_pages()
    keep = driver.add(0, prompt(33), 2 * NEW, "m", case.budget)
    for steps in (1, 2, 4, 6):  # in the prompt, at its end, in decode
        gone = driver.add(steps, prompt(LONG), NEW, "m", case.budget)
        for _ in range(steps):
            driver.advance([r for r in (keep, gone) if not is_done(r)], 16)
        driver.drop(gone)
    again = alone(case, mix, prompt(33), 2 * NEW)
    assert driver.finish([keep], 16) == [again]
    assert driver.cache.free_pages() == free
    assert not getattr(driver.methods["m"], "_pending", {})


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_11_what_free_slots_hold_changes_nothing(case: Case, mix: str) -> None:
    """NaN in every slot that no row holds, or what an ended request has left: the same logits."""
    found = []
    for poison in (True, False):
        driver = driver_for(case, mix, poison=poison)
        if not poison:
            driver.finish([driver.add(9, prompt(LONG, 3), NEW, "m", case.budget)], 17)
        seen: list[torch.Tensor] = []
        logits = driver.model.logits
        driver.model.logits = lambda hidden, f=logits, s=seen: s.append(f(hidden)) or s[-1]
        driver.finish([driver.add(0, prompt(LONG), NEW, "m", case.budget)], 17)
        found.append(seen)
    for poisoned, dirty in zip(*found, strict=True):
        assert poisoned.isfinite().all()
        assert torch.equal(poisoned, dirty)


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_12_preempt_and_resume_equals_undisturbed(case: Case, mix: str) -> None:
    expected = [alone(case, mix, prompt(n)) for n in (LONG, 33)]
    driver = driver_for(case, mix)
    requests = [driver.add(i, prompt(n), NEW, "m", case.budget) for i, n in enumerate((LONG, 33))]
    for victim, steps in ((0, 2), (0, 6), (1, 2), (1, 1)):  # in the prompt and in decode
        for _ in range(steps):
            driver.advance([r for r in requests if not is_done(r)], 16)
        if not is_done(requests[victim]):
            driver.drop(requests[victim])
            driver.resume(requests[victim])
    assert driver.finish(requests, 16) == expected


def test_02_requests_of_several_methods_in_one_batch_equal_solo_runs() -> None:
    toy = Toy("wf")
    chosen = {n: CASES[n] for n in ("full", "snapkv", "adakv", "quest", "streaming_llm", "knorm")}
    driver = Driver(toy, {n: make(toy.spec, c.method, **c.knobs) for n, c in chosen.items()})
    jobs = [(name, c.budget, LONG - i) for i, (name, c) in enumerate(chosen.items())]
    jobs.append(("snapkv", 33, 50))  # a second budget of one method
    requests = [driver.add(i, prompt(n), NEW, name, b) for i, (name, b, n) in enumerate(jobs)]
    expected = [
        solo("wf", chosen[name].method, prompt(n), NEW, b, **chosen[name].knobs)
        for name, b, n in jobs
    ]
    assert driver.finish(requests, 19) == expected


@pytest.mark.parametrize("case", [c for n, c in CASES.items() if c.method != "full"])
def test_layers_of_other_kinds_stay_dense(case: Case) -> None:
    driver = driver_for(case, "window")
    request = driver.add(0, prompt(LONG), NEW, "m", case.budget)
    while request.num_generated < 3:
        driver.advance([request])
    for layer, spec in enumerate(driver.model.spec.layers):
        if spec.kind is LayerKind.WINDOW:
            assert spec.window is not None
            seen, held = spec.window - 1, set(driver.cache.lens(0, layer))
            assert held == {seen + (request.computed - seen) % PAGE}, "whole pages left only"


@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in CASES.items()])
def test_07_two_ranks_with_half_the_heads_decide_as_one(case: Case) -> None:
    """Head split as tensor parallelism makes it; methods that need all heads say so."""
    turns: dict[str, Any] = {"inv_freq": INV_FREQ} if case.shifts else {}
    whole, half = spec_of(4, 2, **turns), spec_of(2, 1, **turns)
    traits = make(whole, case.method, **case.knobs).traits
    if traits.tp != "local":
        assert traits.tp == "reduce"
        return
    q, k, v = random_layer(LONG + 1, q_heads=4, kv_heads=2)
    steps = [LONG, 1]
    one = drive(make(whole, case.method, **case.knobs), q, k, v, steps, case.budget)
    halves = [
        drive(
            make(half, case.method, **case.knobs),
            q[:, 2 * r : 2 * r + 2], k[:, r : r + 1], v[:, r : r + 1], steps, case.budget,
        )
        for r in range(2)
    ]  # fmt: skip
    assert one.reads[-1] == [row for half in halves for row in half.reads[-1]]
    torch.testing.assert_close(one.outs[-1], torch.cat([h.outs[-1] for h in halves], 1))
