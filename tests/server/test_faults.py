"""A fault of one request ends that request, with a message, beside 32 undisturbed streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from fixtures.engines import ToyModel, make_engine, make_tokenizer, toy_spec
from fixtures.rerun import Rerun
from sparseengine.core.method import SparseMethod
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.collector import Collector
from sparseengine.engine.controller import Controller
from sparseengine.engine.engine import Engine
from sparseengine.engine.faults import blame, blamed, isolated_step
from sparseengine.engine.sampling import Sampler
from sparseengine.methods.quest import Quest
from sparseengine.methods.streaming_llm import StreamingLLM

MARK = 666  # the seed of the request whose data is bad
NUM_OTHERS = 32
BUDGETS = {"quest": {"budget": 8}, "streaming_llm": {"budget": 64}}  # the second never acts
OVERLAP = [False]  # whether the loop runs a step ahead


@pytest.fixture(params=[False, True], ids=["plain", "ahead"], autouse=True)
def overlap(request: pytest.FixtureRequest) -> None:
    OVERLAP[0] = request.param


def prompts() -> list[list[int]]:
    return [[(7 * i + j) % 60 + 2 for j in range(5 + i % 9)] for i in range(NUM_OTHERS)]


def run(
    method: str = "quest",
    *,
    marked: bool = True,
    poison: int | None = None,
    max_tokens: int = 12,
    n: int = 1,
    others: tuple[str, str] = ("full", "quest"),
    captured: bool = False,
) -> dict[str, Any]:
    """32 streams of two methods and, in their middle, the marked one; outputs by request id.

    captured: decode steps run as a device would replay them.
    """
    tokenizer = make_tokenizer()
    engine = make_engine(
        ToyModel(toy_spec(vocab=300), poison=poison),
        methods=others,
        num_pages=600,
        tokenizer=tokenizer,
        keeps=True,
        max_num_seqs=48,
        max_num_batched_tokens=64,
    )
    engine.overlap = OVERLAP[0]
    if captured:
        replay_decodes(engine)
    free = engine.scheduler.cache.free_pages()
    found: dict[str, Any] = {}

    def add(name: str, ids: list[int], seed: int, which: str, count: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, n=count)
        sparse = SparseParams(which, **BUDGETS.get(which, {}))
        engine.add_request(ids, params, sparse, request_id=name, stream=True)

    for i, ids in enumerate(prompts()):
        if i == NUM_OTHERS // 2 and marked:
            mark = poison if poison is not None else 5
            add("marked", [*range(20, 33), mark], MARK, method, n)  # the only prompt of 14
        add(f"other-{i}", ids, i, others[i % 2])
    for _ in range(3000):
        if not engine.has_work:
            break
        for output in isolated_step(engine):
            found[output.request_id] = output
    assert not engine.has_work, "the engine hangs"
    assert engine.scheduler.cache.free_pages() == free, "pages are lost"
    engine.scheduler.cache.check()
    assert not captured or engine.runner.num_replays > 5
    return found


def replay_decodes(engine: Engine) -> None:
    runner, cache = engine.runner, engine.scheduler.cache
    for group in cache.groups:
        group.mirrored = True  # as on a device: the tables have a copy of their own
    instances = engine.intake.methods.instances
    runner.graphs = Rerun(
        runner.model, runner.spec, cache, runner.controller, instances, runner.backends,
        max_rows=48, max_len=512,
    )  # fmt: skip


@pytest.fixture(scope="module")
def clean() -> dict[str, list[int]]:
    return {k: o.outputs[0].token_ids for k, o in run(marked=False).items()}


def check_others(found: dict[str, Any], clean: dict[str, list[int]]) -> None:
    others = {k: o for k, o in found.items() if k != "marked"}
    assert len(others) == NUM_OTHERS
    assert {o.outputs[0].finish_reason for o in others.values()} == {"length"}
    assert {k: o.outputs[0].token_ids for k, o in others.items()} == clean


def is_marked(request: Any) -> bool:
    return request.sampling.seed == MARK


def in_plan(plan: Any) -> bool:
    return any(is_marked(c.request) for c in plan.chunks)


def boom(*_: Any) -> None:
    raise KeyError("boom")


def faulty(hook: str, when: Callable[..., bool]) -> Callable[..., Any]:
    """The hook of Quest, which fails when `when` says so."""
    original = getattr(Quest, hook)

    def wrapped(self: Any, *args: Any) -> Any:
        if when(*args):
            boom()
        return original(self, *args)

    return wrapped


HOOKS: dict[str, Callable[..., bool]] = {
    "select": lambda at: in_plan(at.plan),
    "observe": lambda at: in_plan(at.plan),
    "layer_end": lambda at, hidden: in_plan(at.plan),
    "weigh": lambda plan, layers: in_plan(plan),
    "evict": in_plan,
    "replay": is_marked,
}
ELSEWHERE = {
    "replayed": "test_a_hook_behind_captured_steps_that_fails_ends_that_one",
    "captured_budget": "test_a_question_before_captured_steps_that_fails_ends_that_one",
    "idle": "test_a_question_before_captured_steps_that_fails_ends_that_one",
    "seal": "test_a_hook_that_names_no_request_is_traced_by_running_suspects_alone",
    "forget": "test_a_failing_clean_up_harms_nobody",
    "reusable": "test_a_question_about_stored_tokens_that_fails_ends_that_one",
    "saves": "test_a_question_that_fails_before_the_queue_refuses_that_one",
    "demand": "test_a_demand_that_fails_after_the_request_was_taken",
    "needs_tokens": "test_a_question_whose_answer_is_not_needed_harms_nobody",
    "shrink": "contract/test_pressure.py",
}
OF_NO_REQUEST = {"uses", "read", "cache_plan", "prefill_block", "mixed_budget"}  # of an engine


def test_no_hook_is_forgotten() -> None:
    """Every hook of the contract, but those that are asked about a whole engine, has its fault."""
    hooks = {n for n, f in vars(SparseMethod).items() if callable(f) and not n.startswith("_")}
    assert hooks == {*HOOKS, *ELSEWHERE, *OF_NO_REQUEST}
    assert {name for name in ELSEWHERE.values() if "/" not in name} <= set(globals())


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_for_one_request_ends_that_one(
    hook: str, clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the others use the same method, share its steps and must come out unharmed."""
    monkeypatch.setattr(Quest, hook, faulty(hook, HOOKS[hook]))
    found = run()
    completion = found["marked"].outputs[0]
    assert completion.finish_reason == "error"
    assert "KeyError" in completion.stop_reason
    assert "Traceback" not in completion.stop_reason
    check_others(found, clean)


def test_a_hook_behind_captured_steps_that_fails_ends_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`replayed` is called in place of device hooks; both methods share the replayed steps."""
    options: dict[str, Any] = {"others": ("full", "streaming_llm")}
    eager = {k: o.outputs[0].token_ids for k, o in run(marked=False, **options).items()}

    def late(plan: Any, lens: Any) -> bool:
        return any(is_marked(c.request) and c.request.num_generated >= 3 for c in plan.chunks)

    original = StreamingLLM.replayed

    def replayed(self: StreamingLLM, plan: Any, lens: Any) -> None:
        if late(plan, lens):
            boom()
        original(self, plan, lens)

    monkeypatch.setattr(StreamingLLM, "replayed", replayed)
    found = run("streaming_llm", captured=True, **options)
    completion = found["marked"].outputs[0]
    assert completion.finish_reason == "error"
    assert "KeyError" in completion.stop_reason
    assert 2 <= len(completion.token_ids) < 12  # steps beside prompts are not captured
    check_others(found, eager)


@pytest.mark.parametrize("hook", ["captured_budget", "idle"])
def test_a_question_before_captured_steps_that_fails_ends_that_one(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks that decide which graph runs a step, asked on the host."""
    options: dict[str, Any] = {"others": ("full", "streaming_llm")}
    eager = {k: o.outputs[0].token_ids for k, o in run(marked=False, **options).items()}
    original = getattr(StreamingLLM, hook)

    def asked(self: StreamingLLM, plan: Any, lens: Any) -> Any:
        if in_plan(plan):
            boom()
        return original(self, plan, lens)

    monkeypatch.setattr(StreamingLLM, hook, asked)
    monkeypatch.setattr(
        StreamingLLM, "traits", replace(StreamingLLM.traits, graph_safe=hook != "idle")
    )
    found = run("streaming_llm", captured=True, **options)
    completion = found["marked"].outputs[0]
    assert completion.finish_reason == "error"
    assert "KeyError" in completion.stop_reason
    check_others(found, eager)


def test_a_late_fault_keeps_what_was_streamed(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(plan: Any) -> bool:
        return any(is_marked(c.request) and c.request.num_generated == 5 for c in plan.chunks)

    monkeypatch.setattr(Quest, "evict", faulty("evict", late))
    found = run()
    assert found["marked"].outputs[0].finish_reason == "error"
    assert len(found["marked"].outputs[0].token_ids) == 5
    check_others(found, clean)


def test_a_hook_that_names_no_request_is_traced_by_running_suspects_alone(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seal` is told pages, not requests: nobody can be blamed at first."""
    present = [False]
    original = Controller.end_step

    def end_step(self: Controller, plan: Any) -> None:
        present[0] = in_plan(plan)
        original(self, plan)

    monkeypatch.setattr(Controller, "end_step", end_step)
    monkeypatch.setattr(Quest, "seal", faulty("seal", lambda pages: present[0]))
    found = run()
    assert found["marked"].outputs[0].finish_reason == "error"
    check_others(found, clean)


def test_a_forward_pass_that_fails_for_one_request(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ToyModel.__call__

    def forward(self: ToyModel, ids: Any, positions: Any, ctx: Any) -> Any:
        if in_plan(ctx.plan):
            raise RuntimeError("kernel failed")
        return original(self, ids, positions, ctx)

    monkeypatch.setattr(ToyModel, "__call__", forward)
    found = run()
    assert "kernel failed" in found["marked"].outputs[0].stop_reason
    check_others(found, clean)


def test_a_failing_clean_up_harms_nobody(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quest, "forget", boom)
    found = run()
    assert found["marked"].outputs[0].finish_reason == "length"
    check_others(found, clean)


def test_a_question_whose_answer_is_not_needed_harms_nobody(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step at a time goes on without it."""
    monkeypatch.setattr(Quest, "needs_tokens", faulty("needs_tokens", is_marked))
    found = run()
    assert found["marked"].outputs[0].finish_reason in ("length", "error")
    check_others(found, clean)


@pytest.mark.parametrize("call", [2, 3])
def test_a_demand_that_fails_after_the_request_was_taken(
    call: int, clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def when(prompt_len: int, max_tokens: int, budget: int | None) -> bool:
        calls[0] += prompt_len == 14
        return calls[0] >= call and prompt_len == 14

    monkeypatch.setattr(Quest, "demand", faulty("demand", when))
    found = run()
    assert found["marked"].outputs[0].finish_reason == "error"
    check_others(found, clean)


def test_a_question_about_stored_tokens_that_fails_ends_that_one(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Quest.reusable

    def reusable(self: Quest, prompt_len: int) -> int:
        return boom() if prompt_len == 14 else original(self, prompt_len)

    monkeypatch.setattr(Quest, "reusable", reusable)
    found = run()
    assert found["marked"].outputs[0].finish_reason == "error"
    check_others(found, clean)


def test_a_question_that_fails_before_the_queue_refuses_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(ToyModel(toy_spec()), methods=("full", "quest"), keeps=True)
    monkeypatch.setattr(Quest, "saves", boom)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for wants in (True, False):
        sparse = SparseParams("quest", budget=8, save_prefix=wants)
        with pytest.raises(KeyError) if wants else nullcontext():
            engine.add_request([5] * 9, params, sparse, request_id="one")
    found = {}
    while engine.has_work:
        found |= {o.request_id: o for o in isolated_step(engine)}
    assert found["one"].outputs[0].finish_reason == "length"


def test_a_detokenizer_that_fails(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Collector.open

    def open_(self: Collector, family: Any, requests: Any) -> None:
        original(self, family, requests)
        if family.output.request_id == "marked":
            for text in family.texts.values():
                monkeypatch.setattr(text, "push", boom, raising=False)

    monkeypatch.setattr(Collector, "open", open_)
    found = run()
    assert found["marked"].outputs[0].finish_reason == "error"
    check_others(found, clean)


def test_a_logits_processor_that_fails(
    clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Sampler._process
    monkeypatch.setattr(Sampler, "_changes_logits", lambda self, r: is_marked(r))

    def process(self: Sampler, row: Any, request: Any) -> None:
        if is_marked(request) and request.num_generated == 2:
            boom()
        original(self, row, request)

    monkeypatch.setattr(Sampler, "_process", process)
    found = run()
    assert found["marked"].outputs[0].finish_reason == "error"
    assert len(found["marked"].outputs[0].token_ids) in (1, 2)  # one is under way when ahead
    check_others(found, clean)


@pytest.mark.parametrize("method", ["full", "quest"])
def test_logits_that_are_not_numbers_end_the_request(
    method: str, clean: dict[str, list[int]]
) -> None:
    seen = {t for tokens in clean.values() for t in tokens} | {t for p in prompts() for t in p}
    found = run(method, poison=max(set(range(300)) - seen))
    assert found["marked"].outputs[0].finish_reason == "error"
    assert "not finite" in found["marked"].outputs[0].stop_reason
    check_others(found, clean)


@pytest.mark.parametrize("hook", ["evict", "observe"])
def test_several_completions_of_one_prompt(
    hook: str, clean: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quest, hook, faulty(hook, HOOKS[hook]))
    found = run(n=3)
    assert [c.finish_reason for c in found["marked"].outputs] == ["error"] * 3
    check_others(found, clean)


def test_blame_stays_with_the_innermost() -> None:
    error = ValueError("x")
    blame(error, (3,))
    blame(error, (4, 5))
    assert blamed(error) == (3,)
    assert blamed(ValueError("y")) == ()
