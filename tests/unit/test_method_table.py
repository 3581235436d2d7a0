"""Clients choose knobs: the table of instances stays small, and what runs keeps its own."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from fixtures.engines import drain, make_engine
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.engine import Engine
from sparseengine.engine.intake import RECENT
from sparseengine.errors import RequestError

NUM = 200


def engine_for(**options: Any) -> Engine:
    return make_engine(methods=("full", "snapkv"), num_pages=64, **options)


def knobs(i: int) -> SparseParams:
    return SparseParams(
        "snapkv",
        budget=8,
        prefill="a_shape",
        prefill_config={"min_tokens": 8192 + i},
        kernel=2 * i + 1,
    )


def sizes(engine: Engine) -> tuple[int, int]:
    gc.collect()
    return len(engine.intake.methods.instances), len(engine.intake.methods.patterns)


def params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def test_knob_sets_that_came_and_went_are_forgotten() -> None:
    engine = engine_for()
    for first in range(0, NUM, 20):
        for i in range(first, first + 20):
            engine.add_request([2, 3, 4, 5 + i % 40], params(), knobs(i))
        found = drain(engine)
        assert [o.outputs[0].finish_reason for o in found.values()] == ["length"] * 20
    assert max(sizes(engine)) <= RECENT + 2


def test_knob_sets_of_refused_requests_are_forgotten() -> None:
    engine = engine_for()
    for i in range(NUM):
        with pytest.raises(RequestError):  # a capacity error, raised behind the look-up
            engine.add_request([2] * 900, SamplingParams(max_tokens=100), knobs(i))
    assert max(sizes(engine)) <= RECENT + 2


def test_requests_that_live_keep_their_instances() -> None:
    """All of them are checked before the first one is queued, as `LLM.generate` does."""
    engine = engine_for()
    prompts = [[2 + (5 * i + j) % 60 for j in range(12)] for i in range(NUM)]
    prepared = [engine.prepare(p, params(), knobs(i)) for i, p in enumerate(prompts)]
    assert sizes(engine) == (NUM, NUM)
    for submission in prepared:
        engine.submit(submission)
    ids = [s.request_id for s in prepared]
    del prepared, submission
    found = drain(engine)
    assert {o.outputs[0].finish_reason for o in found.values()} == {"length"}
    assert max(sizes(engine)) <= RECENT + 2
    fresh = engine_for()
    for i in (0, 77, NUM - 1):
        fresh.add_request(prompts[i], params(), knobs(i), request_id="again")
        again = drain(fresh)["again"].outputs[0].token_ids
        assert found[ids[i]].outputs[0].token_ids == again


def test_the_default_is_never_forgotten() -> None:
    engine = engine_for(default=SparseParams("snapkv", budget=8, kernel=3))
    table = engine.intake.methods
    key, _ = table.resolve(table.default, 5)
    first = table.instances[key]
    for i in range(2 * RECENT):
        table.resolve(knobs(i), 5)
    assert table.instances[key] is first
