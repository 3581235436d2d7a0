"""When pages run out: methods that score tokens evict more, where the engine is told so."""

from __future__ import annotations

import pytest

from contract.cases import CASES
from contract.driver import PAGE, Driver, make
from contract.test_contract import prompt
from contract.test_scheduled import ask, drain, engine_for
from contract.toy import Toy
from sparseengine.config import SchedulerConfig
from sparseengine.engine.admission import charge
from sparseengine.engine.controller import Controller
from sparseengine.engine.faults import isolated_step
from sparseengine.errors import ConfigError
from sparseengine.llm import LLM
from sparseengine.methods import METHODS

SHRINKS = (
    "random", "keydiff", "knorm", "snapkv", "pyramidkv", "expected_attention", "adakv", "kvzip",
    "tova_prompt", "h2o", "rkv", "skipkv", "snapkv_pages", "h2o_pages_quest",
)  # fmt: skip
NEW = 40


def crowd(
    name: str, under_pressure: str, n: int = 1
) -> tuple[dict[str, list[list[int]]], int, int]:
    """Five requests in memory for two: what they said, preemptions and shrinks."""
    case = CASES[name]
    knobs = {**case.knobs, **({"interval": 24} if "interval" in case.knobs else {})}
    long = case._replace(budget=40 if case.budget else None, knobs=knobs)
    engine = engine_for(
        Toy("ff"), [long], 26, reserve_output_tokens=0, under_pressure=under_pressure
    )
    free = engine.scheduler.cache.free_pages()
    for i in range(5):
        ask(engine, long, prompt(48 - i), str(i), n=n, new=NEW)
    found = drain(engine)
    assert engine.scheduler.cache.free_pages() == free
    assert all(len(tokens) == NEW for outputs in found.values() for tokens in outputs)
    assert sorted(found) == ["0", "1", "2", "3", "4"]
    return found, engine.scheduler.num_preemptions, engine.scheduler.num_shrinks


@pytest.mark.parametrize("name", SHRINKS)
def test_scored_methods_make_room_and_nobody_starts_over(name: str) -> None:
    _, preempted, shrunk = crowd(name, "shrink")
    assert shrunk > 0
    assert preempted == 0


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "h2o"])
def test_siblings_that_share_pages_shrink_too(name: str) -> None:
    _, preempted, shrunk = crowd(name, "shrink", n=2)
    _, before, none = crowd(name, "preempt", n=2)
    assert none == 0 < shrunk
    assert preempted < before or before == preempted == 0


def test_a_shrink_that_fails_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["keydiff"]._replace(budget=40)
    method = METHODS.get(case.method)
    original = method.shrink

    def shrink(self, request, target, rows):
        if request.prompt_len == 48:
            raise KeyError("boom")
        return original(self, request, target, rows)

    monkeypatch.setattr(method, "shrink", shrink)
    engine = engine_for(Toy("ff"), [case], 26, reserve_output_tokens=0, under_pressure="shrink")
    free = engine.scheduler.cache.free_pages()
    for i in range(5):
        ask(engine, case, prompt(48 - i), str(i), new=NEW)
    ends: dict[str, str | None] = {}
    while engine.has_work:
        for output in isolated_step(engine):
            ends[output.request_id] = output.outputs[0].finish_reason
    assert ends == {"0": "error", "1": "length", "2": "length", "3": "length", "4": "length"}
    assert engine.scheduler.cache.free_pages() == free


@pytest.mark.parametrize("name", ["full", "quest"])
def test_methods_that_evict_nothing_are_preempted_as_before(name: str) -> None:
    assert crowd(name, "shrink") == crowd(name, "preempt")


def test_a_request_comes_down_to_half_of_what_its_rows_hold() -> None:
    case, toy = CASES["keydiff"], Toy("fw")
    driver = Driver(toy, {"m": make(toy.spec, case.method, **case.knobs)})
    controller = driver.controller
    assert isinstance(controller, Controller)
    request = driver.add(0, prompt(48), 20, "m", 40)
    for _ in range(6):
        driver.advance([request])
    assert driver.cache.lens(0, 0) == (45, 45)
    assert controller.shrink(request)
    assert driver.cache.lens(0, 0) == (22, 22)
    driver.cache.check()
    driver.advance([request])
    assert driver.cache.lens(0, 0) == (23, 23)
    short = driver.add(1, prompt(1), 5, "m", 40)
    driver.advance([short])
    assert not controller.shrink(short), "half of one token is none"


def test_a_wrapped_method_is_charged_as_it_is_alone() -> None:
    """Only methods that run the prompt again count all of it in windows."""
    toy = Toy("fwww")
    driver = Driver(toy, {"m": make(toy.spec, "adakv")}, num_pages=400)
    plain = charge(driver.cache, make(toy.spec, "snapkv", allocate="adakv"), 400, 8, 40)
    assert charge(driver.cache, make(toy.spec, "adakv"), 400, 8, 40) == plain
    read = {"select": "quest", "select_config": {"dense_layers": 0}}
    both = make(toy.spec, "snapkv", allocate="adakv", **read)
    assert charge(driver.cache, both, 400, 8, 40) == plain
    again = charge(driver.cache, make(toy.spec, "adakv", scorer="kvzip"), 400, 8, 40)
    assert again.most > plain.most + 100 // PAGE


def test_it_is_a_choice_of_two() -> None:
    assert SchedulerConfig().under_pressure == "preempt"
    with pytest.raises(ConfigError, match=r"under_pressure.*shrnk"):
        LLM("nowhere", under_pressure="shrnk")
