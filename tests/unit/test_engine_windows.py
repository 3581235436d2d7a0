"""Models with sliding windows under the whole engine: tokens, memory, refusals, bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.engines import VOCAB, save_checkpoint
from fixtures.tiny import WINDOW, reference_model
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import SparseEngineError
from sparseengine.llm import LLM

NEW = 30
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {"quiet": True, "max_model_len": 256, "max_num_seqs": 4, "block_size": 4}


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (150, 41, 90, 7)]


@pytest.fixture(scope="module", params=["mistral", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def expected(family: str) -> list[list[int]]:
    """Greedy tokens of transformers, which masks a cache of the whole text."""
    model = reference_model(family, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1)
    found = []
    for prompt in prompts():
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 19}], ids=["whole", "chunks"])
def test_tokens_are_those_of_a_model_that_keeps_everything(
    folder: Path, expected: list[list[int]], options: dict[str, int]
) -> None:
    with LLM(str(folder), **OPTIONS, **options) as llm:
        outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected


def test_little_memory_is_enough(folder: Path, family: str, expected: list[list[int]]) -> None:
    """Pages of one row for 140 tokens (mistral: 24): less than the longest prompt has."""
    blocks = {"mistral": 6, "gemma3": 35}[family]
    options = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 8}
    with LLM(str(folder), **OPTIONS, **options, reserve_output_tokens=0) as llm:
        outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        cache = llm.engine.scheduler.cache
        cache.check()
        assert cache.free_pages() == cache.total_pages()
    assert 4 * blocks < 150 + NEW


def test_records_show_windows(folder: Path, family: str) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        sparse = SparseParams("full", record=True)
        (output,) = llm.generate(prompts()[:1], PARAMS, sparse, use_tqdm=False)
    record = output.outputs[0].sparse
    assert record is not None
    sliding = {"mistral": (0, 1, 2), "gemma3": (0, 1)}[family]
    held = range((150 - WINDOW + 1) // 4 * 4, 150)
    for layer, heads in record.retained[0].positions.items():
        assert heads == [list(held if layer in sliding else range(150))] * len(heads)


def test_a_model_of_windows_runs_dense_only(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "mistral")
    with pytest.raises(SparseEngineError, match="acts on layers of kind FULL"):
        LLM(str(folder), **OPTIONS, sparse_method="snapkv")


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_the_same_bits_however_the_prompt_is_cut(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path, "gemma3", sliding_window=70)
    found = []
    for step_tokens in (512, 23):
        options = {"max_num_batched_tokens": step_tokens, "deterministic": True}
        with LLM(str(folder), **OPTIONS, **options, enable_methods=["full", "snapkv"]) as llm:
            sparse = SparseParams(name, budget=32 if name == "snapkv" else None)
            outputs = llm.generate(prompts(), PARAMS, sparse, use_tqdm=False)
        found.append([[list(row.items()) for row in o.outputs[0].logprobs or ()] for o in outputs])
    bits = [[[(t, p.logprob) for t, p in row] for rows in run for row in rows] for run in found]
    assert bits[0] == bits[1]
    assert len(bits[0]) == 4 * NEW
