"""fp32 logits equal transformers on tiny seeded checkpoints: whole, chunked, batched, decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from fixtures.tiny import (
    FAMILIES,
    FULL,
    GEMMA3_ROPES,
    SLIDING,
    VOCAB,
    WINDOW,
    gemma3_with_pictures,
    reference_model,
    save_tiny,
)
from golden.paged import PagedRun, paged_logits
from sparseengine.core.plan import Purpose
from sparseengine.errors import ConfigError
from sparseengine.models.gemma import GemmaDecoder

TOLERANCE = 1e-4
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
# case: family, overrides, and the overrides of a model whose logits must differ
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "llama": ("llama", {}, None),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-derived-head-dim": ("llama", {"head_dim": None}, None),
    "llama-mha": ("llama", {"num_key_value_heads": 8}, {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, {}),
    "mistral": ("mistral", {}, {"sliding_window": None}),
    "mistral-full": ("mistral", {"sliding_window": None}, {}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}, {}),
    "ministral": ("ministral", {}, {"layer_types": [SLIDING] * 3}),
    "qwen2": ("qwen2", {}, None),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2-window-unused": ("qwen2", {"sliding_window": WINDOW}, None),
    "qwen2-windows": ("qwen2", {**WINDOWED, "max_window_layers": 1}, {}),
    "qwen2-types": ("qwen2", {**WINDOWED, "layer_types": [SLIDING, FULL, SLIDING]}, {}),
    "qwen3": ("qwen3", {}, None),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}, {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}, {}),
    "qwen3-windows": ("qwen3", {**WINDOWED, "max_window_layers": 2}, {}),
    "qwen3-types": ("qwen3", {**WINDOWED, "layer_types": [FULL, SLIDING, FULL]}, {}),
    "gemma": ("gemma", {}, None),
    "gemma-untied": ("gemma", {"tie_word_embeddings": False}, {}),
    "gemma-biases": ("gemma", {"attention_bias": True}, {}),
    "gemma2": ("gemma2", {}, {"layer_types": [FULL] * 3}),
    "gemma2-attention-cap": ("gemma2", {}, {"attn_logit_softcapping": None}),
    "gemma2-final-cap": ("gemma2", {}, {"final_logit_softcapping": None}),
    "gemma2-scale": ("gemma2", {}, {"query_pre_attn_scalar": 16}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {},
    ),
    "gemma3": ("gemma3", {}, {"layer_types": [FULL] * 3}),
    "gemma3-final-cap": ("gemma3", {"final_logit_softcapping": 3.0}, {}),
    "gemma3-mqa": ("gemma3", {"num_key_value_heads": 1}, {}),
    "gemma3-local-theta": ("gemma3", {}, {"rope_parameters": {**GEMMA3_ROPES, SLIDING: PLAIN}}),
    "gemma3-full-factor": ("gemma3", {}, {"rope_parameters": {**GEMMA3_ROPES, FULL: PLAIN}}),
    "gemma3-default-ropes": ("gemma3", {"rope_parameters": None}, {}),
    "phi3": ("phi3", {}, None),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}, {}),
    "phi3-tied": ("phi3", {"tie_word_embeddings": True}, {}),
    "phi3-partial": ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}),
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 1.7, 2.5],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
# rule: rope dictionary, other overrides
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, {}),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, {"max_position_embeddings": 128}),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {},
    ),
    "yarn": (YARN, {}),
    "yarn-factor-1": ({"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.0}, {}),
    "yarn-equal-mscales": ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, {}),
    "yarn-two-mscales": ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}, {}),
    "yarn-not-truncated": ({**YARN, "truncate": False}, {}),
    "longrope": ({**LONGROPE, "original_max_position_embeddings": 200}, {}),
    "longrope-short": ({**LONGROPE, "original_max_position_embeddings": 300}, {}),
    "longrope-factor": (
        {**LONGROPE, "factor": 32.0, "original_max_position_embeddings": 200},
        {},
    ),
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
    """The prompts of 17 and 40 tokens are longer than the windows."""
    family, overrides, without = CASES[case]
    folder = save_tiny(tmp_path, family, **overrides)
    for length, chunks in (
        (1, (1,)),
        (17, (17,)),
        (17, (16, 1)),
        (17, (5, 1, 11)),
        (40, (14, 26)),
    ):
        ids = prompt(length)
        expected = expected_logits(family, ids, **overrides)
        assert worst(paged_logits(folder, ids, chunks), expected) < TOLERANCE, (length, chunks)
    if without is not None:
        other = expected_logits(family, ids, **without)
        assert worst(other, expected) > 100 * TOLERANCE, "the case must be able to fail"


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompt_whole_and_chunked(family: str, tmp_path: Path) -> None:
    folder, ids = save_tiny(tmp_path, family), prompt(700)
    expected = expected_logits(family, ids)
    whole = paged_logits(folder, ids, (700,), backend="cpu")
    assert worst(whole, expected) < TOLERANCE
    for sizes in ((256, 256, 188), (1, 333, 366)):
        chunked = paged_logits(folder, ids, sizes, backend="cpu")
        assert worst(chunked, expected) < TOLERANCE
        losses = [
            torch.nn.functional.cross_entropy(x[:-1], torch.tensor(ids[1:]), reduction="none")
            for x in (whole, chunked)
        ]
        assert worst(*losses) < 1e-5, "a later chunk must not attend with an earlier one's geometry"


@pytest.mark.parametrize("backend", ["reference", "cpu", "deterministic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_share_steps(family: str, backend: str, tmp_path: Path) -> None:
    """Chunks and decodes of three requests, among pages full of NaN, equal each text on its own."""
    texts = [prompt(36), prompt(19), prompt(30)]
    lengths = (30, 9, 21)
    folder = save_tiny(tmp_path, family)
    run = PagedRun(folder, max_tokens=48, backend=backend, prompts=lengths)
    steps = [{0: 20, 1: 9}, {1: 1, 0: 10, 2: 5}, {0: 1, 1: 1, 2: 16}]
    steps += [dict.fromkeys(range(3), 1)] * 2 + [{1: 1, 2: 1}, {1: 1}]
    found: list[list[Tensor]] = [[], [], []]
    for step in steps:
        chunks = {}
        for i, size in step.items():
            at = len(run.requests[i].tokens)
            chunks[i] = texts[i][at : at + size]
        for i, logits in zip(chunks, run.step(chunks), strict=True):
            found[i].append(logits)
    for text, length, parts in zip(texts, lengths, found, strict=True):
        logits = torch.cat(parts)
        assert len(logits) >= length + 3, "some of its tokens were decodes"
        expected = expected_logits(family, text[: len(logits)])
        assert worst(logits, expected) < TOLERANCE


LONG = [rope for rope in ROPES if rope.startswith("longrope")]  # all that Phi-3 may have


@pytest.mark.parametrize(
    ("family", "rope"),
    [("llama", rope) for rope in ROPES]
    + [("qwen3", rope) for rope in ROPES]
    + [("phi3", rope) for rope in LONG],
)
def test_rope_scaling(family: str, rope: str, tmp_path: Path) -> None:
    """In one chunk and in several, the first of which ends before the limit of the rule."""
    parameters, extra = ROPES[rope]
    theta = {"rope_theta": 5000.0}
    overrides = {"head_dim": 8, "rope_parameters": {**theta, **parameters}, **extra}
    if family == "phi3":
        original = parameters["original_max_position_embeddings"]
        overrides["original_max_position_embeddings"] = original
    folder, ids = save_tiny(tmp_path, family, **overrides), prompt(300)
    expected = expected_logits(family, ids, **overrides)
    assert worst(paged_logits(folder, ids, (300,), backend="cpu"), expected) < TOLERANCE
    assert worst(paged_logits(folder, ids, (100, 30, 170), backend="cpu"), expected) < TOLERANCE
    plain = expected_logits(family, ids, head_dim=8, rope_parameters=theta)
    assert worst(plain, expected) > 100 * TOLERANCE, "the case must be able to fail"


@pytest.mark.parametrize(
    ("family", "rope", "limit"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": 64}),
        ("llama", {**LONGROPE, "factor": 4.0, "original_max_position_embeddings": 64}, {}),
        ("phi3", LONGROPE, {"original_max_position_embeddings": 64}),
    ],
    ids=["dynamic", "longrope", "phi3"],
)
@pytest.mark.parametrize("start", [60, 70])
@torch.inference_mode()
def test_decode_over_the_limit_of_a_rope_rule(
    family: str, rope: dict[str, Any], limit: dict[str, int], start: int, tmp_path: Path
) -> None:
    """Token by token behind a prompt on either side of the limit of 64."""
    overrides = {"head_dim": 8, "rope_parameters": {"rope_theta": 500.0, **rope}, **limit}
    folder, ids = save_tiny(tmp_path, family, **overrides), prompt(start + 10)
    model = reference_model(family, **overrides)
    past = DynamicCache(config=model.config)
    expected = [model(torch.tensor([ids[:start]]), past_key_values=past).logits[0]]
    expected += [model(torch.tensor([[i]]), past_key_values=past).logits[0] for i in ids[start:]]
    run = PagedRun(folder, max_tokens=len(ids), prompts=(start,))
    found = [run.step({0: ids[: start - 9]})[0], run.step({0: ids[start - 9 : start]})[0]]
    found += [run.step({0: [i]}, Purpose.DECODE)[0] for i in ids[start:]]
    assert worst(torch.cat(found), torch.cat(expected)) < TOLERANCE


def test_language_part_of_a_gemma_that_sees(tmp_path: Path) -> None:
    model, ids = gemma3_with_pictures(), prompt(40)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert worst(paged_logits(tmp_path, ids, (14, 26)), expected) < TOLERANCE
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any("vision_tower" in name for name in tensors), "there is something to leave out"
    # The other layout of names: the language model inside `model`, and the other way round.
    if any(name.startswith("language_model.model.") for name in tensors):
        swap = ("language_model.model.", "model.language_model.")
    else:
        swap = ("model.language_model.", "language_model.model.")
    save_file({n.replace(*swap): t for n, t in tensors.items()}, file, {"format": "pt"})
    assert worst(paged_logits(tmp_path, ids, (40,)), expected) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_and_untied_heads_and_missing_tensors(family: str, tmp_path: Path) -> None:
    """A tied checkpoint holds no head; an untied one without it, or without a norm, is refused."""
    save_tiny(tmp_path / "tied", family, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    ids = prompt(9)
    expected = expected_logits(family, ids, tie_word_embeddings=True)
    assert worst(paged_logits(tmp_path / "tied", ids, (9,)), expected) < TOLERANCE
    save_tiny(tmp_path / "untied", family, tie_word_embeddings=False)
    file = tmp_path / "untied" / "model.safetensors"
    whole = load_file(file)
    for missing in ("lm_head.weight", "model.layers.2.post_attention_layernorm.weight"):
        save_file({n: t for n, t in whole.items() if n != missing}, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=f"lacks 1 tensor that the model needs: {missing}"):
            PagedRun(tmp_path / "untied", max_tokens=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_heads_are_stored_once(family: str, tmp_path: Path) -> None:
    """8 query heads on 2 KV heads: the cache holds 2 heads, not 8."""
    run = PagedRun(save_tiny(tmp_path, family), max_tokens=64)
    run.feed(prompt(17))
    for layer, spec in enumerate(run.spec.layers):
        assert (spec.q_heads, spec.kv_heads) == (8, 2)
        for (pool,) in run.cache.view(layer, None).segments[0].payload:
            assert pool.shape[1] == 2
            assert pool.shape[3] == spec.head_dim
    if family != "llama":
        return
    head_dim, layers, value_bytes = 8, 3, 4
    used_pages = 2  # of 16 slots
    expected = used_pages * 16 * 2 * head_dim * 2 * layers * value_bytes
    assert run.cache.usage(0).bytes == expected


@torch.inference_mode()
def test_embedding_scale_is_rounded_to_the_model_dtype() -> None:
    """sqrt(80) is 8.944, in bfloat16 8.9375."""
    reference = reference_model("gemma3", hidden_size=80).bfloat16()
    ids = torch.tensor(prompt(50))
    expected = reference.model.embed_tokens(ids)
    weight = reference.model.embed_tokens.weight
    decoder = GemmaDecoder.__new__(GemmaDecoder)
    torch.nn.Module.__init__(decoder)
    decoder.embed_tokens = lambda found: weight[found]
    assert torch.equal(GemmaDecoder.embed(decoder, ids), expected)
    assert not torch.equal((weight[ids].float() * 80**0.5).bfloat16(), expected)
