"""A hit equals a miss: what begins with stored rows ends as if nothing had been stored."""

from __future__ import annotations

import random

import pytest

from contract.cases import CASES, MIXES, Case
from contract.driver import PAGE, Driver, make, solo
from contract.test_contract import CELLS, prompt
from contract.test_scheduled import NEW, ask, drain, engine_for
from contract.toy import VOCAB, Toy
from fixtures.engines import drain as finished
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Chunk, Purpose
from sparseengine.engine.engine import Engine
from sparseengine.errors import RequestError

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
        saves = _saves(case, mix) and rng.random() < 0.3
        sparse = SparseParams(case.method, budget=case.budget, save_prefix=saves, **case.knobs)
        engine.add_request(tokens, sampling, sparse, request_id=str(i), cache_salt=salt)
        if not saves:  # what such a request begins with depends on those before it
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
    assert len(ended) >= len(wanted) - aborted > 10
    for name in ended:
        case, tokens = wanted[name]
        assert found[name] == [expected(case, mix, tokens)] * len(found[name])
    assert hits > 0
    assert engine.scheduler.cache.free_pages() == engine.scheduler.cache.total_pages()


# ── rows that an eviction has left ────────────────────────────────────────────────────────────────


def _saves(case: Case, mix: str) -> bool:
    return make(Toy(MIXES[mix]).spec, case.method, **case.knobs).saves()


SAVING = [cell for cell in CELLS if _saves(cell.values[0], cell.values[1])]


def asks(engine: Engine, case: Case, tokens: list[int], name: str, n: int = 1):
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, n=n)
    sparse = SparseParams(case.method, budget=case.budget, save_prefix=True, **case.knobs)
    engine.add_request(tokens, sampling, sparse, request_id=name)
    request = engine._live[name].requests[0]
    output = finished(engine)[name]
    engine.scheduler.cache.check()
    return request, output


def gone_on(case: Case, mix: str, first: list[int], turns: list[list[int]]) -> list[int]:
    """Greedy tokens after turns that were put behind a cut prompt, as what follows it."""
    toy = Toy(MIXES[mix])
    driver = Driver(toy, {case.method: make(toy.spec, case.method, **case.knobs)})
    request = driver.add(0, first, 100, case.method, case.budget)
    driver.advance([request])
    for turn in turns:
        request.tokens[request.computed :] = turn
        chunk = Chunk(request, tuple(turn), request.computed, Purpose.PREFILL, True)
        logits = driver.step([chunk])
        request.computed = chunk.stop
        request.tokens.append(int(logits[0].argmax()))
    while len(request.tokens) < len(first) + sum(map(len, turns)) + NEW:
        driver.advance([request])
    return request.tokens[-NEW:]


@pytest.mark.parametrize(("case", "mix"), SAVING)
def test_a_prompt_that_was_cut_is_begun_with_and_goes_on(case: Case, mix: str) -> None:
    """Two questions behind one document, and a second turn behind the first answer."""
    engine = engine_for(Toy(MIXES[mix]), [case], PAGES, keeps=True)
    first, questions = prompt(LONG), ([7, 5, 9], [11, 3])
    asks(engine, case, first, "document")
    for question in questions:
        tokens = [*first, *question]
        request, output = asks(engine, case, tokens, f"question {question[0]}", n=2)
        assert output.num_cached_tokens == request.saved == LONG
        out = gone_on(case, mix, first, [question])
        assert [c.token_ids for c in output.outputs] == [out, out]
    turn = [*first, *questions[0], *gone_on(case, mix, first, [questions[0]]), 4, 6]
    request, output = asks(engine, case, turn, "turn")
    assert request.saved == len(turn) - 3  # the answer's last token was never run
    if "select" not in case.knobs:  # else the answer in the turn has read less than a prompt does
        assert output.outputs[0].token_ids == gone_on(case, mix, first, [turn[LONG:]])
    other, _ = asks(engine, case, [*first[:40], *turn], "other")
    assert other.saved == 0, "only all of a text that was cut is of use"
    assert engine.scheduler.cache.free_pages() == engine.scheduler.cache.total_pages()
    engine.reset_prefix_cache()
    engine.scheduler.cache.check()


def test_cut_rows_are_those_of_one_method_and_budget() -> None:
    knorm = CASES["knorm"]
    engine = engine_for(Toy("ff"), [knorm, CASES["keydiff"]], PAGES, keeps=True)
    asks(engine, knorm, prompt(LONG), "first")
    tokens = [*prompt(LONG), 7]
    assert asks(engine, knorm._replace(budget=24), tokens, "more")[0].saved == 0
    assert asks(engine, CASES["keydiff"], tokens, "other")[0].saved == 0
    assert asks(engine, knorm, tokens, "same")[0].saved == LONG
    ask(engine, knorm, tokens, "plain")
    assert engine._live["plain"].requests[0].saved == 0
    assert drain(engine)["plain"] == [expected(knorm, "full", tokens)], "it did not ask for them"


def test_cut_rows_let_more_requests_in() -> None:
    """A prompt that fits alone, four times behind its compressed rows."""
    case = CASES["knorm"]
    engine = engine_for(Toy("ff"), [case], 2 * -(-(LONG + NEW) // PAGE), keeps=True)
    asks(engine, case, prompt(LONG), "first")
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    sparse = SparseParams(case.method, budget=case.budget, save_prefix=True, **case.knobs)
    for i in range(3):
        engine.add_request([*prompt(LONG), 7 + i], sampling, sparse, request_id=str(i))
    engine.step()
    assert len(engine.scheduler.running) == 3
    found = drain(engine)
    assert found["1"] == [gone_on(case, "full", prompt(LONG), [[8]])]
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("sparse", "keeps", "message"),
    [
        (SparseParams("h2o", budget=20, save_prefix=True), True, "h2o goes on to evict"),
        (SparseParams("knorm", budget=20, save_prefix=True), False, "enable_prefix_caching"),
        (SparseParams("knorm", budget=20, save_prefix=True, prefill="a_shape"), True, "prefill"),
        (SparseParams("knorm", budget=20, save_prefix=True, compensate=True), True, "digests"),
    ],
)
def test_what_cannot_be_saved_is_refused(sparse: SparseParams, keeps: bool, message: str) -> None:
    cases = [Case("h2o", {}), Case("knorm", {})]
    engine = engine_for(Toy("ff"), cases, PAGES, keeps=keeps)
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt(LONG), SamplingParams(max_tokens=2), sparse)
    assert not engine.has_work
