"""Structured outputs with every method and n > 1: siblings share pages, never a grammar's state."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from contract.cases import CASES, MIXES, Case
from contract.test_contract import CELLS, prompt
from contract.test_scheduled import engine_for
from contract.toy import VOCAB, Toy
from sparseengine.core.params import SamplingParams, SparseParams, StructuredOutputs
from sparseengine.engine.collector import Collector
from sparseengine.engine.engine import Engine
from sparseengine.engine.structured import GrammarCompiler

EOS = 1
SIGNS = '0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN{}[]:,"-.'
PATTERN = "([0-9][a-f]){5}x?"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the toy model's ids."""
    names = ["<s>", "</s>", *SIGNS]
    inner = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    assert inner.get_vocab_size() == VOCAB
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


TOKENIZER = make_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))


def speaking(engine: Engine) -> Engine:
    """The toy engine with that tokenizer."""
    backend = TOKENIZER.backend_tokenizer
    collector = Collector(engine.controller, engine.runner, backend, (EOS,))
    engine.collector = engine.scheduler.sink = collector
    engine.intake.grammars, engine.intake.eos_ids = GRAMMARS, (EOS,)
    return engine


def ask(engine: Engine, case: Case, length: int, name: str, n: int) -> None:
    sampling = SamplingParams(
        temperature=1.0, seed=length, max_tokens=30, n=n,
        structured_outputs=StructuredOutputs(regex=PATTERN),
    )  # fmt: skip
    sparse = SparseParams(case.method, budget=case.budget, **case.knobs)
    engine.add_request(prompt(length), sampling, sparse, request_id=name)


def drain(engine: Engine) -> dict[str, list[str]]:
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert [c.finish_reason for c in output.outputs] == ["stop"] * len(output.outputs)
            found[output.request_id] = [c.text for c in output.outputs]
        engine.scheduler.cache.check()
    return found


@pytest.mark.parametrize(("case", "mix"), CELLS)
def test_every_method_keeps_to_the_grammar(case: Case, mix: str) -> None:
    """In memory for about two of the requests, so that some are preempted."""
    lengths = (48, 33, 21)
    engine = speaking(engine_for(Toy(MIXES[mix]), [case], 40, reserve_output_tokens=1))
    for i, length in enumerate(lengths):
        ask(engine, case, length, str(i), n=1 + 2 * (i % 2))
    found = drain(engine)
    assert [len(found[str(i)]) for i in range(3)] == [1, 3, 1]
    assert all(re.fullmatch(PATTERN, text) for texts in found.values() for text in texts)
    assert len(set(found["1"])) > 1


def test_all_methods_at_once_give_what_each_gives_alone() -> None:
    cases = {n: c for n, c in CASES.items() if n != "streaming_exact"}
    together = speaking(engine_for(Toy("wf"), list(cases.values()), 400))
    for name, case in cases.items():
        ask(together, case, 40, name, n=2)
    found = drain(together)
    for name in ("full", "snapkv", "quest", "h2o"):
        alone = speaking(engine_for(Toy("wf"), [cases[name]], 100))
        ask(alone, cases[name], 40, name, n=2)
        assert drain(alone)[name] == found[name]
