"""Latent attention on a CUDA device: kernels against their twins at real sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: kernels run natively here", allow_module_level=True)

from kernel_checks import (
    Shape,
    assert_close,
    check_attention,
    check_compact,
    check_pages,
    check_store,
    check_window_scores,
    relative_error,
    seeded_and_poisoned,
)

from sparseengine import ops
from sparseengine.ops import dense, reference
from sparseengine.ops.triton import latent as triton_latent

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def latent(heads: int, page: int = 16, dim: int = 576, value_dim: int = 512) -> Shape:
    return Shape(layout="head", heads=1, group=heads, dim=dim, value_dim=value_dim, page=page)


# Devices with warpgroup matrix instructions have a decode kernel of their own for 16-bit rows.
KERNELS = ["plain", "warpgroup"]
SHAPES = [latent(20), latent(16), latent(128), latent(20, page=1), latent(5, 4, 40, 24)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with seeded_and_poisoned(int(torch.seed() % 2**31)):
        yield


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(triton_latent, "_warpgroup_kernel", lambda device: None)
    elif triton_latent._warpgroup_kernel(torch.device("cuda")) is None:
        assert torch.cuda.get_device_capability()[0] != 9, "no warpgroup kernel on this device"
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_decode(kernel: str, shape: Shape, dtype: torch.dtype) -> None:
    if kernel == "warpgroup" and (dtype == F32 or shape.dim != 576):
        return  # served by the plain kernel, as the other parameter shows
    lens = [
        [5000],
        [0],
        [0],
        [1],
        [64],
        [2049],
        *[[n] for n in torch.randint(1, 3000, (9,)).tolist()],
        [0],
    ]
    check_attention(shape, [1] * len(lens), [lens], dtype, "cuda", latent=True)
    check_attention(shape, [1, 1], [[[200], [0]]], dtype, "cuda", latent=True)  # one split
    check_attention(shape, [1] * 600, [[[30]] * 600], dtype, "cuda", latent=True)
    check_attention(shape, [1] * 3, [[[0]] * 3], dtype, "cuda", latent=True)


def test_decode_of_more_spans_than_are_summed_at_a_time() -> None:
    lens = [[70], [0], [30]] * 500
    check_attention(SHAPES[0], [1] * len(lens), [lens], BF16, "cuda", latent=True)


def test_which_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = triton_latent._warpgroup_kernel(torch.device("cuda"))
    if found is None:
        return
    served: list[torch.dtype] = []
    decode = found.latent_decode
    monkeypatch.setattr(
        found, "latent_decode", lambda q, *rest: (served.append(q.dtype), decode(q, *rest))
    )
    for dtype in (BF16, F16, F32):
        check_attention(SHAPES[0], [1, 1], [[[90], [7]]], dtype, "cuda", latent=True)
    assert set(served) == {BF16, F16}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_absorbed_prefill_beside_decode(shape: Shape, dtype: torch.dtype) -> None:
    lens = [[900], [1], [3000], [17], [260]]
    check_attention(shape, [1, 1, 100, 17, 3], [lens], dtype, "cuda", latent=True)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_segments(shape: Shape) -> None:
    old, new = [[2000], [0], [700], [64]], [[5], [9], [300], [64]]
    check_attention(shape, [1, 1, 100, 64], [old, new], BF16, "cuda", latent=True)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_soft_caps(dtype: torch.dtype) -> None:
    check_attention(SHAPES[0], [1, 40], [[[900], [70]]], dtype, "cuda", latent=True, softcap=0.5)
    check_attention(SHAPES[0], [1, 1], [[[900], [70]]], dtype, "cuda", latent=True, softcap=0.5)
    shape = Shape(heads=2, group=4, dim=128)
    lens = [[900, 40], [70, 300]]
    check_attention(shape, [1, 40], [lens], dtype, "cuda", softcap=0.5)
    check_window_scores(shape, [900, 333], 32, "sum", dtype, "cuda", softcap=0.5)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_ops_of_wide_rows(dtype: torch.dtype) -> None:
    shape = latent(20)
    for reduce in ("sum", "max"):
        check_window_scores(shape, [5000], 32, reduce, dtype, "cuda")
    check_pages(shape, 5, 100, dtype, "cuda")
    check_store(shape, 3000, dtype, "cuda")
    check_compact(shape, [3000, 0, 1, 777], 0.4, dtype, "cuda")


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "dim", "value_dim"),
    [(300, 300, 20, 256, 256), (64, 4000, 20, 256, 256), (1000, 3000, 16, 192, 128)],
)
@pytest.mark.parametrize("cudnn", [False, True])
def test_dense_attention(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    queries: int,
    keys: int,
    heads: int,
    dim: int,
    value_dim: int,
    cudnn: bool,
) -> None:
    monkeypatch.setattr(dense, "_CUDNN_OPERATIONS", 0.0 if cudnn else float("inf"))
    made = {"device": "cuda", "dtype": dtype}
    q, k = torch.randn(queries, heads, dim, **made), torch.randn(keys, heads, dim, **made)
    v = torch.randn(keys, heads, value_dim, **made)
    want = reference.dense_attention(q.float(), k.float(), v.float(), dim**-0.5)
    got = ops.dense_attention(q, k, v, dim**-0.5)
    assert got.dtype == dtype
    assert_close(got, want, dtype)
    few = ops.dense_attention(q[-5:], k, v, dim**-0.5)
    assert relative_error(few, want[-5:]) < 1e-2
