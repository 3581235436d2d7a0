"""(2), (4), (9), (12) under the real engine: all methods at once, little memory, random aborts."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

from contract.cases import CASES, MIXES, Case
from contract.driver import PAGE, make, solo
from contract.test_contract import CELLS, prompt
from contract.toy import Toy
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.plan import merge_plans
from sparseengine.config import SchedulerConfig
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.specs import CacheGroup
from sparseengine.engine.collector import Collector
from sparseengine.engine.controller import Controller
from sparseengine.engine.engine import Engine
from sparseengine.engine.intake import Intake, MethodTable
from sparseengine.engine.memory import _fit
from sparseengine.engine.prefix import Prefixes
from sparseengine.engine.runner import Runner
from sparseengine.engine.scheduler import Scheduler
from sparseengine.errors import CapacityError

NEW = 7


def engine_for(
    toy: Toy, cases: list[Case], num_pages: int, *, keeps: bool = False, **scheduler: object
) -> Engine:
    """The parts that a start-up wires together, around the toy model. keeps: a prefix cache."""
    plans: list[tuple[CacheGroup, ...]] = [
        make(toy.spec, case.method, **case.knobs).cache_plan() for case in cases
    ]
    groups = merge_plans(toy.spec, plans)
    cache = PagedCache(
        toy.spec, groups, num_pages=num_pages, max_num_seqs=64, max_chunk=32, poison=True
    )
    names = list(dict.fromkeys(case.method for case in cases))
    methods = MethodTable(toy.spec, names, groups)
    controller = Controller(toy.spec, cache, methods.instances, methods.patterns)
    backends = [ReferenceBackend()] * len(toy.spec.layers)
    runner = Runner(toy, toy.spec, cache, controller, backends, torch.device("cpu"))
    collector = Collector(controller, runner, None, ())
    config = SchedulerConfig(max_num_batched_tokens=32, **scheduler)  # type: ignore[arg-type]
    prefixes = Prefixes(cache, methods.instances, enabled=keeps)
    return Engine(
        intake=Intake(toy.spec, methods, None, max_model_len=256),
        scheduler=Scheduler(
            config, cache, methods.instances, collector, controller.shrink, prefixes
        ),
        runner=runner,
        controller=controller,
        collector=collector,
    )


def ask(
    engine: Engine, case: Case, tokens: list[int], name: str, n: int = 1, new: int = NEW
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, n=n)
    sparse = SparseParams(case.method, budget=case.budget, **case.knobs)
    engine.add_request(tokens, sampling, sparse, request_id=name)


def drain(engine: Engine) -> dict[str, list[list[int]]]:
    found = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = [list(c.token_ids) for c in output.outputs]
        engine.scheduler.cache.check()
    return found


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_preempted_and_crowded_requests_end_as_alone(case: Case, mix: str) -> None:
    """Memory for about two requests and optimistic admission: some are preempted."""
    toy, lengths = Toy(MIXES[mix]), (48, 33, 40, 21)
    pages = 2 * -(-(48 + 1) // PAGE)  # two prompts and a token fit, their whole output does not
    engine = engine_for(toy, [case], pages, reserve_output_tokens=1)
    free = engine.scheduler.cache.free_pages()
    for i, length in enumerate(lengths):
        ask(engine, case, prompt(length), str(i), n=1 + i % 2)
    found = drain(engine)
    for i, length in enumerate(lengths):
        kinds, tokens = MIXES[mix], prompt(length)
        expected = solo(kinds, case.method, tokens, NEW, case.budget, **case.knobs)
        assert found[str(i)] == [expected] * (1 + i % 2)
    assert engine.scheduler.cache.free_pages() == free


def test_dense_memory_that_preempts_is_really_tight() -> None:
    engine = engine_for(Toy("ff"), [CASES["full"]], 26, reserve_output_tokens=1)
    for i in range(4):
        ask(engine, CASES["full"], prompt(48 - i), str(i))
    drain(engine)
    assert engine.scheduler.num_preemptions > 0


HYBRIDS = [("full", "fw"), ("full", "fww"), ("keydiff", "fw"), ("snapkv", "fww"), ("quest", "fww")]


@pytest.mark.parametrize(("name", "kinds"), [*HYBRIDS, ("full", "w")])
def test_hybrids_in_little_memory_end_as_alone(name: str, kinds: str) -> None:
    """Rows outgrow their windows, in a pool that holds hardly more than one request."""
    case, lengths, new = CASES[name], (60, 33, 48, 40), 40
    least = _least_pages(kinds, case, 60, new)
    preemptions = 0
    for spare in (0, 12):
        engine = engine_for(Toy(kinds), [case], least + spare, reserve_output_tokens=0)
        free = engine.scheduler.cache.free_pages()
        for i, length in enumerate(lengths):
            ask(engine, case, prompt(length), str(i), n=1 + i % 2, new=new)
        found = drain(engine)
        for i, length in enumerate(lengths):
            expected = solo(kinds, case.method, prompt(length), new, case.budget, **case.knobs)
            assert found[str(i)] == [expected] * (1 + i % 2)
        assert engine.scheduler.cache.free_pages() == free
        preemptions += engine.scheduler.num_preemptions
    # rows of windows alone have their full length after the prompt, so nobody is in the way
    assert (preemptions > 0) == ("f" in kinds)


@pytest.mark.parametrize(("name", "kinds"), [*HYBRIDS, ("snapkv", "ff")])
def test_as_many_run_at_once_as_the_memory_table_says(name: str, kinds: str) -> None:
    case, length, new = CASES[name], 60, 40
    engine = engine_for(Toy(kinds), [case], 60)
    cache, methods = engine.scheduler.cache, engine.intake.methods
    key, budget = methods.resolve(SparseParams(name, budget=case.budget, **case.knobs), length)
    assert isinstance(cache, PagedCache)
    fit = _fit(cache, name, methods.instances[key], length, new, budget).requests
    for i in range(fit + 2):
        ask(engine, case, prompt(length), str(i), new=new)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == fit > 60 * PAGE // (length + new), "more than if windows were charged in full"
    assert engine.scheduler.num_preemptions == 0


def test_records_name_what_windows_hold() -> None:
    engine, case = engine_for(Toy("wf"), [CASES["keydiff"]], 90), CASES["keydiff"]
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    sparse = SparseParams(case.method, budget=case.budget, record=True, **case.knobs)
    engine.add_request(prompt(61), sampling, sparse)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    record = outputs[-1].outputs[0].sparse
    assert record is not None
    # the next query sees 23 positions back from 60; what is held starts at a page
    assert record.retained[0].positions[0] == [list(range(36, 61))] * 2
    assert [len(row) for row in record.retained[0].positions[1]] == [case.budget] * 2
    page_bytes = PAGE * 2 * 8 * 4
    assert record.retained[0].resident_bytes == 2 * (7 + 5) * page_bytes
    dense = 2 * (24 + 21) * 2 * 8 * 4  # window layer and evicted layer, in the first decode
    assert record.reads[0].bytes_read == dense


def _least_pages(kinds: str, case: Case, length: int, new: int) -> int:
    """Pages of one row with which a request is not refused."""
    for num_pages in range(1, 200):
        with suppress(CapacityError):
            ask(engine_for(Toy(kinds), [case], num_pages), case, prompt(length), "0", new=new)
            return num_pages
    raise AssertionError("always refused")


@pytest.mark.parametrize("seed", range(4))
def test_every_method_in_one_engine_with_random_aborts(seed: int) -> None:
    rng, toy = random.Random(seed), Toy("wf")
    cases = {n: c for n, c in CASES.items() if n != "streaming_exact"}
    engine = engine_for(toy, list(cases.values()), 90, reserve_output_tokens=2)
    free = engine.scheduler.cache.free_pages()
    asked: dict[str, tuple[Case, list[int]]] = {}
    found: dict[str, list[list[int]]] = {}
    aborted: set[str] = set()
    waiting = [(n, c) for n, c in cases.items() for _ in range(2)]
    rng.shuffle(waiting)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.6:
            label, case = waiting.pop()
            name = f"{label}-{len(asked)}"
            asked[name] = (case, prompt(rng.randrange(1, 49), seed))
            ask(engine, case, asked[name][1], name)
        if asked and rng.random() < 0.1:
            name = rng.choice(sorted(asked))
            if name not in found:
                aborted.add(name)
            engine.abort(name)
        for output in engine.step():
            found[output.request_id] = [list(c.token_ids) for c in output.outputs]
        engine.scheduler.cache.check()
    assert engine.scheduler.cache.free_pages() == free
    assert len(aborted) < len(asked)
    for name, (case, tokens) in asked.items():
        expected = solo("wf", case.method, tokens, NEW, case.budget, **case.knobs)
        (got,) = found[name]
        assert got == (expected[: len(got)] if name in aborted else expected), name
