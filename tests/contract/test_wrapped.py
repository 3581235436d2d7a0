"""Methods inside others: under a selection, and under AdaKV, they go on doing all they do alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from contract.driver import Driver, make
from contract.test_compose import QUEST, SNAP
from contract.test_contract import prompt
from contract.toy import Toy
from sparseengine.errors import RequestError
from sparseengine.methods.pyramidkv import PyramidKV


class Speaks:
    """A vocabulary in which token 7 ends a sentence."""

    def encode(self, text: str) -> tuple[int, ...]:
        return (11, 12, 13)

    def ending_in(self, marks: Sequence[str]) -> frozenset[int]:
        return frozenset({7})

    def answer_header(self) -> tuple[int, ...]:
        return (14,)


WRAPPED: dict[str, dict[str, Any]] = {
    "skipkv": {"window": 4, "kernel": 3, "interval": 3, "likeness": 0.2},
    "kvzip": {"chunk": 8},
    "rkv": {"window": 4, "kernel": 3, "interval": 3},
    "h2o": {"interval": 3},
    "tova": {"burst": 3},
    "keydiff": {"recent": 4, "interval": 3},
    "streaming_llm": {"pos_shift": True, "block_tokens": 20},
}


def lengths_and_tokens(name: str, text: list[int], **knobs: Any) -> tuple[list[Any], list[int]]:
    """Row lengths after each step, and what was generated, of a method that learnt its words."""
    toy = Toy("ff")
    method = make(toy.spec, name, **knobs)
    method.read(Speaks())
    driver, lens = Driver(toy, {"m": method}), []
    request = driver.add(0, text, 12, "m", 20)
    while request.num_generated < 12:
        driver.advance([request], 16)
        lens.append([driver.cache.lens(0, layer) for layer in range(2)])
    return lens, request.tokens[len(text) :]


@pytest.mark.parametrize("name", WRAPPED)
def test_an_eviction_is_itself_under_a_selection_that_reads_everything(name: str) -> None:
    """What a method hears (words, hidden states, runs of its own) it hears in a pipeline, too."""
    text = [*prompt(11), 7] * 4
    alone = lengths_and_tokens(name, text, **WRAPPED[name])
    assert lengths_and_tokens(name, text, **WRAPPED[name], **QUEST, select_tokens=90) == alone


SHARERS: dict[str, dict[str, Any]] = {
    **{name: knobs for name, knobs in WRAPPED.items() if name not in ("tova", "streaming_llm")},
    "tova": {"burst": 0},
    "random": {},
    "expected_attention": {},
    "snapkv": SNAP,
}


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("name", SHARERS)
def test_adakv_over_a_scorer_is_the_scorer_with_that_allocation(name: str, scope: str) -> None:
    """Runs of its own, words, hidden states and evictions while decoding are the scorer's."""
    text = [*prompt(11), 7] * 4
    lens, tokens = lengths_and_tokens("adakv", text, scorer=name, scope=scope, **SHARERS[name])
    stage = {"allocate": "adakv", "allocate_scope": scope}
    assert (lens, tokens) == lengths_and_tokens(name, text, **SHARERS[name], **stage)
    assert 4 * 20 in [sum(map(sum, step)) for step in lens]


@pytest.mark.parametrize("form", ["floor", "share"])
def test_adakv_goes_on_while_its_scorer_evicts(form: str) -> None:
    lens, _ = lengths_and_tokens("adakv", prompt(48), scorer="h2o", interval=3, form=form)
    means = [sum(map(sum, step)) / 4 for step in lens[3:]]
    assert max(means) <= 22
    assert min(means) == 20


@pytest.mark.parametrize("form", ["floor", "share"])
def test_adakv_shares_what_the_pyramid_gives_a_layer(form: str) -> None:
    """Ada-PyramidKV: the heads of a layer differ, layers hold the pyramid's budgets in the mean."""
    toy, own = Toy("ffff"), {"window": 6, "kernel": 3, "sink": 2}
    pyramid = make(toy.spec, "pyramidkv", **own)
    assert isinstance(pyramid, PyramidKV)
    budgets = pyramid.budgets_of(48, 20)
    assert len(set(budgets)) > 1
    pipelines = [("adakv", {**own, "scorer": "pyramidkv", "form": form})]
    if form == "floor":
        pipelines.append(("pyramidkv", {**own, "allocate": "adakv"}))
    found = []
    for name, knobs in pipelines:
        method = make(toy.spec, name, **knobs)
        driver = Driver(toy, {"m": method})
        request = driver.add(0, prompt(48), 6, "m", 20)
        driver.advance([request])
        lens = [driver.cache.lens(0, layer) for layer in range(4)]
        assert [sum(heads) for heads in lens] == [2 * b for b in budgets]
        assert any(a != b for a, b in lens)
        held = driver.cache.usage(0).pages
        assert held * 4 <= method.demand(48, 0, 20).steady_tokens * 8
        found.append((lens, driver.finish([request])))
    assert found == found[:1] * len(found)
    for wrong in ({"scope": "model"}, {"scorer": "tova"}):
        with pytest.raises(RequestError, match=r"itself|set burst=0"):
            make(toy.spec, "adakv", **{"scorer": "pyramidkv", **wrong})
