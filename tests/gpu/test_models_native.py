"""Shapes of well-known models with random weights on a CUDA device, at 32k prompts."""

from __future__ import annotations

import time

import pytest
import torch

from sparseengine import LLM, SamplingParams, SparseParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPT, NEW = 32_768, 16
SPARSE = {
    "full": SparseParams("full"),
    "snapkv": SparseParams("snapkv", budget=2048),
    "keydiff": SparseParams("keydiff", budget=2048),
    "quest": SparseParams("quest", budget=2048),
}
LOAD_LIMIT_S = 15.0  # for the largest of these shapes, 30 billion parameters


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "glm-4.7-flash", "gemma-3-27b"])
def test_32k_prompts_dense_and_sparse_in_one_batch(shape: str) -> None:
    start = time.perf_counter()
    with LLM(
        "",
        hf_config=shape,
        load_format="dummy",
        device="cuda",
        enable_methods=tuple(SPARSE),
        max_model_len=PROMPT + 256,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        quiet=True,
    ) as llm:
        torch.cuda.synchronize()
        loaded = time.perf_counter() - start
        assert {r.selected for r in llm.resolved.routes} == {"triton"}
        cache = llm.engine.scheduler.cache
        generator = torch.Generator().manual_seed(0)
        asked = torch.randint(3, 100_000, (len(SPARSE), PROMPT), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(asked, sampling, list(SPARSE.values()), use_tqdm=False)
        ran = time.perf_counter() - start
        # logits that are not finite end a request with finish_reason "error"
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * len(SPARSE)
        assert all(len(o.outputs[0].token_ids) == NEW for o in outputs)
        assert cache.free_pages() == cache.total_pages(), "pages leaked"
        cache.check()
    print(f"\n{shape}: loaded in {loaded:.1f} s, {len(SPARSE)} x {PROMPT} + {NEW}: {ran:.1f} s")
    assert loaded < LOAD_LIMIT_S
