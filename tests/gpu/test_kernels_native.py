"""Kernels against their twins on a CUDA device, compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: kernels run natively here", allow_module_level=True)

from kernel_checks import (
    Shape,
    check_attention,
    check_compact,
    check_copy_pages,
    check_fused,
    check_pages,
    check_slots,
    check_store,
    check_top_pages,
    check_top_tokens,
    check_window_scores,
    seeded_and_poisoned,
)

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [
    Shape(heads=4, group=8, dim=128, page=16, layout="head"),
    Shape(heads=4, group=8, dim=128, page=16, layout="shared"),
    Shape(heads=4, group=4, dim=128, page=1, layout="head"),
    Shape(heads=2, group=7, dim=64, page=32, layout="shared"),
    Shape(heads=8, group=1, dim=64, page=16, layout="picked"),
    Shape(heads=3, group=3, dim=64, page=16, layout="head"),
]
DTYPES = [BF16, F32]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with seeded_and_poisoned(int(torch.seed() % 2**31)):
        yield


def _ragged(shape: Shape, spans: int, longest: int) -> list[list[int]]:
    """Random lengths per row, some of them 0, 1, and whole tiles."""
    groups = 1 if shape.layout == "shared" else shape.heads
    lens = torch.randint(0, longest + 1, (spans, groups)).tolist()
    lens[0][0], lens[-1][-1] = longest, 0
    if spans > 3:
        lens[1][0], lens[2][0] = 1, 64
    return lens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_decode(shape: Shape, dtype: torch.dtype, window: int | None) -> None:
    check_attention(shape, [1] * 9, [_ragged(shape, 9, 5000)], dtype, "cuda", window)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_prefill_beside_decode(shape: Shape, dtype: torch.dtype, window: int | None) -> None:
    queries = [1, 1, 300, 17, 1024]
    lens = _ragged(shape, 5, 3000)
    lens[2:] = [[max(n, q) for n in row] for row, q in zip(lens[2:], queries[2:], strict=True)]
    check_attention(shape, queries, [lens], dtype, "cuda", window)


@pytest.mark.parametrize("chunk", [2048, 8192])
@pytest.mark.parametrize("context", [8192, 32768])
def test_prefill_of_long_contexts(chunk: int, context: int) -> None:
    shape = Shape(heads=2, group=4, dim=128, page=16, layout="head")
    check_attention(shape, [chunk], [[[context, context - 16 * 7]]], BF16, "cuda")


@pytest.mark.parametrize("window", [None, 100])
def test_segments(window: int | None) -> None:
    shape = SHAPES[0]
    old, new = _ragged(shape, 4, 2000), [[5] * 4, [9] * 4, [300] * 4, [64] * 4]
    check_attention(shape, [1, 1, 300, 64], [old, new], BF16, "cuda", window)


def test_latent_values_are_a_prefix_of_the_keys() -> None:
    shape = Shape(heads=1, group=16, dim=192, value_dim=128, layout="head")
    check_attention(shape, [1, 70], [[[3300], [400]]], BF16, "cuda", latent=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_256_channels(dtype: torch.dtype) -> None:
    shape = Shape(heads=2, group=2, dim=256, page=16, layout="head")
    check_attention(shape, [1, 200], [[[900, 33], [700, 200]]], dtype, "cuda")


@pytest.mark.parametrize("shape", [*SHAPES, Shape(dim=1)])
def test_storage(shape: Shape) -> None:
    for dtype in DTYPES:
        check_store(shape, 333, dtype, "cuda")
        check_store(shape, 3000, dtype, "cuda")
        check_copy_pages(shape, dtype, "cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", [0.1, 0.9])
def test_compact(shape: Shape, keep: float) -> None:
    for dtype in DTYPES:
        check_compact(shape, [3000, 0, 1, 777, 2048], keep, dtype, "cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_window_scores(shape: Shape, reduce: str) -> None:
    lens = torch.randint(100, 5000, (1 if shape.layout == "shared" else shape.heads,)).tolist()
    for dtype in DTYPES:
        check_window_scores(shape, lens, 32, reduce, dtype, "cuda")


@pytest.mark.parametrize("shape", SHAPES)
def test_page_summaries(shape: Shape) -> None:
    for dtype in DTYPES:
        check_pages(shape, 5, 100, dtype, "cuda")


@pytest.mark.parametrize("shape", [*SHAPES, Shape(dim=5, group=17), Shape(dim=576, heads=1)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_slots(shape: Shape, dtype: torch.dtype) -> None:
    check_slots(shape, _ragged(shape, 9, 5000), dtype, "cuda")
    check_slots(shape, _ragged(shape, 3, 20_000), dtype, "cuda", softcap=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 300])
def test_what_stands_between_matrix_products(tokens: int, dtype: torch.dtype) -> None:
    check_fused(tokens, dtype, "cuda")


@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (3, 3), (1, 1)])
@pytest.mark.parametrize("columns", [5, 64, 2048, 5000, 8193, 40_000, 140_000])
def test_top_pages(heads: int, groups: int, columns: int) -> None:
    check_top_pages(heads, groups, columns, "cuda")


@pytest.mark.parametrize("columns", [2048, 9000, 32_768, 131_072, 1 << 20])
def test_top_tokens(columns: int) -> None:
    check_top_tokens(columns, "cuda")
