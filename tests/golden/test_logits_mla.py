"""Latent attention: fp32 logits equal transformers, both ways of attending, evicted rows too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fixtures.engines import BOS, EOS, make_tokenizer
from fixtures.engines import VOCAB as ENGINE_VOCAB
from fixtures.tiny import VOCAB
from fixtures.tiny_latent import FAMILIES, latent_model, save_latent
from golden.paged import PagedRun, paged_logits
from sparseengine.core.params import SamplingParams
from sparseengine.core.plan import Purpose
from sparseengine.core.view import Keep
from sparseengine.llm import LLM
from sparseengine.nn import latent

TOLERANCE = 1e-4
SHORT, LONG = (5, 1, 11), (130, 1, 69)  # chunks that are absorbed; some that are expanded
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2-greedy": ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "v2-dense": ("deepseek_v2", {"first_k_dense_replace": 3, "mlp_bias": True}),
    "v3": ("deepseek_v3", {}),
    "v3-plain-queries": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "v3-not-normalised": ("deepseek_v3", {"norm_topk_prob": False}),
    "v3-pairs-apart": ("deepseek_v3", {"rope_interleave": False}),
    "glm": ("glm4_moe_lite", {}),
    "glm-biases": ("glm4_moe_lite", {"attention_bias": True}),
    "glm-listed": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "glm-tied": ("glm4_moe_lite", {"tie_word_embeddings": True}),
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "original_max_position_embeddings": 64}
MSCALES: dict[str, dict[str, float]] = {
    "none": {"factor": 16.0},
    "equal": {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "0.707": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "two": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "attention-factor": {"factor": 64.0, "attention_factor": 1.0},
}


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(family: str, ids: list[int], mask: Tensor | None = None, **config: Any) -> Any:
    """mask: bool [T, T] of what a token sees, instead of the causal one."""
    given = {}
    if mask is not None:
        least = torch.finfo(torch.float32).min
        given["attention_mask"] = torch.where(mask, 0.0, least)[None, None]
    return latent_model(family, **config)(torch.tensor([ids]), **given).logits[0]


def worst(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    return (found - expected).abs().max().item()


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What every layer and step chose."""
    chosen: list[bool] = []
    rule = latent.expansion_pays

    def spy(*args: Any) -> bool:
        chosen.append(rule(*args))
        return chosen[-1]

    monkeypatch.setattr(latent, "expansion_pays", spy)
    return chosen


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path, expanded: list[bool]) -> None:
    family, overrides = CASES[case]
    folder = save_latent(tmp_path, family, **overrides)
    for sizes in ((1,), SHORT, LONG, (200,)):
        ids = prompt(sum(sizes))
        backend = "cpu" if sizes == LONG else "reference"
        found = paged_logits(folder, ids, sizes, backend)
        assert worst(found, expected_logits(family, ids, **overrides)) < TOLERANCE, sizes
    assert set(expanded) == {False, True}, "both ways must be tested"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mscale", MSCALES)
def test_yarn(family: str, mscale: str, tmp_path: Path) -> None:
    config = {"rope_parameters": {**YARN, **MSCALES[mscale]}}
    folder, ids = save_latent(tmp_path, family, **config), prompt(180)
    expected = expected_logits(family, ids, **config)
    assert worst(paged_logits(folder, ids, (140, 10, 30)), expected) < TOLERANCE
    plain = expected_logits(family, ids, rope_parameters={"rope_theta": 5000.0})
    assert worst(plain, expected) > 100 * TOLERANCE, "the case must be able to fail"


@pytest.mark.parametrize("backend", ["reference", "cpu", "deterministic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_share_steps(
    family: str, backend: str, tmp_path: Path, expanded: list[bool]
) -> None:
    """Decodes beside chunks that are absorbed and chunks that are expanded."""
    texts = [prompt(95), prompt(80), prompt(30)]
    run = PagedRun(
        save_latent(tmp_path, family), max_tokens=96, backend=backend, prompts=(90, 9, 21)
    )
    steps = [{1: 9}, {1: 1, 0: 80, 2: 5}, {1: 1, 0: 10, 2: 16}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}]
    found: list[list[Tensor]] = [[], [], []]
    for step in steps:
        at = {i: len(run.requests[i].tokens) for i in step}
        chunks = {i: texts[i][at[i] : at[i] + size] for i, size in step.items()}
        for i, logits in zip(chunks, run.step(chunks), strict=True):
            found[i].append(logits)
    for text, parts in zip(texts, found, strict=True):
        logits = torch.cat(parts)
        assert worst(logits, expected_logits(family, text[: len(logits)])) < TOLERANCE
    assert set(expanded) == {False, True}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 8, 60])
def test_evicted_rows_keep_their_positions(
    family: str, size: int, tmp_path: Path, expanded: list[bool]
) -> None:
    """Behind an eviction tokens see what was kept, rotated as it was written, and themselves.

    That is one dense pass under a mask: rows of the prompt see all of it, later rows the kept part.
    """
    ids, length = prompt(130), 70
    run = PagedRun(save_latent(tmp_path, family), max_tokens=130)
    run.feed(ids[:length])
    kept = torch.rand(length, generator=torch.Generator().manual_seed(1)) < 0.4
    kept[3] = True
    run.controller.retain([Keep(0, None, (kept,))])
    assert run.cache.lens(0, 0) == (int(kept.sum()),)
    expanded.clear()
    purpose = Purpose.DECODE if size == 1 else Purpose.PREFILL
    stop = length + (5 if size == 1 else size)
    found = [run.feed(ids[i : i + size], purpose) for i in range(length, stop, size)]
    mask = torch.ones(stop, stop, dtype=torch.bool).tril()
    mask[length:, :length] &= kept
    expected = expected_logits(family, ids[:stop], mask)[length:]
    assert worst(torch.cat(found), expected) < TOLERANCE
    dense = expected_logits(family, ids[:stop])[length:]
    assert worst(dense, expected) > 100 * TOLERANCE, "the eviction must change something"
    assert any(expanded) == (size == 60)


@torch.inference_mode()
def greedy(family: str, ids: list[int], count: int, **config: Any) -> list[int]:
    model, text = latent_model(family, **config), list(ids)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_end_as_undisturbed(family: str, tmp_path: Path) -> None:
    config = {"vocab_size": ENGINE_VOCAB, "bos_token_id": BOS, "eos_token_id": EOS}
    folder = save_latent(tmp_path, family, **config)
    make_tokenizer().save_pretrained(folder)
    rng, new = random.Random(5), 24
    prompts = [[rng.randrange(3, ENGINE_VOCAB) for _ in range(n)] for n in (45, 20, 18, 22)]
    expected = [greedy(family, ids, new, **config) for ids in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for options in (
        {"reserve_output_tokens": 0, "num_gpu_blocks_override": 5},
        {"kv_cache_memory_bytes": 8 << 20},
        {"kv_cache_memory_bytes": 8 << 20, "deterministic": True},
    ):
        with LLM(str(folder), max_model_len=128, max_num_seqs=4, quiet=True, **options) as llm:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            preempted = llm.get_metrics()["num_preemptions"]
        assert (preempted > 0) == ("num_gpu_blocks_override" in options)
        assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_layers_are_left_alone(family: str, tmp_path: Path) -> None:
    """A checkpoint's layer behind the last one drafts tokens; it is not part of the model."""
    folder, ids = save_latent(tmp_path, family), prompt(12)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, file, {"format": "pt"})
    assert worst(paged_logits(folder, ids, (12,)), expected_logits(family, ids)) < TOLERANCE
