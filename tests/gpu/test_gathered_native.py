"""Long prompt chunks by cuDNN over gathered parts, on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: kernels run natively here", allow_module_level=True)

from kernel_checks import (
    Shape,
    check_gathered,
    check_parts,
    hosted,
    seeded_and_poisoned,
    spans_view,
)

from sparseengine.attention.caps import device_caps
from sparseengine.attention.gathered import CudnnBackend
from sparseengine.core.attention import AttentionNeed
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.ops import dense_attention, reference
from sparseengine.ops.dense import plan_row

LAYER = LayerSpec(kind=LayerKind.FULL, q_heads=32, kv_heads=8, head_dim=128, value_dim=128)
NEED = AttentionNeed(layer=LAYER, dtype=torch.bfloat16, page_size=16, per_head=True)
SHAPES = [
    Shape(heads=8, group=4, dim=128, page=16, layout="head"),
    Shape(heads=4, group=8, dim=128, page=16, layout="shared"),
    Shape(heads=4, group=4, dim=256, page=16, layout="head"),
    Shape(heads=8, group=8, dim=64, page=16, layout="picked"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    if not CudnnBackend().supports(NEED, device_caps("cuda")).ok:
        pytest.skip(CudnnBackend().supports(NEED, device_caps("cuda")).reason)
    with seeded_and_poisoned(int(torch.seed() % 2**31)):
        yield


def _rows(shape: Shape, lens: list[int]) -> list[list[int]]:
    return [[n] * (1 if shape.layout == "shared" else shape.heads) for n in lens]


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_any_lengths_beside_decodes(shape: Shape) -> None:
    """Aligned and shifted chunks, short prompts between them, a row whose heads differ."""
    queries = [1, 1, 4096, 37, 4000, 1000, 3999]
    lens = _rows(shape, [900, 70, 8192, 37, 11003, 1000, 9001])
    long_rows = [2, 4, 6]
    if shape.layout != "shared":
        lens[6][1] -= 5
        long_rows = [2, 4]
    check_gathered(shape, queries, lens, torch.bfloat16, "cuda", CudnnBackend(), long_rows)


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_parts(shape: Shape) -> None:
    check_parts(shape, 1003, torch.bfloat16, "cuda")


def test_scratch_is_what_start_up_counts() -> None:
    shape, backend = SHAPES[0], CudnnBackend()
    queries, length = [8172], 8172 + 32767
    view = hosted(
        spans_view(shape, queries, [_rows(shape, [length])], torch.bfloat16, "cuda"), queries
    )
    q = torch.randn(8172, 40, 128, device="cuda", dtype=torch.bfloat16)[:, :32]
    backend.run(q, view, LAYER, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = backend.run(q, view, LAYER, None)
    used = torch.cuda.max_memory_allocated() - before - out.nbytes
    counted = backend.scratch_bytes(LAYER, 8172, length, 2)
    assert 0.7 * counted < used <= counted * 1.02


@pytest.mark.parametrize(("num_q", "length"), [(4096, 9000), (5000, 5000), (8192, 24576)])
def test_plain_tensors(num_q: int, length: int) -> None:
    """20 heads of 256, as the expanded form of latent attention has them."""
    q = torch.randn(num_q, 20, 256, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(length, 20, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert plan_row(q, length, 256)[1], "cuDNN runs it"
    got, want = dense_attention(q, k, v, 0.07), reference.dense_attention(q, k, v, 0.07)
    assert (got.float() - want.float()).norm() < 1e-2 * want.float().norm()
