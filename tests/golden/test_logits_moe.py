"""Mixture of experts: fp32 logits equal transformers, alone, in shared steps and preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fixtures.engines import BOS, EOS, make_tokenizer
from fixtures.engines import VOCAB as ENGINE_VOCAB
from golden.paged import PagedRun, paged_logits
from sparseengine.core.params import SamplingParams
from sparseengine.errors import ConfigError
from sparseengine.llm import LLM
from sparseengine.nn.mlp import SwiGLU
from sparseengine.nn.moe import MoE

VOCAB, TOLERANCE = 128, 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 8, "moe_intermediate_size": 24},
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 8}),
}
QWEN, MIXTRAL = FAMILIES
WINDOW = {"use_sliding_window": True, "sliding_window": 12}
# case: family, overrides, and those of a model whose logits must differ
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": (QWEN, {}, {"num_experts_per_tok": 2}),
    "normalised": (QWEN, {"norm_topk_prob": True}, {}),
    "dense-first": (QWEN, {"mlp_only_layers": [0]}, {}),
    "every-second": (QWEN, {"decoder_sparse_step": 2}, {}),
    "second-but-listed": (QWEN, {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {}),
    "one-of-many": (QWEN, {"num_experts": 33, "num_experts_per_tok": 1}, {}),
    "all-of-them": (QWEN, {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}, {}),
    "biases-tied": (QWEN, {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "derived-head-dim": (QWEN, {"head_dim": None}, {}),
    "window": (QWEN, {**WINDOW, "max_window_layers": 2}, {}),
    "window-unused": (QWEN, {"sliding_window": 12}, WINDOW),
    "mixtral": (MIXTRAL, {}, {"num_experts_per_tok": 2}),
    "mixtral-window": (MIXTRAL, {"sliding_window": 12}, {}),
    "mixtral-tied": (MIXTRAL, {"head_dim": None, "tie_word_embeddings": True}, {}),
}


def reference_model(family: str = QWEN, **overrides: Any) -> torch.nn.Module:
    config_class, model_class, extra = FAMILIES[family]
    given = {**SIZES, **extra, **overrides}
    given = {name: value for name, value in given.items() if value is not None}
    torch.manual_seed(0)
    model: torch.nn.Module = model_class(config_class(**given, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif name.endswith("mlp.gate.weight"):  # choices that are not near ties
                parameter.normal_(0.0, 0.5, generator=generator)
    return model


def save_tiny(folder: Path, family: str = QWEN, **overrides: Any) -> Path:
    reference_model(family, **overrides).save_pretrained(folder)
    return folder


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(ids: list[int], family: str = QWEN, **overrides: Any) -> Tensor:
    logits: Tensor = reference_model(family, **overrides)(torch.tensor([ids])).logits[0]
    return logits


def worst(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, overrides, without = CASES[case]
    folder = save_tiny(tmp_path, family, **overrides)
    for length, chunks in ((1, (1,)), (17, (17,)), (17, (5, 1, 11)), (40, (14, 26))):
        ids = prompt(length)
        expected = expected_logits(ids, family, **overrides)
        assert worst(paged_logits(folder, ids, chunks), expected) < TOLERANCE, (length, chunks)
    other = expected_logits(ids, family, **without)
    assert worst(other, expected) > 100 * TOLERANCE, "the case must be able to fail"


def test_long_prompt_whole_and_chunked(tmp_path: Path) -> None:
    folder, ids = save_tiny(tmp_path), prompt(700)
    expected = expected_logits(ids)
    for sizes in ((700,), (256, 256, 188), (1, 333, 366)):
        assert worst(paged_logits(folder, ids, sizes, backend="cpu"), expected) < TOLERANCE


def test_which_layers_have_experts(tmp_path: Path) -> None:
    overrides = {"decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3]}
    run = PagedRun(save_tiny(tmp_path, **overrides), max_tokens=16)
    blocks = [type(layer.mlp) for layer in run.model.model.layers]
    assert blocks == [SwiGLU, MoE, SwiGLU, SwiGLU, SwiGLU, MoE]


@pytest.mark.parametrize("backend", ["reference", "cpu", "deterministic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_share_steps(family: str, backend: str, tmp_path: Path) -> None:
    """Chunks and decodes of three requests equal each text on its own."""
    texts, lengths = [prompt(36), prompt(19), prompt(30)], (30, 9, 21)
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
        assert worst(logits, expected_logits(text[: len(logits)], family)) < TOLERANCE


def test_experts_stored_as_stacks_and_missing_ones(tmp_path: Path) -> None:
    """Other exporters write gate and up, or each projection, of all experts as one tensor."""
    save_tiny(tmp_path)
    file, ids = tmp_path / "model.safetensors", prompt(17)
    expected, whole = expected_logits(ids), load_file(file)
    plain = {n: t for n, t in whole.items() if ".experts." not in n}
    merged, apart = dict(plain), dict(plain)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([whole[f"{prefix}.{i}.{part}_proj.weight"] for i in range(8)])
            for part in ("gate", "up", "down")
        )
        merged |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
        apart |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        apart[f"{prefix}.down_proj.weight"] = down
    for tensors in (merged, apart):
        save_file(tensors, file, {"format": "pt"})
        assert worst(paged_logits(tmp_path, ids, (17,)), expected) < TOLERANCE
    missing = "model.layers.1.mlp.experts.5.up_proj.weight"
    save_file({n: t for n, t in whole.items() if n != missing}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks 1 tensor that the model needs: {missing}"):
        PagedRun(tmp_path, max_tokens=16)
    surplus = "model.layers.1.mlp.experts.8.up_proj.weight"
    save_file({**whole, surplus: whole[missing].clone()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=surplus):
        PagedRun(tmp_path, max_tokens=16)


IDS = {"vocab_size": ENGINE_VOCAB, "bos_token_id": BOS, "eos_token_id": EOS}
NEW, FEW = 20, 5
LENGTHS = (45, 20, 18, 22)


def texts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, ENGINE_VOCAB) for _ in range(n)] for n in LENGTHS]


def generate(
    folder: Path, prompts: list[list[int]], logprobs: bool, **options: Any
) -> tuple[list[Any], int]:
    sampling = SamplingParams(
        temperature=0,
        max_tokens=FEW if logprobs else NEW,
        ignore_eos=True,
        logprobs=3 if logprobs else None,
    )
    with LLM(str(folder), max_model_len=128, max_num_seqs=4, quiet=True, **options) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        preempted = llm.get_metrics()["num_preemptions"]
    if not logprobs:
        return [o.outputs[0].token_ids for o in outputs], preempted
    rows = [o.outputs[0].logprobs or () for o in outputs]
    return [[[(t, p.logprob) for t, p in row.items()] for row in each] for each in rows], preempted


@torch.inference_mode()
def greedy(family: str, ids: list[int]) -> list[int]:
    model, text = reference_model(family, **IDS), list(ids)
    for _ in range(NEW):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def engine_folder(folder: Path, family: str) -> Path:
    save_tiny(folder, family, **IDS)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_end_as_undisturbed(family: str, tmp_path: Path) -> None:
    folder = engine_folder(tmp_path, family)
    expected = [greedy(family, ids) for ids in texts()]
    tight, preempted = generate(
        folder, texts(), False, reserve_output_tokens=0, num_gpu_blocks_override=5
    )
    assert preempted > 0
    roomy, undisturbed = generate(folder, texts(), False, kv_cache_memory_bytes=8 << 20)
    assert undisturbed == 0
    assert tight == roomy == expected


def test_the_same_bits_for_every_batch_and_chunk_size(tmp_path: Path) -> None:
    folder = engine_folder(tmp_path, QWEN)

    def bits(count: int, step_tokens: int) -> list[Any]:
        options = {"deterministic": True, "max_num_batched_tokens": step_tokens}
        return generate(folder, texts()[:count], True, **options)[0]

    whole = bits(4, 2048)
    assert len(whole[0]) == FEW
    assert bits(1, 2048) == whole[:1]
    assert bits(4, 17) == whole
