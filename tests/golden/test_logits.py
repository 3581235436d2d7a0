"""fp32 logits equal transformers on tiny seeded checkpoints, whole and chunked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.tiny import VOCAB, reference_model, save_tiny
from golden.paged import PagedRun, paged_logits

TOLERANCE = 1e-4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-derived-head-dim": ("llama", {"head_dim": None}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-factor-1": {"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.0},
}


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(family: str, ids: list[int], **overrides: Any) -> Tensor:
    logits: Tensor = reference_model(family, **overrides)(torch.tensor([ids])).logits[0]
    return logits


def worst(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    folder = save_tiny(tmp_path, family, **overrides)
    for length, chunks in ((1, (1,)), (17, (17,)), (17, (16, 1)), (17, (5, 1, 11))):
        ids = prompt(length)
        expected = expected_logits(family, ids, **overrides)
        assert worst(paged_logits(folder, ids, chunks), expected) < TOLERANCE, (length, chunks)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_long_prompt_whole_and_chunked(family: str, tmp_path: Path) -> None:
    folder, ids = save_tiny(tmp_path, family), prompt(700)
    expected = expected_logits(family, ids)
    whole = paged_logits(folder, ids, (700,))
    assert worst(whole, expected) < TOLERANCE
    for sizes in ((256, 256, 188), (1, 333, 366)):
        chunked = paged_logits(folder, ids, sizes)
        assert worst(chunked, expected) < TOLERANCE
        losses = [
            torch.nn.functional.cross_entropy(x[:-1], torch.tensor(ids[1:]), reduction="none")
            for x in (whole, chunked)
        ]
        assert worst(*losses) < 1e-5, "a later chunk must not attend with an earlier one's geometry"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_scaling(family: str, rope: str, tmp_path: Path) -> None:
    overrides = {"rope_parameters": {"rope_theta": 5000.0, **ROPES[rope]}}
    folder, ids = save_tiny(tmp_path, family, **overrides), prompt(300)
    expected = expected_logits(family, ids, **overrides)
    assert worst(paged_logits(folder, ids, (130, 170)), expected) < TOLERANCE
    plain = expected_logits(family, ids)
    assert worst(plain, expected) > TOLERANCE, "the case must be able to fail"


def test_kv_heads_are_stored_once(tmp_path: Path) -> None:
    """8 query heads on 2 KV heads: the cache holds 2 heads, not 8."""
    run = PagedRun(save_tiny(tmp_path), max_tokens=64)
    run.feed(prompt(17))
    assert {s.kv_heads for s in run.spec.layers} == {2}
    view = run.cache.view(0, None)
    assert [part[0].shape[1] for part in view.segments[0].payload] == [2, 2]
    head_dim, layers, value_bytes = 8, 3, 4
    used_pages = 2  # of 16 slots
    expected = used_pages * 16 * 2 * head_dim * 2 * layers * value_bytes
    assert run.cache.usage(0).bytes == expected
