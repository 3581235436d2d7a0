"""Every family in the engine: requests that are preempted end as undisturbed, as transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.engines import BOS, EOS, VOCAB, save_checkpoint
from fixtures.tiny import FAMILIES, reference_model
from sparseengine.core.params import SamplingParams
from sparseengine.llm import LLM

IDS = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS}
NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
LENGTHS = (45, 20, 18, 22)  # one is longer than the window; the others outgrow it while decoding
WINDOW = {"sliding_window": 32}
WINDOWED = ("mistral", "ministral", "gemma2", "gemma3")


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


@torch.inference_mode()
def greedy(family: str, ids: list[int], **overrides: Any) -> list[int]:
    model, text = reference_model(family, **IDS, **overrides), list(ids)
    for _ in range(NEW):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def tokens(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """Generated ids of all prompts in one engine, and how many requests were preempted."""
    with LLM(str(folder), max_model_len=128, max_num_seqs=4, quiet=True, **options) as llm:
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        preempted = llm.get_metrics()["num_preemptions"]
    return [o.outputs[0].token_ids for o in outputs], preempted


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_end_as_undisturbed(family: str, tmp_path: Path) -> None:
    overrides = WINDOW if family in WINDOWED else {}
    folder = save_checkpoint(tmp_path, family, **overrides)
    expected = [greedy(family, ids, **overrides) for ids in prompts()]
    tight, preempted = tokens(folder, reserve_output_tokens=0, num_gpu_blocks_override=5)
    assert preempted > 0
    roomy, undisturbed = tokens(folder, kv_cache_memory_bytes=8 << 20)
    assert undisturbed == 0
    assert tight == roomy == expected
