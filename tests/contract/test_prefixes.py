"""A hit equals a miss: what begins with stored rows ends as if nothing had been stored."""

from __future__ import annotations

import random

import pytest

from contract.cases import CASES, MIXES, Case
from contract.driver import PAGE, solo
from contract.test_contract import CELLS, prompt
from contract.test_scheduled import NEW, ask, drain, engine_for
from contract.toy import VOCAB, Toy
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.engine import Engine

LONG = 48
PAGES = 8 * -(-(LONG + NEW) // PAGE)


def cached(engine: Engine, case: Case, tokens: list[int], name: str) -> tuple[list[int], int]:
    """(the tokens of a request, how many of its prompt were found)."""
    ask(engine, case, tokens, name)
    request = engine._live[name].requests[0]
    (out,) = drain(engine)[name]
    assert request.cached is not None
    return out, request.cached


def expected(case: Case, mix: str, tokens: list[int]) -> list[int]:
    found: list[int] = solo(MIXES[mix], case.method, tokens, NEW, case.budget, **case.knobs)
    return found


def reusable(engine: Engine, case: Case, tokens: list[int]) -> int:
    table = engine.intake.methods
    key, _ = table.resolve(SparseParams(case.method, **case.knobs), len(tokens))
    return min(table.instances[key].reusable(len(tokens)), len(tokens) - 1)


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_every_method_goes_on_from_stored_rows(case: Case, mix: str) -> None:
    """The same prompt again, a longer one, and one that goes on differently from the middle."""
    engine = engine_for(Toy(MIXES[mix]), [case], PAGES, keeps=True)
    first = prompt(LONG)
    assert cached(engine, case, first, "first") == (expected(case, mix, first), 0)
    other = [*first[:30], *reversed(prompt(20))]
    for name, tokens in (("again", first), ("longer", [*first, 7, 5, 9]), ("other", other)):
        out, found = cached(engine, case, tokens, name)
        assert out == expected(case, mix, tokens)
        limit = reusable(engine, case, tokens)
        if mix in ("full", "latent"):
            common = 30 if name == "other" else LONG
            assert found == min(limit, common) // PAGE * PAGE
        elif name == "longer" and limit >= LONG:
            assert found == LONG  # rows with windows or states go on from where they end
    assert engine.scheduler.cache.free_pages() == engine.scheduler.cache.total_pages()
    engine.reset_prefix_cache()
    engine.scheduler.cache.check()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["full", "quest"])
def test_turns_go_on_from_what_was_generated(name: str, mix: str) -> None:
    """Dense decodes leave rows that others may begin with; those of a selection do not."""
    case = CASES[name]
    if mix in case.refused:
        pytest.skip("not on these layers")
    engine = engine_for(Toy(MIXES[mix]), [case], PAGES, keeps=True)
    tokens, known = prompt(21), 0
    for turn in range(3):
        out, found = cached(engine, case, tokens, str(turn))
        assert out == expected(case, mix, tokens)
        assert found >= known // PAGE * PAGE
        known = len(tokens) + NEW - 1 if name == "full" else len(tokens)
        tokens = [*tokens, *out, 3 + turn, 9]


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_every_method_takes_rows_that_were_there_before_it(case: Case, mix: str) -> None:
    """Dense rows: nobody had summarised their pages for this method, or scored their tokens."""
    engine = engine_for(Toy(MIXES[mix]), [CASES["full"], case], PAGES, keeps=True)
    cached(engine, CASES["full"], prompt(LONG), "dense")
    tokens = [*prompt(LONG), 7]
    out, found = cached(engine, case, tokens, "then")
    assert out == expected(case, mix, tokens)
    limit = reusable(engine, case, tokens)
    assert found == min(limit, LONG) // PAGE * PAGE or mix in ("window", "recurrent")


@pytest.mark.parametrize("offset", range(PAGE + 1))
def test_every_offset_past_a_page(offset: int) -> None:
    case = CASES["full"]
    engine = engine_for(Toy("ff"), [case], PAGES, keeps=True)
    cached(engine, case, prompt(LONG), "first")
    tokens = [*prompt(LONG)[: 5 * PAGE + offset], 2]
    out, found = cached(engine, case, tokens, "then")
    assert out == expected(case, "full", tokens)
    assert found == (5 * PAGE + offset) // PAGE * PAGE


def _draw(rng: random.Random, texts: list[list[int]]) -> list[int]:
    """A new text, or one that begins as an earlier one does."""
    base = rng.choice(texts) if texts and rng.random() < 0.8 else []
    cut = rng.choice([len(base), rng.randint(0, len(base))])
    tokens = [*base[:cut], *(rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 12)))]
    texts.append(tokens[:44])
    return tokens[:44]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(4))
def test_all_methods_at_once_in_little_memory(mix: str, seed: int) -> None:
    """Prompts that branch, rows that come and go, salts, aborts: everyone ends as alone."""
    rng = random.Random(seed)
    cases = [c for c in CASES.values() if mix not in c.refused and not c.shifts]
    cases = [CASES["full"], *rng.sample(cases, 5)]
    engine = engine_for(
        Toy(MIXES[mix]), cases, 3 * -(-LONG // PAGE), keeps=True, reserve_output_tokens=1
    )
    engine.overlap = bool(seed % 2)  # the host plans a step ahead
    texts: dict[str, list[list[int]]] = {"": [], "other": []}
    wanted: dict[str, tuple[Case, list[int]]] = {}
    found: dict[str, list[list[int]]] = {}
    hits, aborted = 0, 0
    for i in range(40):
        case, salt = rng.choice(cases), rng.choice(["", "", "other"])
        tokens = _draw(rng, texts[salt])
        n = rng.choice([1, 1, 2])
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, n=n)
        sparse = SparseParams(case.method, budget=case.budget, **case.knobs)
        engine.add_request(tokens, sampling, sparse, request_id=str(i), cache_salt=salt)
        wanted[str(i)] = (case, tokens)
        for _ in range(rng.randint(0, 9)):
            for output in engine.step():
                if output.outputs[0].finish_reason == "length":
                    found[output.request_id] = [list(c.token_ids) for c in output.outputs]
                    hits += output.num_cached_tokens
            engine.scheduler.cache.check()
        if rng.random() < 0.1:
            engine.abort(str(i))
            aborted += 1
    found |= drain(engine)
    ended = [name for name in wanted if len(found.get(name, [[]])[0]) == NEW]
    assert len(ended) >= len(wanted) - aborted
    for name in ended:
        case, tokens = wanted[name]
        assert found[name] == [expected(case, mix, tokens)] * len(found[name])
    assert hits > 0
    assert engine.scheduler.cache.free_pages() == engine.scheduler.cache.total_pages()
