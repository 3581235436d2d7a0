"""Sparse prefill with every method, on the real cache and under the real scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from contract.cases import CASES, Case
from contract.driver import PAGE, Driver, make
from contract.reads import drive, random_layer, spec_of
from contract.test_contract import GuardedHooks, prompt
from contract.test_scheduled import drain, engine_for
from contract.toy import Toy
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.prefill import PrefillPattern
from sparseengine.engine.controller import Controller
from sparseengine.methods.prefill import PATTERNS, make_pattern

LONG, NEW, B = 90, 5, 16
COMMON = {"block": B, "min_tokens": 40, "last": 5}
SPARSE: dict[str, dict[str, Any]] = {
    "a_shape": {"sink": 3, "window": 12},
    "minference": {"vertical": 16, "slash": 16, "queries": 8},
    "xattention": {"stride": 4, "threshold": 0.5},
    "flexprefill": {"gamma": 0.5, "min_budget": 16},
}
EVERYTHING: dict[str, dict[str, Any]] = {
    "a_shape": {"window": 1000},
    "minference": {"vertical": 1000, "slash": 1000},
    "xattention": {"threshold": 1.0},
    "flexprefill": {"gamma": 1.0},
}


def patterns(toy: Toy, knobs: dict[str, dict[str, Any]] = SPARSE) -> dict[str, PrefillPattern]:
    return {n: make_pattern(n, {**COMMON, **k}, toy.spec) for n, k in knobs.items()}


def run(
    kinds: str, case: Case, name: str, length: int, limit: int, knobs: Any = SPARSE
) -> list[int]:
    """Greedy tokens of one request alone."""
    toy = Toy(kinds)
    method = make(toy.spec, case.method, **case.knobs)
    driver = Driver(toy, {"m": method}, patterns=patterns(toy, knobs))
    request = driver.add(0, prompt(length), NEW, "m", case.budget, name)
    return driver.finish([request], limit)[0]


def test_every_pattern_has_settings() -> None:
    assert set(SPARSE) == set(EVERYTHING) == set(PATTERNS) - {"dense"}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("label", ["full", "snapkv", "keydiff_blocks", "quest"])
def test_the_widest_setting_equals_dense(name: str, label: str) -> None:
    case = CASES[label]
    dense = run("ff", case, "dense", LONG, 32)
    assert run("ff", case, name, LONG, 32, EVERYTHING) == dense
    assert run("ff", case, name, 39, 32) == run("ff", case, "dense", 39, 32), "a short prompt"


@pytest.mark.parametrize("name", SPARSE)
def test_prompts_change_hidden_states_of_older_tokens_only(name: str) -> None:
    """The pattern acts, and it acts on FULL layers alone."""

    def logits(kinds: str, prefill: str) -> torch.Tensor:
        toy = Toy(kinds)
        driver = Driver(toy, {"m": make(toy.spec, "full")}, patterns=patterns(toy))
        request = driver.add(0, prompt(LONG), NEW, "m", None, prefill)
        return driver.step([driver.next_chunk(request, 1000)])

    assert not torch.equal(logits("ff", name), logits("ff", "dense"))
    assert torch.equal(logits("wr", name), logits("wr", "dense"))
    assert torch.equal(logits("l", name), logits("l", "dense"))
    # the newest query of one layer reads everything, and what it reads is given
    assert torch.equal(logits("f", name), logits("f", "dense"))


@pytest.mark.parametrize("label", CASES)
def test_a_batch_of_patterns_and_methods_ends_as_each_alone(label: str) -> None:
    """Each request keeps its chunks, and so its tokens, whatever shares its steps."""
    case, toy = CASES[label], Toy("ff")
    methods = {"m": make(toy.spec, case.method, **case.knobs), "full": make(toy.spec, "full")}
    if case.refused and "full" in case.refused:
        return
    driver = Driver(toy, methods, patterns=patterns(toy))
    names = [*SPARSE, "dense"]
    random.Random(label).shuffle(names)
    batch = [
        driver.add(i, prompt(LONG - i), NEW, "m", case.budget, name) for i, name in enumerate(names)
    ]
    batch.append(driver.add(9, prompt(50), NEW, "full", None, "a_shape"))
    found = driver.finish(batch, 32)
    for i, name in enumerate(names):
        assert found[i] == run("ff", case, name, LONG - i, 32), name
    assert found[-1] == run("ff", CASES["full"], "a_shape", 50, 32)


@pytest.mark.parametrize("name", SPARSE)
def test_chunks_change_as_little_as_the_traits_say(name: str) -> None:
    invariant = PATTERNS.get(name).traits.invariant
    whole = run("ff", CASES["full"], name, LONG, 1000)
    aligned = [run("ff", CASES["full"], name, LONG, limit) for limit in (B, 2 * B)]
    cut = [run("ff", CASES["full"], name, LONG, limit) for limit in (1, 5, 23)]
    if invariant in ("always", "blocks"):
        assert aligned == [whole] * 2
    if invariant == "always":
        assert cut == [whole] * 3


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("label", ["snapkv", "pyramidkv", "h2o", "tova", "quest", "kvzip"])
def test_scores_are_those_of_dense_attention(name: str, label: str) -> None:
    """With queries and keys given, a method retains and reads the same tokens behind a pattern."""
    case, model = CASES[label], spec_of(4, 2)
    q, k, v = random_layer(LONG + 3)
    steps = [32, 32, 26, 1, 1, 1]
    pattern = make_pattern(name, {**COMMON, **SPARSE[name]}, model)
    seen = [
        drive(make(model, case.method, **case.knobs), q, k, v, steps, case.budget, pattern=p)
        for p in (None, pattern)
    ]
    assert seen[0].reads == seen[1].reads
    assert seen[0].kept == seen[1].kept
    assert not torch.equal(seen[0].outs[1], seen[1].outs[1]), "the pattern did nothing"
    assert torch.equal(seen[0].outs[2][-5:], seen[1].outs[2][-5:]), "the tail is not dense"
    for dense, sparse in zip(seen[0].outs[3:], seen[1].outs[3:], strict=True):
        assert torch.equal(dense, sparse), "decode steps are none of a pattern's business"


@pytest.mark.parametrize("name", SPARSE)
def test_choosing_blocks_never_waits_for_the_host(name: str) -> None:
    toy = Toy("ff")
    driver = Driver(toy, {"m": make(toy.spec, "full")}, patterns=patterns(toy))
    request = driver.add(0, prompt(LONG), NEW, "m", None, name)
    driver.controller = GuardedHooks(driver.controller)  # type: ignore[assignment]
    while request.in_prefill:
        driver.advance([request], 32)
    assert request.num_generated == 1


def test_replays_and_regenerated_tokens_are_dense() -> None:
    """A resumed request runs what it had generated as a chunk: like the decodes it stands for."""
    for label in ("full", "kvzip"):
        toy, case = Toy("ff"), CASES[label]
        method = make(toy.spec, case.method, **case.knobs)
        driver = Driver(toy, {"m": method}, patterns=patterns(toy))
        request = driver.add(0, prompt(LONG), 9, "m", case.budget, "a_shape")
        while request.num_generated < 6:
            driver.advance([request], 32)
        early = list(request.tokens)
        driver.drop(request)
        driver.resume(request)
        driver.finish([request], 32)
        assert request.tokens[: len(early)] == early
        alone = Driver(toy, {"m": make(toy.spec, case.method, **case.knobs)},
                       patterns=patterns(toy))  # fmt: skip
        other = alone.add(0, prompt(LONG), 9, "m", case.budget, "a_shape")
        assert request.tokens[LONG:] == alone.finish([other], 32)[0]


# ── under the scheduler ──────────────────────────────────────────────────────────────────────────


def ask(engine: Any, name: str, tokens: list[int], prefill: str, record: bool = False) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    config = {} if prefill == "dense" else {**COMMON, **SPARSE[prefill]}
    sparse = SparseParams(prefill=prefill, prefill_config=config, record=record)
    engine.add_request(tokens, sampling, sparse, request_id=name)


def test_crowded_requests_end_as_alone() -> None:
    """Steps of 32 tokens, some of them decodes: chunks still end at multiples of the block."""
    toy, names = Toy("ff"), ["a_shape", "xattention", "dense", "a_shape", "xattention"]
    engine = engine_for(toy, [CASES["full"]], 400)
    chunks: list[tuple[int, int, int]] = []
    end_step = engine.controller.end_step

    def note(plan: Any) -> None:
        chunks.extend((c.request.id, c.stop, c.request.prompt_len) for c in plan.chunks)
        end_step(plan)

    engine.controller.end_step = note  # type: ignore[method-assign]
    for i, name in enumerate(names):
        ask(engine, str(i), prompt(LONG - 7 * i), name)
    found = drain(engine)
    for i, name in enumerate(names):
        assert found[str(i)] == [run("ff", CASES["full"], name, LONG - 7 * i, 1000)], name
    for i, stop, prompt_len in chunks:
        assert names[i] == "dense" or stop % B == 0 or stop >= prompt_len


def test_a_step_without_room_for_a_block_does_not_starve_a_prompt() -> None:
    toy = Toy("ff")
    engine = engine_for(toy, [CASES["full"]], 800)
    engine.scheduler.config = type(engine.scheduler.config)(max_num_batched_tokens=18)
    for i in range(6):
        ask(engine, str(i), prompt(20 + i), "dense")
    for _ in range(9):
        engine.step()
    ask(engine, "long", prompt(LONG), "xattention")
    found = drain(engine)
    assert found["long"] == [run("ff", CASES["full"], "xattention", LONG, 1000)]


def test_records_say_how_much_was_read() -> None:
    engine = engine_for(Toy("fw"), [CASES["full"]], 400)
    ask(engine, "a", prompt(LONG), "a_shape", record=True)
    ask(engine, "b", prompt(30), "a_shape", record=True)
    sparse = {}
    while engine.has_work:
        for output in engine.step():
            sparse[output.request_id] = output.outputs[0].sparse
    assert sparse["a"] is not None
    assert sparse["a"].prefill == "a_shape"
    # blocks 0 and own and one before: 1 2 3 3, then the chunk of the last 26, whose tail is dense
    every, read = (1 + 2 + 3 + 4 + 5 + 6), (1 + 2 + 3 + 3 + 3 + 6)
    assert sparse["a"].prefill_density == read / every
    assert sparse["b"] is not None
    assert sparse["b"].prefill_density is None


def test_page_size_is_no_concern_of_a_pattern() -> None:
    toy, tokens = Toy("ff"), []
    for size in (1, PAGE, 16):
        method = make(toy.spec, "full", page_size=size)
        driver = Driver(toy, {"m": method}, patterns=patterns(toy))
        request = driver.add(0, prompt(LONG), NEW, "m", None, "xattention")
        tokens.append(driver.finish([request], 32)[0])
    assert tokens[1:] == tokens[:-1]


def test_keys_of_no_pattern_are_dense() -> None:
    toy = Toy("ff")
    assert Controller(toy.spec, None, {}).patterns == {}  # type: ignore[arg-type]
