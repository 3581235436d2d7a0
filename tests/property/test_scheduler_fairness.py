"""Fairness under adversarial arrivals, memory that never leaks, no order that hangs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.engines import ToyModel, drain, make_engine, toy_spec
from fixtures.scheduling import METHODS, PAGE, Bench
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Purpose, StepPlan
from sparseengine.engine.engine import Engine
from sparseengine.errors import CapacityError

ARRIVAL = st.tuples(
    st.integers(0, 12),  # steps after the one before
    st.integers(1, 60),  # prompt
    st.integers(1, 25),  # output
    st.sampled_from(sorted(METHODS)),
)
CONFIG = st.fixed_dictionaries(
    {
        "mix": st.booleans(),
        "max_num_batched_tokens": st.integers(1, 24),
        "max_num_seqs": st.integers(1, 6),
        "max_decode_stall_steps": st.integers(1, 4),
        "reserve_output_tokens": st.sampled_from([None, 0, 3]),
        "pages": st.integers(16, 60),
    }
)


class Watch:
    """Checks every plan against the promises of the scheduler."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.decode_wait: dict[int, int] = {}
        self.head_wait = 0

    def step(self) -> None:
        scheduler = self.bench.scheduler
        prefills = [i for i, t in scheduler.running.items() if not t.decodes]
        plan = self.bench.step()
        assert plan is not None, "work, but no plan"
        self._shape(plan)
        self._decodes(plan)
        self._head(plan, [i for i in prefills if i not in plan.preempted])

    def _shape(self, plan: StepPlan) -> None:
        budget = self.bench.config.max_num_batched_tokens
        assert plan.num_tokens <= budget or len(plan.chunks) == 1
        decodes = [c.purpose is Purpose.DECODE for c in plan.chunks]
        assert decodes == sorted(decodes, reverse=True), "DECODE chunks come first"
        assert self.bench.config.mix or len(set(decodes)) == 1
        for c in plan.chunks:
            prompt = c.request.prompt_len
            if c.purpose is Purpose.PREFILL:
                assert c.stop <= prompt or c.start >= prompt, "a chunk straddles the prompt's end"
                if c.request.method == "block" and c.start < prompt:
                    assert c.start // 8 == (c.stop - 1) // 8
                if c.request.method == "whole" and c.start < prompt:
                    assert (c.start, c.stop) == (0, prompt)

    def _decodes(self, plan: StepPlan) -> None:
        """A running decode never waits more than max_decode_stall_steps."""
        ran = {c.request.id for c in plan.chunks}
        ready = {i for i, t in self.bench.scheduler.running.items() if t.decodes} - ran
        self.decode_wait = {i: self.decode_wait.get(i, 0) + 1 for i in ready}
        limit = self.bench.config.max_decode_stall_steps
        # `ready` also holds requests that became decodes in this very step through a fork
        assert all(n <= limit for n in self.decode_wait.values())

    def _head(self, plan: StepPlan, prefills: list[int]) -> None:
        """The oldest admitted prefill moves at least every second step."""
        ran = {c.request.id for c in plan.chunks}
        stuck = bool(prefills) and prefills[0] not in ran
        self.head_wait = self.head_wait + 1 if stuck else 0
        assert self.head_wait <= 1


@settings(max_examples=120, deadline=None)
@given(config=CONFIG, trace=st.lists(ARRIVAL, min_size=1, max_size=14))
def test_no_arrival_trace_starves_anyone(config: dict, trace: list) -> None:
    bench = Bench(**config)
    watch = Watch(bench)
    requests = []
    for gap, prompt_len, max_tokens, method in trace:
        for _ in range(gap):
            if bench.scheduler.has_work:
                watch.step()
        request = bench.request(prompt_len, max_tokens, method)
        if -(-(prompt_len + max_tokens) // PAGE) > config["pages"]:
            with pytest.raises(CapacityError):
                bench.scheduler.add(request)
            continue
        bench.scheduler.add(request)
        requests.append(request)
    steps = 0
    while bench.scheduler.has_work:
        watch.step()
        steps += 1
        assert steps < 5000, "livelock"
    assert {r.id for r in requests} == set(bench.sink.ended)
    for r in requests:
        assert bench.sink.ended[r.id].reason == "length"
        assert r.tokens[r.prompt_len :] == [
            (r.id + n) % 100 for n in range(r.prompt_len, r.prompt_len + r.max_tokens)
        ]
    if config["reserve_output_tokens"] is None:
        assert bench.sink.preempted == []
    bench.cache.check()
    assert bench.cache.free_pages() == bench.cache.total_pages()


@pytest.mark.parametrize("mix", [True, False])
def test_a_stream_of_long_prompts_does_not_stop_decodes(mix: bool) -> None:
    """Every step a new long prompt arrives; the decode still advances, and so do the prompts."""
    bench = Bench(
        pages=5000, mix=mix, max_num_batched_tokens=8, max_num_seqs=8, max_decode_stall_steps=3
    )
    decode = bench.add(2, 60)
    watch = Watch(bench)
    for _ in range(300):
        bench.add(40, 1, "whole")
        watch.step()
    assert decode.id in bench.sink.ended
    assert len(bench.sink.ended) > 30


@pytest.mark.parametrize("mix", [True, False])
def test_a_stream_of_decodes_does_not_stop_a_prompt(mix: bool) -> None:
    """Decodes fill the whole budget for ever; a long prompt still gets through."""
    bench = Bench(pages=5000, mix=mix, max_num_batched_tokens=6, max_num_seqs=6)
    watch = Watch(bench)
    for _ in range(5):
        bench.add(1, 400)
    for _ in range(10):
        watch.step()
    long = bench.add(90, 1)
    steps = 0
    while long.id not in bench.sink.ended:
        watch.step()
        steps += 1
    assert steps <= 2 * 90


def test_first_come_first_served_under_memory_pressure() -> None:
    """Small late requests do not pass a big one that waits for pages."""
    bench = Bench(pages=30, max_num_batched_tokens=64)
    bench.add(60, 30)
    bench.step()
    big = bench.add(80, 10)
    small = [bench.add(4, 2) for _ in range(20)]
    while big.computed == 0:
        bench.step()
        assert not any(r.computed for r in small) or big.computed
    bench.run()
    assert len(bench.sink.ended) == 22


def _operate(engine: Engine, count: int, seed: int, methods: tuple[str, ...]) -> set[str]:
    """Random add (n up to 3), step, abort; the cache's own check now and then."""
    rng = random.Random(seed)
    live: list[str] = []
    done: set[str] = set()
    for i in range(count):
        roll = rng.random()
        if roll < 0.22:
            prompt = [rng.randrange(60) for _ in range(rng.randrange(1, 50))]
            name = rng.choice(methods)
            budget = None if name == "full" else rng.randrange(4, 30)
            params = SamplingParams(
                n=rng.choice((1, 1, 1, 2, 3)),
                max_tokens=rng.randrange(1, 12),
                temperature=rng.choice((0.0, 1.0)),
            )
            live.append(engine.add_request(prompt, params, SparseParams(name, budget=budget)))
        elif roll < 0.32 and live:
            engine.abort(live.pop(rng.randrange(len(live))))
        else:
            done |= {o.request_id for o in engine.step() if o.finished}
            live = [r for r in live if r not in done]
        if i % 250 == 0:
            engine.scheduler.cache.check()
    return done


@pytest.mark.parametrize(("reserve", "count"), [(None, 2_000), (1, 10_000)])
def test_ten_thousand_random_operations_leak_nothing(reserve: int | None, count: int) -> None:
    model = ToyModel(toy_spec(num_layers=1), attends=False)
    engine = make_engine(model, num_pages=40, reserve_output_tokens=reserve, poison=False)
    done = _operate(engine, count, seed=1, methods=("full",))
    done |= set(drain(engine))
    _is_clean(engine)
    assert len(done) > count // 10


@pytest.mark.parametrize("mix", [True, False])
def test_random_operations_with_eviction_and_selection_leak_nothing(mix: bool) -> None:
    names = ("full", "knorm", "streaming_llm", "quest")
    model = ToyModel(toy_spec(num_layers=3))
    engine = make_engine(model, methods=names, num_pages=40, mix=mix, reserve_output_tokens=2)
    done = _operate(engine, 400, seed=2, methods=names)
    done |= set(drain(engine))
    _is_clean(engine)
    assert len(done) > 30


def _is_clean(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.cache.check()
    assert scheduler.cache.free_pages() == scheduler.cache.total_pages()
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.siblings
    assert not engine._live
    assert not engine.collector._families
    assert not engine.runner.sampler._extras
    assert not engine.controller.recorder._entries
