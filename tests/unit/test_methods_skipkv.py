"""SkipKV: sentences by tokens, repeated ones go first, everything else is R-KV."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import oracles
from contract.driver import Driver, Reads, make, solo
from contract.reads import mark, spec_of
from contract.toy import VOCAB
from fixtures.engines import make_tokenizer, save_checkpoint
from sparseengine.core.context import StepContext
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.words import Words
from sparseengine.errors import RequestError
from sparseengine.llm import LLM
from sparseengine.methods import METHODS, sentences
from sparseengine.methods.sentences import Sentences

DIM, STOP, DECODES = 8, 7, 12
KNOBS: dict[str, Any] = {"window": 4, "kernel": 3, "delimiters": (STOP,), "sentences": 16}


class Echo:
    """One layer that says each token's embedding, so that equal sentences say the same."""

    def __init__(self, text: Sequence[int]) -> None:
        self.spec = spec_of(4, 2, DIM)
        rng = torch.Generator().manual_seed(1)
        self.text = text
        self.words = torch.randn(VOCAB, 4, generator=rng)
        count = len(text)
        self.q = torch.randn(count, 4, DIM, generator=rng)
        self.k = torch.randn(count, 2, DIM, generator=rng)
        self.q = mark(self.q, self.k)

    def __call__(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        k = self.k[positions]
        ctx.attend(0, self.q[positions], k, k)
        hidden = self.words[ids]
        ctx.layer_end(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), VOCAB)


def closed(text: Sequence[int], shortest: int = 4, longest: int = 256) -> list[tuple[int, int]]:
    """(first, past the last) of each closed sentence."""
    found, first = [], 0
    for i, token in enumerate(text):
        size = i + 1 - first
        if (token == STOP and size >= shortest) or size >= longest:
            found.append((first, i + 1))
            first = i + 1
    return found


def penalties(model: Echo, stop: int, likeness: float, newest: int) -> list[float]:
    """What each position loses: its sentence's largest cosine to a later sentence."""
    spans = closed(model.text[:stop])
    said = [model.words[list(model.text[a:b])].double().mean(0) for a, b in spans]
    said = [x / x.norm() for x in said]
    out = [0.0] * stop
    for i, (a, b) in enumerate(spans):
        most = max((float(said[i] @ x) for x in said[i + 1 :]), default=0.0)
        if most >= likeness and i > len(spans) - newest:
            out[a:b] = [most + 8.0 * (len(spans) - i)] * (b - a)
    return out


def expected(model: Echo, prompt_len: int, stop: int, budget: int, interval: int) -> oracles.Rows:
    rows = []
    for h in range(2):
        row: list[int] = list(range(prompt_len))
        for t in range(prompt_len, stop + 1):
            if t > prompt_len:
                row.append(t - 1)
            if (t == prompt_len and t > budget) or len(row) >= budget + interval:
                q, k = model.q[:t, 2 * h : 2 * h + 2], model.k[:t, h]
                score = oracles.rkv_scores(q, k, row, 4, 3, 0.91)
                lost = penalties(model, t, 0.95, 16)
                score = [x - lost[j] for x, j in zip(score, row, strict=True)]
                (chosen,) = oracles.evict([score], budget, 0, 4)
                row = [row[j] for j in chosen]
        rows.append(row)
    return rows


def said(count: int, seed: int) -> list[int]:
    """A text of sentences, some of which come again."""
    rng = random.Random(seed)
    pool = [[rng.randrange(8, VOCAB) for _ in range(rng.randrange(3, 7))] for _ in range(4)]
    text: list[int] = []
    while len(text) < count:
        text += [*rng.choice(pool), STOP]
    return text[:count]


def run(text: Sequence[int], prompt_len: int, budget: int, limit: int, **knobs: Any) -> Reads:
    """Positions that each step read; generated tokens are those of the text."""
    model, backend = Echo(text), Reads(attend=False)
    method = make(model.spec, "skipkv", **{**KNOBS, **knobs})
    driver = Driver(model, {"m": method}, backend=backend)
    request = driver.add(0, text[:prompt_len], len(text) - prompt_len, "m", budget)
    while request.computed < len(text):
        driver.advance([request], limit)
        del request.tokens[request.computed :]
        request.tokens.extend(text[len(request.tokens) : max(prompt_len, request.computed + 1)])
    driver.drop(request)
    assert not method._texts
    return backend


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [1000, 7, 1])
def test_rows_are_what_the_oracle_keeps_while_the_text_grows(seed: int, limit: int) -> None:
    text = said(60, seed)
    backend = run(text, 45, 20, limit, interval=3)
    assert any(penalties(Echo(text), 45, 0.95, 16)), "some sentence is repeated"
    for i in range(14):
        now = 45 + i
        rows = expected(Echo(text), 45, now, 20, 3)
        assert backend.log[i - 15][0] == [[*row, now] for row in rows], i


def test_of_two_equal_sentences_the_first_goes_whole_before_anything_else() -> None:
    thought = [11, 12, 13, 14, 15, STOP]
    text = [*range(20, 26), STOP, *thought, *range(30, 38), STOP, *thought, 40, 41, 42, 43, 44, 45]
    first = set(range(7, 13))
    for drop in (3, 6, 9):
        backend = run(text, len(text) - 1, len(text) - 1 - drop, 1000)
        for row in backend.log[-1][0]:
            gone = set(range(len(text))) - set(row)
            assert len(gone) == drop
            assert gone <= first if drop <= len(first) else first < gone


def test_without_penalty_it_is_rkv() -> None:
    rng = random.Random(3)
    text = [rng.randrange(VOCAB) for _ in range(50)]
    knobs = {"window": 4, "kernel": 3, "interval": 3, "importance": 0.07}
    plain = solo("ff", "rkv", text, 20, 24, **knobs)
    assert solo("ff", "skipkv", text, 20, 24, penalty=0.0, **knobs) == plain
    assert solo("ff", "skipkv", text, 20, 24, segment=4, likeness=-1.0, **knobs) != plain


def test_sentences_end_at_delimiters_and_have_bounded_length() -> None:
    tokens = [1, STOP, 1, 1, STOP, *[1] * 9, STOP, 1]
    text = Sentences({STOP}, 4, 8)
    for stop in (3, 4, 10, len(tokens)):
        text.extend(tokens, stop)
    assert text.starts == [0, 5, 13]
    assert [text.at(i) for i in (0, 4, 5, 12, 13, 15)] == [0, 0, 1, 1, 2, 2]
    assert text.num_closed == 2


def test_the_tokenizer_tells_what_ends_a_sentence() -> None:
    tokenizer = make_tokenizer()
    words = Words(tokenizer, len(tokenizer))
    marks = (".", "?", "e")
    found = words.ending_in(marks)
    assert found == {i for i in range(len(tokenizer)) if tokenizer.decode([i]).endswith(marks)}
    assert found, "the test tokenizer knows some"


def test_an_engine_books_each_step_before_it_reads_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend, seen = Sentences.extend, []

    def spy(self: Sentences, tokens: Sequence[int], stop: int) -> None:
        seen.append(min(tokens[:stop]))
        extend(self, tokens, stop)

    monkeypatch.setattr(sentences.Sentences, "extend", spy)
    folder = save_checkpoint(tmp_path)
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(folder), quiet=True, enable_methods=("skipkv",), **options) as llm:
        llm.engine.overlap = True
        sparse = SparseParams("skipkv", budget=16, interval=4)
        sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        (output,) = llm.generate([[5] * 40], sampling, sparse, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 24
        (method,) = [m for m in llm.engine.controller.methods.values() if m.name == "skipkv"]
        assert method.ends == Words(llm.tokenizer, 1 << 20).ending_in((".", "?", "!"))
    assert seen, "sentences were read"
    assert min(seen) >= 0, "all of them are known"


def test_wrong_knobs_say_what_is_possible() -> None:
    config = METHODS.get("skipkv").config_class
    with pytest.raises(RequestError, match="at most longest=256"):
        config(shortest=300)
    with pytest.raises(RequestError, match="paper"):
        config.from_knobs("skipkv", {"preset": "author"})
