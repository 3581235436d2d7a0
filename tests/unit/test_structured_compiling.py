"""Grammars are compiled beside the loop, within a time limit, and once."""

from __future__ import annotations

import threading
import time

import pytest

from fixtures.engines import EOS, ToyModel, drain, make_engine, make_tokenizer, toy_spec
from sparseengine.core.params import SamplingParams, StructuredOutputs
from sparseengine.engine import structured
from sparseengine.engine.grammars import make_backend
from sparseengine.engine.structured import GrammarCompiler
from sparseengine.errors import RequestError

VOCAB = 300
TOKENIZER = make_tokenizer()


class Backend:
    """Compiles with xgrammar; grammars called "slow" wait for `release` first."""

    def __init__(self, *args) -> None:
        self.inner = make_backend(*args)
        self.release = threading.Event()
        self.compiled: list[str] = []

    def compile(self, spec):
        text = spec.regex or spec.grammar
        self.compiled.append(text)
        if "slow" in text:
            self.release.wait(20)
        if "broken" in text:
            raise KeyError("a fault of the library")
        return self.inner.compile(spec)


@pytest.fixture
def backend(monkeypatch):
    made = Backend("xgrammar", TOKENIZER, VOCAB, (EOS,))
    monkeypatch.setattr(structured, "make_backend", lambda *_: made)
    yield made
    made.release.set()


def compiler(timeout_s: float = 10.0) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, (EOS,), timeout_s=timeout_s)


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text, backend="xgrammar")


def engine_with(grammars: GrammarCompiler, **kw):
    engine = make_engine(ToyModel(toy_spec(vocab=VOCAB)), tokenizer=TOKENIZER, **kw)
    engine.intake.grammars, engine.intake.eos_ids = grammars, (EOS, 99_999)
    return engine


def held(text: str, **kw) -> SamplingParams:
    return SamplingParams(structured_outputs=regex(text), max_tokens=20, **kw)


def test_a_request_waits_for_its_grammar_while_others_run(backend) -> None:
    engine = engine_with(compiler())
    engine.add_request([5, 6], held("slow[0-9]", n=2), request_id="slow")
    engine.add_request([5, 6], held("[0-9]{4}"), request_id="quick")
    engine.add_request([5, 6], SamplingParams(max_tokens=3, ignore_eos=True), request_id="free")
    ended = {}
    while len(ended) < 2:
        ended |= {o.request_id: o for o in engine.step()}
    assert set(ended) == {"quick", "free"}
    assert engine.has_work
    backend.release.set()
    ended |= drain(engine)
    assert all(c.text[:4] == "slow" and len(c.text) == 5 for c in ended["slow"].outputs)
    assert not engine.has_work


def test_a_request_that_waits_can_be_aborted(backend) -> None:
    engine = engine_with(compiler())
    engine.add_request([5], held("slow", n=2), request_id="slow")
    engine.step()
    engine.abort("slow")
    engine.abort("slow")
    (output,) = engine.step()
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 2
    assert not engine.has_work
    backend.release.set()
    engine.add_request([5], held("slow"), request_id="slow")
    assert drain(engine)["slow"].outputs[0].text == "slow"


def test_too_slow_a_grammar_fails_its_request_with_the_knob(backend) -> None:
    engine = engine_with(compiler(timeout_s=0.05))
    engine.add_request([5], held("slow"), request_id="slow")
    engine.add_request([5], held("quick"), request_id="quick")
    ended = drain(engine)
    assert ended["quick"].outputs[0].text == "quick"
    assert ended["slow"].outputs[0].finish_reason == "error"
    assert "--grammar-timeout-s" in ended["slow"].outputs[0].stop_reason
    with pytest.raises(RequestError, match=r"takes more than 0.05 s"):
        engine.add_request([5], held("slow"))  # known by now
    assert backend.compiled.count("slow") == 1


def test_a_bad_grammar_ends_its_request_with_the_reason(backend) -> None:
    engine = engine_with(compiler())
    engine.add_request([5], held("(slow"), request_id="bad")  # waits, then does not compile
    engine.step()
    backend.release.set()
    (completion,) = drain(engine)["bad"].outputs
    assert completion.finish_reason == "error"
    assert "regex cannot be used: xgrammar: " in completion.stop_reason


def test_a_grammar_that_fails_between_the_check_and_the_queue_is_still_a_refusal(backend) -> None:
    """An owner asks `is_compiling` after the submission: the request must not pass for accepted."""
    engine = engine_with(compiler())
    submission = engine.prepare([5], held("(slow"), request_id="bad")
    backend.release.set()
    assert submission.grammar.exception(20) is not None
    engine.submit(submission)
    assert engine.is_compiling("bad")
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "error"
    assert not engine.is_compiling("bad")
    assert not engine.has_work


def test_grammars_that_never_end_leave_room_until_too_many(backend) -> None:
    grammars = compiler(timeout_s=0.05)
    for i in range(structured._MAX_STUCK):
        with pytest.raises(RequestError, match="takes more than"):
            grammars.get(regex(f"slow{i}"))
        if i + 1 < structured._MAX_STUCK:
            assert grammars.get(regex(f"quick{i}")).size_bytes > 0
    with pytest.raises(RequestError, match="keep all compilers busy"):
        grammars.start(regex("other"))
    backend.release.set()
    deadline = time.monotonic() + 10
    while grammars._stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    assert grammars.get(regex("other")).size_bytes > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_library_fails_one_request(backend) -> None:
    grammars = compiler()
    for _ in range(5):  # more than there are threads
        with pytest.raises(RequestError, match="broke down"):
            grammars.get(regex(f"broken{_}"))
    assert grammars.get(regex("fine")).size_bytes > 0


def test_one_grammar_is_compiled_once_and_cannot_be_cancelled(backend) -> None:
    grammars = compiler()
    first = grammars.start(regex("slow"))
    assert not first.cancel()
    assert grammars.start(regex("slow")) is first
    backend.release.set()
    assert grammars.get(regex("slow")) is first.result()
    assert backend.compiled == ["slow"]


def test_grammars_used_longest_ago_are_forgotten(backend, monkeypatch) -> None:
    monkeypatch.setattr(structured, "_MAX_GRAMMARS", 2)
    grammars = compiler()
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.get(regex(text))
        time.sleep(0.02)  # the thread tidies up behind its answer
    assert backend.compiled == ["a", "b", "c", "b"]


def test_preempted_and_crowded_texts_go_on_where_they_were(backend) -> None:
    """Memory for about two requests: some are run again, from the tokens they had."""
    alone, crowded = [], []
    for pages, found in ((200, alone), (16, crowded)):
        engine = engine_with(compiler(), num_pages=pages, reserve_output_tokens=1)
        for i in range(6):
            sampling = held("([0-9][a-f]){8}", temperature=0.0, n=1 + i % 2)
            engine.add_request([20 + i] * 9, sampling, request_id=str(i))
        ended = drain(engine)
        found += [[c.text for c in ended[str(i)].outputs] for i in range(6)]
        preemptions = engine.scheduler.num_preemptions
    assert preemptions > 0
    assert crowded == alone
    assert all(len(text) == 16 for row in alone for text in row)


def test_steps_that_run_ahead_wait_for_structured_tokens(backend) -> None:
    found = []
    for overlap in (False, True):
        engine = engine_with(compiler())
        engine.overlap = overlap
        engine.add_request([5, 6], held("([0-9][a-f]){8}", n=3, seed=4), request_id="held")
        free = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
        engine.add_request([7, 8], free, request_id="free")
        ended = drain(engine)
        found.append({k: [c.token_ids for c in o.outputs] for k, o in ended.items()})
    assert found[0] == found[1]


class Heavy:
    """A grammar that allows everything at first; what comes then is up to the test."""

    size_bytes = 1

    def __init__(self, then) -> None:
        self.then = then
        self.num_fills = 0

    def matcher(self):
        return self

    def accept(self, token: int) -> bool:
        return True

    def fill(self, bits) -> None:
        self.num_fills += 1
        bits.fill_(-1)
        if self.num_fills > 2:  # the compiler's own, the first token's
            self.then()


def _too_complex() -> None:
    raise RuntimeError("a limit of the library")


@pytest.mark.parametrize(
    ("then", "message"),
    [(_too_complex, "a limit of the library"), (lambda: time.sleep(0.02), "other requests waited")],
)
def test_a_mask_that_is_too_heavy_ends_its_request_only(backend, monkeypatch, then, message):
    monkeypatch.setattr(structured, "_MAX_MASK_S", 0.01)
    monkeypatch.setattr(backend, "compile", lambda spec: Heavy(then))
    engine = engine_with(compiler())
    engine.add_request([5, 6], held("x", ignore_eos=True), request_id="heavy")
    engine.add_request([5, 6], SamplingParams(max_tokens=4, ignore_eos=True), request_id="free")
    ended = drain(engine)
    (heavy,) = ended["heavy"].outputs
    assert (heavy.finish_reason, len(heavy.token_ids)) == ("error", 1)
    assert message in heavy.stop_reason
    assert len(ended["free"].outputs[0].token_ids) == 4


def test_a_tokenizer_that_a_backend_cannot_read_is_left_to_the_other(monkeypatch) -> None:
    def make(name: str, *args):
        if name == "xgrammar":
            raise ValueError("what tokenizer is this?")
        return make_backend(name, *args)

    monkeypatch.setattr(structured, "make_backend", make)
    assert compiler().get(StructuredOutputs(regex="a")).size_bytes > 0
    with pytest.raises(RequestError, match="xgrammar cannot read the tokenizer: what tokenizer"):
        compiler().get(regex("a"))
