"""Kernels against their twins on the CPU; run by tests/unit/test_kernels.py, which sets
TRITON_INTERPRET=1 in a process of its own: Triton reads it when it is first imported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from kernel_checks import (
    Shape,
    assert_close,
    check_attention,
    check_compact,
    check_copy_pages,
    check_fused,
    check_gathered,
    check_masked,
    check_pages,
    check_parts,
    check_slots,
    check_store,
    check_top_pages,
    check_top_tokens,
    check_window_scores,
    rows_held_in_parts,
    seeded_and_poisoned,
)
from torch import Tensor

from sparseengine.attention.gathered import GatheredBackend
from sparseengine.core.specs import LayerSpec
from sparseengine.ops import triton as kernels
from sparseengine.ops.dense import _fused_flash
from sparseengine.ops.parts import Fetch, Parts, attend_parts, cut_row

F32, F16 = torch.float32, torch.float16  # the interpreter's dot misreads bfloat16
SHAPES = [
    Shape(layout="head", page=16),
    Shape(layout="shared", page=4, group=1, dim=24),
    Shape(layout="picked", page=1, group=3, heads=3),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with seeded_and_poisoned(7):
        yield


@pytest.mark.parametrize("shape", [*SHAPES, Shape(dim=1)])
def test_store(shape: Shape) -> None:
    check_store(shape, 13, F32, "cpu")


def test_store_of_many_tokens() -> None:
    check_store(Shape(layout="head", dim=4, heads=1), 2050, F32, "cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", [0.4, 1.0, 0.0])
def test_compact(shape: Shape, keep: float) -> None:
    check_compact(shape, [37, 0, 90], keep, F32, "cpu")


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_copy_pages(shape: Shape) -> None:
    check_copy_pages(shape, F32, "cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_window_scores(shape: Shape, reduce: str) -> None:
    lens = [150] if shape.layout == "shared" else [150, 70, 6][: shape.heads]
    check_window_scores(shape, lens, 8, reduce, F32, "cpu")


def test_window_scores_of_rows_shorter_than_the_window() -> None:
    check_window_scores(SHAPES[0], [3, 40], 8, "sum", F32, "cpu")


def test_window_scores_under_a_soft_cap() -> None:
    check_window_scores(SHAPES[0], [150, 70], 8, "sum", F32, "cpu", softcap=0.5)


class Gathered(GatheredBackend):
    """Small parts by torch's attention for CPUs."""

    def cut(self, num_q: int, length: int, layer: LayerSpec) -> Parts | None:
        return cut_row(num_q, length, 8, 32) if num_q > 4 else None

    def attend(self, q: Tensor, row: Parts, fetch: Fetch, layer: LayerSpec, out: Tensor) -> None:
        fused = partial(_fused_flash, scale=layer.softmax_scale)
        attend_parts(q, row, fetch, fused, kernels.merge_parts, out)


@pytest.mark.parametrize("layout", ["head", "shared", "picked"])
def test_gathered_chunks(layout: str) -> None:
    """Decodes, short chunks, long ones between them, and rows whose heads differ."""
    shape = Shape(layout=layout, page=4, value_dim=24)
    lens = [[30, 30], [90, 90], [7, 7], [41, 41], [9, 9], [50, 49]]
    long_rows = [1, 3] if layout != "shared" else [1, 3, 5]
    lens = [row[:1] for row in lens] if layout == "shared" else lens
    check_gathered(shape, [1, 20, 3, 41, 2, 6], lens, F32, "cpu", Gathered(), long_rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_parts(shape: Shape) -> None:
    check_parts(shape, 70, F32, "cpu")


WIDE = Shape(layout="head", heads=1, group=5, dim=300, page=16)  # as wide as latent rows


def test_wide_heads() -> None:
    check_window_scores(WIDE, [150], 8, "sum", F32, "cpu")
    check_pages(WIDE, 2, 5, F32, "cpu")
    check_store(WIDE, 13, F32, "cpu")
    check_compact(WIDE, [37, 90], 0.4, F32, "cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_page_summaries(shape: Shape) -> None:
    check_pages(shape, 2, 5, F32, "cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_slots(shape: Shape, dtype: torch.dtype) -> None:
    lens = _lens(shape, [[600, 20, 1], [0, 0, 0], [65, 0, 64]])
    check_slots(shape, lens, dtype, "cpu")


def test_slots_of_wide_heads_and_under_a_soft_cap() -> None:
    check_slots(WIDE, [[70], [1]], F32, "cpu")
    check_slots(Shape(dim=5, group=17), [[70, 3], [9, 130]], F32, "cpu", softcap=0.5)


def _lens(shape: Shape, lens: list[list[int]]) -> list[list[int]]:
    return [row[:1] if shape.layout == "shared" else row[: shape.heads] for row in lens]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 30])
def test_decode(shape: Shape, window: int | None) -> None:
    lens = _lens(shape, [[600, 20, 1], [0, 0, 0], [65, 0, 64]])
    check_attention(shape, [1, 1, 1], [lens], F32, "cpu", window)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 30])
def test_prefill_beside_decode(shape: Shape, window: int | None) -> None:
    lens = _lens(shape, [[70, 20, 1], [40, 40, 40], [150, 90, 23], [5, 5, 5]])
    check_attention(shape, [1, 40, 23, 5], [lens], F32, "cpu", window)


@pytest.mark.parametrize("window", [None, 30])
def test_segments(window: int | None) -> None:
    shape = SHAPES[0]
    old, new = [[40, 3], [64, 0], [0, 7]], [[5, 5], [9, 9], [30, 30]]
    check_attention(shape, [1, 9, 30], [old, new], F32, "cpu", window)


LATENTS = [
    Shape(layout="head", heads=1, group=5, dim=24, value_dim=16),
    Shape(layout="head", heads=1, group=20, dim=40, value_dim=32, page=1),
    Shape(layout="shared", heads=1, group=70, dim=24, value_dim=20, page=4),
]


@pytest.mark.parametrize("shape", LATENTS)
def test_latent_decode(shape: Shape) -> None:
    check_attention(shape, [1, 1, 1], [[[600], [0], [65]]], F32, "cpu", latent=True)
    check_attention(shape, [1], [[[30]]], F32, "cpu", latent=True)


@pytest.mark.parametrize("shape", LATENTS)
def test_latent_prefill_beside_decode(shape: Shape) -> None:
    check_attention(shape, [1, 7, 1, 40], [[[33], [300], [9], [40]]], F32, "cpu", latent=True)


@pytest.mark.parametrize("shape", LATENTS[:2])
def test_latent_segments(shape: Shape) -> None:
    old, new = [[40], [64], [0], [3]], [[5], [9], [30], [0]]
    check_attention(shape, [1, 9, 30, 2], [old, new], F32, "cpu", latent=True)


@pytest.mark.parametrize(
    ("block", "heads", "tiles", "held"), [((1, 16, 4), 3, 1, 16), ((4, 32, 2), 20, 2, 16)]
)
def test_merging_parts_of_latent_decode(
    block: tuple[int, int, int], heads: int, tiles: int, held: int
) -> None:
    """Items of 0, 1, 2 and 7 parts, which lie one after the other among unwritten memory."""
    wgmma = pytest.importorskip("sparseengine.ops.triton.latent_wgmma", reason="needs Gluon")
    counts, channels = [2, 0, 7, 1], 32
    number = 3 + sum(counts) * tiles
    part, lse = torch.randn(number, held, channels), torch.randn(number, held) * 9
    lens = torch.tensor(counts, dtype=torch.int32)
    meta = torch.randint(0, 9, (len(counts) * tiles, 2), dtype=torch.int32)
    out = torch.full((len(counts), heads, channels), 7.0)
    want, first = out.clone(), 3
    for span, count in enumerate(counts):
        for tile in range(tiles):
            some, mine = (
                slice(tile * held, min((tile + 1) * held, heads)),
                slice(first, first + count),
            )
            real = some.stop - some.start
            if count:
                meta[span * tiles + tile] = torch.tensor([first, first + count])
            if count != 1:  # of one part, the output is there already
                share = (lse[mine, :real] * math.log(2)).softmax(0)[..., None]
                want[span, some] = (share * part[mine, :real]).sum(0)
            part[mine, real:] = float("nan")
            first += count
    wgmma._merge_parts[(len(counts) * -(-heads // block[0]), channels // block[1])](
        part, lse, meta, lens, out, lens.stride(0), *out.stride()[:2], HEADS=heads, TILES=tiles,
        BLOCK_M=held, VDIM=channels, BLOCK_H=block[0], BLOCK_V=block[1], BLOCK_K=block[2],
    )  # fmt: skip
    assert_close(out, want, F32)


@pytest.mark.parametrize("latent", [False, True])
def test_soft_caps(latent: bool) -> None:
    shape = LATENTS[0] if latent else SHAPES[0]
    lens = [[90] * (1 if latent else 2), [40] * (1 if latent else 2)]
    check_attention(shape, [1, 20], [lens], F32, "cpu", latent=latent, softcap=0.5)


def test_values_narrower_than_keys() -> None:
    check_attention(Shape(dim=32, value_dim=16), [1, 20], [[[90, 8], [20, 35]]], F32, "cpu")


def test_half_precision() -> None:
    check_attention(Shape(dim=64, group=8), [1, 20], [[[90, 8], [20, 35]]], F16, "cpu")


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_what_stands_between_matrix_products(tokens: int, dtype: torch.dtype) -> None:
    check_fused(tokens, dtype, "cpu")


@pytest.mark.parametrize(("heads", "groups"), [(3, 1), (3, 3), (1, 1)])
@pytest.mark.parametrize("columns", [5, 37])
def test_top_pages(heads: int, groups: int, columns: int) -> None:
    check_top_pages(heads, groups, columns, "cpu")


@pytest.mark.parametrize(
    ("shape", "lens"),
    [
        (Shape(layout="head", page=16, group=2), [[5, 5], [70, 70], [90, 61], [40, 40]]),
        (Shape(layout="shared", page=4, group=1, dim=24), [[5], [70], [90], [40]]),
        (Shape(layout="picked", page=1, group=3), [[5, 9], [70, 70], [90, 90], [40, 44]]),
    ],
)
def test_masked_prefill(shape: Shape, lens: list[list[int]]) -> None:
    queries = [1, 40, 37, 3]
    check_masked(shape, queries, lens, 16, {1: 0, 2: 5}, F32, "cpu")
    check_masked(shape, queries, lens, 32, {1: 30, 2: 0, 3: 11}, F16, "cpu", softcap=2.0)


def test_masked_chunks_beside_gathered_ones() -> None:
    shape = Shape(layout="shared", page=4)
    lens, offsets = [[30], [90], [7], [41], [9], [50]], {3: 5, 4: 0}
    check_masked(shape, [1, 20, 3, 41, 2, 6], lens, 16, offsets, F32, "cpu", backend=Gathered())


@pytest.mark.parametrize("most", [1 << 15, 16], ids=["cut", "read-again"])
def test_top_pages_of_rows_that_no_program_holds(most: int) -> None:
    with rows_held_in_parts(16, most):
        check_top_pages(1, 1, 70, "cpu")
        check_top_tokens(70, "cpu")
