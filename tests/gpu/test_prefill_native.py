"""The block-sparse prefill kernel and whole engines with sparse prefill on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: kernels run natively here", allow_module_level=True)

from kernel_checks import Shape, check_masked, seeded_and_poisoned

from sparseengine.llm import LLM
from sparseengine.methods.prefill.base import products

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [
    Shape(heads=2, group=4, dim=128, page=16, layout="head"),
    Shape(heads=2, group=4, dim=128, page=16, layout="shared"),
    Shape(heads=2, group=7, dim=64, page=32, layout="shared"),
    Shape(heads=3, group=1, dim=64, page=1, layout="picked"),
    Shape(heads=1, group=2, dim=256, page=16, layout="head"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with seeded_and_poisoned(int(torch.seed() % 2**31)):
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("block", [128, 64, 16])
def test_masked_prefill(shape: Shape, dtype: torch.dtype, block: int) -> None:
    groups = 1 if shape.layout == "shared" else shape.heads
    lens = [[900] * groups, [2048] * groups, [1500 - 37 * g for g in range(groups)], [700] * groups]
    offsets = {1: 0, 2: 13 % block, 3: block - 1}
    check_masked(shape, [1, 1024, 400, 129], lens, block, offsets, dtype, "cuda", keep=0.3)


def test_masked_prefill_with_a_soft_cap() -> None:
    check_masked(
        SHAPES[0], [300, 257], [[300] * 2, [900] * 2], 128, {1: 1}, BF16, "cuda", softcap=5.0
    )


def test_products_are_summed_in_fp32() -> None:
    queries = torch.randn(100, 1024, device="cuda", dtype=BF16)
    keys = torch.randn(300, 1024, device="cuda", dtype=BF16)
    got, want = products(queries, keys), queries.double() @ keys.double().T
    assert got.dtype == F32
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "config", "all_of_it"),
    [
        ("a_shape", {"sink": 128, "window": 512}, {"window": 1 << 20}),
        ("minference", {"vertical": 256, "slash": 256}, {"vertical": 1 << 20, "slash": 1 << 20}),
        ("xattention", {"threshold": 0.5}, {"threshold": 0.9999999}),
        ("flexprefill", {"gamma": 0.5, "min_budget": 256}, {"min_budget": 1 << 20}),
    ],
)
def test_engine(name: str, config: dict[str, float], all_of_it: dict[str, float]) -> None:
    """A pattern that reads everything gives dense tokens; one that does not still runs; decode
    graphs replay behind both."""
    options = {
        "model": "", "load_format": "dummy", "hf_config": "qwen3-8b",
        "hf_overrides": {"num_hidden_layers": 3, "vocab_size": 4096}, "max_model_len": 9000,
        "max_num_seqs": 4, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 2048,
        "quiet": True,
    }  # fmt: skip
    from sparseengine.core.params import SamplingParams, SparseParams

    prompt = [(7 * i * i + 3 * i) % 4000 for i in range(8500)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(**options) as llm:
        outputs = [
            llm.generate(prompt, sampling, sparse, use_tqdm=False)[0].outputs[0]
            for sparse in (
                SparseParams(),
                SparseParams(prefill=name, prefill_config=all_of_it, record=True),
                SparseParams(prefill=name, prefill_config=config, record=True),
            )
        ]
    assert outputs[1].sparse is not None
    assert outputs[1].sparse.prefill_density == 1.0
    assert outputs[1].token_ids[0] == outputs[0].token_ids[0]
    assert outputs[2].sparse is not None
    assert outputs[2].sparse.prefill_density is not None
    assert outputs[2].sparse.prefill_density < 1.0
    assert len(outputs[2].token_ids) == 8
