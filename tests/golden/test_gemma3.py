"""Gemma 3 270M from the GGUF file: greedy tokens and perplexity equal transformers'.

The weights come under the Gemma Terms of Use (`sparseengine pull gemma3-270m` shows them); whoever
runs these tests accepts them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from golden import gemma3
from golden.paged import PagedRun
from sparseengine.core.specs import LayerKind
from sparseengine.weights import hub
from sparseengine.weights.source import ModelSource

CHUNK = 1024
PAGE = 16
LENGTHS = (*gemma3.SEEDS, gemma3.TEXT_TOKENS)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    hub.pull("gemma3-270m", progress=False, accept_license=True)
    return gemma3.open_gemma()


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Any:
    return source.load_tokenizer()


@pytest.fixture(scope="module")
def run(source: ModelSource) -> PagedRun:
    """One request for every prompt and one for the text."""
    assert source.path is not None
    share = -(-sum(LENGTHS) // len(LENGTHS)) + gemma3.NUM_TOKENS
    return PagedRun(source.path, max_tokens=share, backend="cpu", prompts=LENGTHS)


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(gemma3.ORACLE.read_text(encoding="utf-8"))
    return values


def test_greedy_tokens_equal_the_oracle(
    run: PagedRun, tokenizer: Any, oracle: dict[str, Any]
) -> None:
    """48 tokens after prompts of 20, 700 and 3,000; the three decode in one batch."""
    tokens: dict[int, list[int]] = {}
    for number, length in enumerate(gemma3.SEEDS):
        ids = gemma3.prompt_ids(tokenizer, length)
        same = gemma3.digest(ids) == oracle[str(length)]["prompt"]
        assert same, "the tokenizer or the generator has changed"
        for start in range(0, length, CHUNK):
            (hidden,) = run.hidden({number: ids[start : start + CHUNK]})
        tokens[number] = [int(run.model.logits(hidden[-1:]).argmax())]
    for _ in range(gemma3.NUM_TOKENS - 1):
        step = run.step({number: found[-1:] for number, found in tokens.items()})
        for found, logits in zip(tokens.values(), step, strict=True):
            found.append(int(logits.argmax()))
    for number, length in enumerate(gemma3.SEEDS):
        assert tokens[number] == oracle[str(length)]["tokens"], length


def check_window_layers(run: PagedRun, number: int) -> None:
    """The whole text is held by the full layers, the others hold their window and a page."""
    request = run.requests[number]
    held = [run.cache.lens(request.id, layer)[0] for layer in range(len(run.spec.layers))]
    for layer, spec in enumerate(run.spec.layers):
        if spec.kind is LayerKind.WINDOW:
            assert spec.window == 512
            assert held[layer] < spec.window + PAGE, layer
        else:
            assert held[layer] == len(request.tokens), layer
    kinds = [spec.kind for spec in run.spec.layers]
    assert (kinds.count(LayerKind.WINDOW), kinds.count(LayerKind.FULL)) == (15, 3)
    assert run.cache.usage(request.id).pages * PAGE == sum(-(-n // PAGE) * PAGE for n in held)


def test_perplexity_equals_the_oracle(
    run: PagedRun, source: ModelSource, tokenizer: Any, oracle: dict[str, Any]
) -> None:
    """8,192 tokens of real text, every eighth scored (the head is most of the work): losses part by
    part, and the perplexity within 0.1 %. The script compares the losses of all tokens."""
    assert source.path is not None
    ids = gemma3.text_ids(tokenizer, source.path.parent)
    expected, number = oracle["text"], LENGTHS.index(gemma3.TEXT_TOKENS)
    assert gemma3.digest(ids) == expected["ids"], "the tokenizer or the text has changed"
    found = []
    for start in range(0, len(ids), CHUNK):
        (hidden,) = run.hidden({number: ids[start : start + CHUNK]})
        targets = torch.tensor(ids[start + 1 : start + CHUNK + 1])[:: gemma3.SCORED]
        logits = run.model.logits(hidden[:: gemma3.SCORED])
        found.append(gemma3.losses(logits, targets))
    loss = torch.cat(found).double()
    parts = [part.mean().item() for part in loss.chunk(gemma3.WINDOWS)]
    assert parts == pytest.approx(expected["parts"], abs=1e-3)
    assert math.exp(loss.mean().item()) == pytest.approx(math.exp(expected["loss"]), rel=1e-3)
    check_window_layers(run, number)


def test_weights_and_tokenizer_equal_the_oracle(
    source: ModelSource, oracle: dict[str, Any]
) -> None:
    """Both were read by transformers from the same file, and agree bit for bit."""
    assert source.path is not None
    assert gemma3.tokenizer_digest(source.path.parent) == oracle["tokenizer"]
    assert gemma3.weights_digest(source.tensors()) == oracle["weights"]
