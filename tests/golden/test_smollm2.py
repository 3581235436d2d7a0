"""SmolLM2 from the GGUF file: 64 greedy tokens equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from golden import smollm2
from golden.paged import PagedRun
from sparseengine.config import ModelConfig
from sparseengine.core.plan import Purpose
from sparseengine.weights import hub
from sparseengine.weights.source import ModelSource, open_model

CHUNK = 2048


@pytest.fixture(scope="module")
def source() -> ModelSource:
    hub.pull("smollm2-135m")
    return open_model(ModelConfig(model="smollm2-135m"))


def engine_greedy(folder: Path, ids: list[int], num_tokens: int) -> list[int]:
    run = PagedRun(folder, max_tokens=len(ids) + num_tokens, backend="cpu")
    for start in range(0, len(ids), CHUNK):
        logits = run.feed(ids[start : start + CHUNK])
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < num_tokens:
        tokens.append(int(run.feed(tokens[-1:], Purpose.DECODE)[-1].argmax()))
    return tokens


@pytest.mark.parametrize("length", smollm2.LENGTHS)
def test_greedy_tokens_equal_the_oracle(source: ModelSource, length: int) -> None:
    expected = json.loads(smollm2.ORACLE.read_text(encoding="utf-8"))[str(length)]
    ids = smollm2.prompt_ids(source.load_tokenizer(), length)
    assert smollm2.digest(ids) == expected["prompt"], "the tokenizer or the generator has changed"
    assert source.path is not None
    assert engine_greedy(source.path, ids, smollm2.NUM_TOKENS) == expected["tokens"]


def test_weights_and_tokens_equal_transformers_live(source: ModelSource) -> None:
    """The oracle itself: decoded weights bit for bit, then the short prompt, then the tokenizer."""
    from transformers import AutoTokenizer

    assert source.path is not None
    model = smollm2.reference_model(source.path)
    expected = model.state_dict()
    names = set()
    for name, tensor in source.tensors():
        assert torch.equal(tensor, expected[name]), name
        names.add(name)
    assert expected.keys() - names == {"lm_head.weight"}
    ids = smollm2.prompt_ids(source.load_tokenizer(), smollm2.LENGTHS[0])
    oracle = json.loads(smollm2.ORACLE.read_text(encoding="utf-8"))[str(smollm2.LENGTHS[0])]
    assert smollm2.greedy(model, ids, 16)[0] == oracle["tokens"][:16]
    fresh = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    text = "Numbers 90210, symbols <|im_start|> and 한국어.\n\n  spaces"
    assert fresh(text).input_ids == source.load_tokenizer()(text).input_ids
