"""(2), (4), (9), (12) under the real engine: all methods at once, little memory, random aborts."""

from __future__ import annotations

import random

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
from sparseengine.engine.runner import Runner
from sparseengine.engine.scheduler import Scheduler

NEW = 7


def engine_for(toy: Toy, cases: list[Case], num_pages: int, **scheduler: object) -> Engine:
    """The parts that a start-up wires together, around the toy model."""
    plans: list[tuple[CacheGroup, ...]] = [
        make(toy.spec, case.method, **case.knobs).cache_plan() for case in cases
    ]
    groups = merge_plans(toy.spec, plans)
    cache = PagedCache(toy.spec, groups, num_pages=num_pages, max_num_seqs=64, poison=True)
    names = list(dict.fromkeys(case.method for case in cases))
    methods = MethodTable(toy.spec, names, groups)
    controller = Controller(toy.spec, cache, methods.instances)
    backends = [ReferenceBackend()] * len(toy.spec.layers)
    runner = Runner(toy, toy.spec, cache, controller, backends, torch.device("cpu"))
    collector = Collector(controller, runner, None, ())
    config = SchedulerConfig(max_num_batched_tokens=32, **scheduler)  # type: ignore[arg-type]
    return Engine(
        intake=Intake(toy.spec, methods, None, max_model_len=256),
        scheduler=Scheduler(config, cache, methods.instances, collector),
        runner=runner,
        controller=controller,
        collector=collector,
    )


def ask(engine: Engine, case: Case, tokens: list[int], name: str, n: int = 1) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, n=n)
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
