"""deterministic=True: the same bits whatever shares the batch and however a prompt is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import VOCAB, save_checkpoint
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.llm import LLM

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
SPARSE = (SparseParams("full"), SparseParams("snapkv", budget=24), SparseParams("quest", budget=32))


# Gemma 2: soft caps, windows, gelu. Phi-3: a rotation that goes by the text's length.
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 3.0, 6.0, 9.0],
    },
}
FAMILIES: dict[str, dict[str, Any]] = {"gemma2": {"num_hidden_layers": 6}, "phi3": LONGROPE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("deterministic"))


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 33, 90, 21, 64, 47, 80, 55)]


def bits(folder: Path, count: int, step_tokens: int, sparse: SparseParams) -> list[Any]:
    """Tokens and exact log-probabilities of the first `count` prompts in one batch."""
    with LLM(
        str(folder),
        quiet=True,
        deterministic=True,
        enable_methods=["full", "snapkv", "quest"],
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=step_tokens,
    ) as llm:
        outputs = llm.generate(prompts()[:count], PARAMS, sparse, use_tqdm=False)
    return [
        [[(t, p.logprob) for t, p in row.items()] for row in o.outputs[0].logprobs or ()]
        for o in outputs
    ]


@pytest.mark.parametrize("sparse", SPARSE, ids=lambda s: s.method)
def test_the_same_bits_for_every_batch_size_and_chunk_size(
    folder: Path, sparse: SparseParams
) -> None:
    whole = bits(folder, 8, 2048, sparse)
    assert len(whole) == 8
    assert len(whole[0]) == 6
    for count in (1, 2, 4):
        assert bits(folder, count, 2048, sparse) == whole[:count]
    for step_tokens in (17, 64):
        assert bits(folder, 8, step_tokens, sparse) == whole
        assert bits(folder, 1, step_tokens, sparse) == whole[:1]


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family, **FAMILIES[family])
    whole = bits(folder, 8, 2048, SPARSE[1])
    assert bits(folder, 2, 2048, SPARSE[1]) == whole[:2]
    assert bits(folder, 8, 33, SPARSE[1]) == whole
