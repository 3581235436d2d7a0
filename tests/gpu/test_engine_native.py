"""The engine on a CUDA device: Triton routes against the reference, and full-size shapes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from fixtures.engines import VOCAB, save_checkpoint
from sparseengine import LLM, SamplingParams, SparseParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPARSE = [
    SparseParams(),
    SparseParams("snapkv", budget=64),
    SparseParams("snapkv", ratio=0.5, record=True),
    SparseParams("adakv", budget=64),
    SparseParams("quest", budget=64),
    SparseParams("streaming_llm", budget=96),
    SparseParams("keydiff", budget=64),
]
METHODS = ("full", "snapkv", "adakv", "quest", "streaming_llm", "keydiff")


def prompts(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_triton_gives_the_tokens_of_the_reference_backend(tmp_path: Path, family: str) -> None:
    # float32 on both sides: the two routes differ by rounding in the last bits only
    folder = save_checkpoint(tmp_path, family, head_dim=32)
    asked = prompts([257, 300, 33, 700, 411, 520, 190], VOCAB)
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = {}
    for backend in ("triton", "reference"):
        with LLM(
            str(folder),
            device="cuda",
            dtype="float32",
            attention_backend=backend,
            enable_methods=METHODS,
            kv_cache_memory_bytes=1 << 28,
            max_num_batched_tokens=256,
            quiet=True,
        ) as llm:
            routes = {r.selected for r in llm.resolved.routes}
            assert routes == {backend}
            outputs = llm.generate(asked, sampling, SPARSE, use_tqdm=False)
            found[backend] = [o.outputs[0].token_ids for o in outputs]
    assert found["triton"] == found["reference"]


@pytest.mark.parametrize("method", ["full", "snapkv", "quest"])
def test_a_batch_of_long_prompts_at_full_size(method: str) -> None:
    """Dummy Qwen3-8B, 16 requests of 8,192 tokens: every logit finite, memory given back."""
    sparse = SparseParams(method) if method == "full" else SparseParams(method, budget=2048)
    with LLM(
        "",
        hf_config="qwen3-8b",
        load_format="dummy",
        device="cuda",
        enable_methods=(method,),
        max_model_len=8448,
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        quiet=True,
    ) as llm:
        asked = prompts([8192] * 16, 150_000)
        sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate(asked, sampling, sparse, use_tqdm=False)
        # NaN logits end a request with finish_reason "error"
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 16
        assert all(len(o.outputs[0].token_ids) == 16 for o in outputs)
        cache = llm.engine.scheduler.cache
        assert cache.free_pages() == cache.total_pages()


@pytest.mark.parametrize("shape", ["qwen3-8b", "glm-4.7-flash"])
def test_closing_gives_the_memory_back(shape: str) -> None:
    """At once, and to the device: another engine, or another process, can have it."""

    def free_after_a_run() -> int:
        with LLM(
            "",
            hf_config=shape,
            hf_overrides={"num_hidden_layers": 2},
            load_format="dummy",
            device="cuda",
            kv_cache_memory_bytes=8 << 30,
            max_model_len=4096,
            max_num_seqs=16,
            quiet=True,
        ) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            llm.generate(prompts([2048] * 4, 100_000), sampling, use_tqdm=False)
        return torch.cuda.mem_get_info()[0]

    gc.disable()
    try:
        first, second = free_after_a_run(), free_after_a_run()
    finally:
        gc.enable()
    assert first - second < 1 << 30
