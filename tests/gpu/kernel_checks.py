"""Checks of the Triton kernels against their plain-torch twins, on any device.

`interpreted_kernels.py` runs them on the CPU under TRITON_INTERPRET=1 at tiny shapes (spawned by
tests/unit/test_kernels.py); `test_kernels_native.py` runs them on a CUDA device. Inputs are fresh
random draws, slots that hold no token are NaN, outputs are poisoned before the kernel runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sparseengine.attention.gathered import GatheredBackend
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.attention.triton import TritonBackend
from sparseengine.core.view import AttentionView, BlockMask, PackedTable
from sparseengine.ops import reference
from sparseengine.ops import triton as kernels
from sparseengine.ops.triton import select

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from attention_views import Rows, Shape, hosted, layer_of, spans_view
from block_masks import random_mask

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 3e-3}


@contextmanager
def seeded_and_poisoned(seed: int) -> Iterator[None]:
    """A fixed seed, and NaN in whatever `torch.empty` returns: unwritten outputs show."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all(), "unwritten or poisoned output"
    error = relative_error(got, want)
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e} in {dtype}"


def check_attention(
    shape: Shape,
    queries: list[int],
    lens: list[list[list[int]]],
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
    latent: bool = False,
    softcap: float = 0.0,
) -> None:
    view = spans_view(shape, queries, lens, dtype, device, window, latent)
    layer = replace(layer_of(shape, window, latent), softcap=softcap)
    q = torch.randn(sum(queries), layer.q_heads, shape.dim, device=device).to(dtype)
    want = ReferenceBackend().run(q.float(), view, layer, None)
    got = TritonBackend().run(q, view, layer, None)
    assert_close(got, want, dtype)
    again = TritonBackend().run(q, view, layer, None)
    assert torch.equal(got, again), "two runs of one view differ: a race"
    if max(queries) == 1:
        walked = TritonBackend().run(q, packed(view), layer, None)
        assert torch.equal(got, walked), "packed tables are read otherwise than padded ones"


def check_masked(
    shape: Shape,
    queries: list[int],
    lens: list[list[int]],
    block: int,
    offsets: dict[int, int],
    dtype: torch.dtype,
    device: str,
    keep: float = 0.4,
    softcap: float = 0.0,
    backend: TritonBackend | None = None,
) -> None:
    """Spans of a view, those of `offsets` with a random block mask, against the reference."""
    view = hosted(spans_view(shape, queries, [lens], dtype, device), queries)
    backend = backend or TritonBackend()
    layer = replace(layer_of(shape), softcap=softcap)

    def masks(keep: float) -> dict[int, BlockMask]:
        return {
            span: random_mask(
                queries[span], lens[span], layer.q_heads, block, offset, device, keep,
                alike=span % 2 == 1 and len(set(lens[span])) == 1,
            )
            for span, offset in offsets.items()
        }  # fmt: skip

    dense, view = view, view.masked(masks(keep))
    q = torch.randn(sum(queries), layer.q_heads, shape.dim, device=device).to(dtype)
    want = ReferenceBackend().run(q.float(), view, layer, None)
    assert_close(backend.run(q, view, layer, None), want, dtype)
    want = ReferenceBackend().run(q.float(), dense, layer, None)
    assert_close(backend.run(q, dense.masked(masks(1.0)), layer, None), want, dtype)


def check_gathered(
    shape: Shape,
    queries: list[int],
    lens: list[list[int]],
    dtype: torch.dtype,
    device: str,
    backend: GatheredBackend,
    long_rows: list[int],
) -> None:
    """Long rows in parts beside spans that the paged kernels take; `long_rows` are the former."""
    view = hosted(spans_view(shape, queries, [lens], dtype, device), queries)
    layer = layer_of(shape)
    assert list(backend._long_rows(view, layer)) == long_rows
    heads = layer.q_heads + layer.kv_heads
    q = torch.randn(sum(queries), heads, shape.dim, device=device).to(dtype)[:, : layer.q_heads]
    want = ReferenceBackend().run(q.float(), view, layer, None)
    got = backend.run(q, view, layer, None)
    assert_close(got, want, dtype)
    assert torch.equal(got, backend.run(q, view, layer, None)), "two runs of one view differ"


def check_parts(shape: Shape, length: int, dtype: torch.dtype, device: str) -> None:
    """Rows in order, up to and past a row's end, and merges of one to eight parts."""
    rows = Rows(shape, [[length] * (1 if shape.layout == "shared" else shape.heads)], dtype, device,
                [shape.dim, shape.dv])  # fmt: skip
    for first, num in ((0, length), (length // 3, length // 2), (length // 2, length)):
        outs = [
            [torch.empty(num, shape.heads, d, dtype=dtype, device=device)
             for d in (shape.dim, shape.dv)] for _ in range(2)
        ]  # fmt: skip
        kernels.gather_part(rows.pools, rows.table[0], length, first, outs[0])
        reference.gather_part(rows.pools, rows.table[0], length, first, outs[1])
        for got, want in zip(*outs, strict=True):
            assert torch.equal(got, want)
    heads = shape.heads * shape.group
    for parts in (1, 2, 8):
        like = {"device": device, "dtype": dtype}
        results = [torch.randn(length + 3, heads, shape.dv, **like)[2:-1] for _ in range(parts)]
        lses = [20 * torch.randn(heads, length + 3, device=device)[:, 2:-1] for _ in range(parts)]
        found = torch.empty(length, heads, shape.dv, **like), torch.empty_like(lses[0])
        kernels.merge_parts(results, lses, *found)
        wanted = torch.empty_like(found[0], dtype=torch.float32), torch.empty_like(lses[0])
        reference.merge_parts(results, lses, *wanted)
        assert_close(found[0], wanted[0], dtype)
        torch.testing.assert_close(found[1], wanted[1])
        kernels.merge_parts(results, lses, found[0].fill_(torch.nan), None)
        assert_close(found[0], wanted[0], dtype)


def packed(view: AttentionView) -> AttentionView:
    """The same view over packed tables."""
    segments = [replace(s, table=packed_table(s.dense_table())) for s in view.segments]
    return replace(view, segments=tuple(segments))


def packed_table(table: Tensor) -> PackedTable:
    """The rows of a table anywhere in one arena, each span with a width of its own."""
    spans, groups, columns = table.shape
    widths = columns + torch.randint(0, 5, (spans,))
    rows = groups + 2  # two rows of another layer come first
    sizes = rows * widths
    order = torch.randperm(spans)
    base = torch.zeros(spans, dtype=torch.int64)
    base[order] = 3 + sizes[order].cumsum(0) - sizes[order]
    arena = torch.randint(0, 2, (3 + int(sizes.sum()),), dtype=torch.int32)
    for s in range(spans):
        mine = arena[base[s] : base[s] + sizes[s]].view(rows, int(widths[s]))
        mine[2:, :columns] = table[s].cpu()
    place = table.device
    tables = PackedTable(
        arena.to(place), base.to(place), widths.to(place), row=2, groups=groups, columns=columns
    )
    assert torch.equal(tables.dense(), table)
    return tables


def check_store(shape: Shape, tokens: int, dtype: torch.dtype, device: str) -> None:
    groups = 1 if shape.layout == "shared" else shape.heads
    inner = 1 if shape.layout == "head" else shape.heads
    num_pages = groups * (tokens // shape.page + 2)
    slots = torch.stack(
        [torch.randperm(num_pages // groups * shape.page)[:tokens] for _ in range(groups)]
    )
    if inner == 1:
        slots += (torch.arange(groups) * (num_pages // groups) * shape.page)[:, None]
    slots[:, ::5] = -1
    slots = slots.to(device)
    dims = [shape.dim, shape.dv]
    values = [torch.randn(tokens, shape.heads, d, device=device).to(dtype) for d in dims]
    pools = [torch.randn(num_pages, inner, shape.page, d, device=device).to(dtype) for d in dims]
    twins = [p.clone() for p in pools]
    kernels.store(pools, values, slots)
    reference.store(twins, values, slots)
    for pool, twin in zip(pools, twins, strict=True):
        assert torch.equal(pool, twin)


def check_compact(
    shape: Shape, lens: list[int], keep: float, dtype: torch.dtype, device: str
) -> None:
    """Pools of several widths and dtypes move together; kept slots equal the twin's bit for bit."""
    inner = 1 if shape.layout == "head" else shape.heads
    width, page = max(-(-n // shape.page) for n in lens), shape.page
    num_pages = len(lens) * width + 2
    table = (
        torch.randperm(num_pages)[: len(lens) * width].reshape(len(lens), width).int().to(device)
    )
    mask = torch.rand(len(lens), max(lens)) < keep
    mask &= torch.arange(max(lens)) < torch.tensor(lens)[:, None]
    mask = mask.to(device)
    head = (num_pages, inner, page)
    pools = [
        torch.randn(*head, shape.dim, device=device).to(dtype),
        torch.randn(*head, shape.dv, device=device).to(dtype),
        torch.randn(*head, device=device),
        torch.randint(0, 1000, (*head, 2, 3), device=device),
    ]
    twins = [p.clone() for p in pools]
    kernels.compact(pools, table, mask)
    reference.compact(twins, table, mask)
    kept = mask.sum(1)
    for row in range(len(lens)):
        at = torch.arange(int(kept[row]), device=device)
        for pool, twin in zip(pools, twins, strict=True):
            pages = table[row, at // page].long()
            assert torch.equal(pool[pages, :, at % page], twin[pages, :, at % page])


def check_copy_pages(shape: Shape, dtype: torch.dtype, device: str) -> None:
    pools = [torch.randn(40, shape.heads, shape.page, d, device=device).to(dtype) for d in (8, 72)]
    pools.append(torch.randint(0, 99, (40, 3), device=device))
    twins = [p.clone() for p in pools]
    ids = torch.randperm(40, device=device)
    kernels.copy_pages(pools, ids[:11], ids[11:22])
    reference.copy_pages(twins, ids[:11], ids[11:22])
    for pool, twin in zip(pools, twins, strict=True):
        assert torch.equal(pool, twin)


def check_window_scores(
    shape: Shape, lens: list[int], window: int, reduce: str, dtype: torch.dtype, device: str,
    softcap: float = 0.0,
) -> None:  # fmt: skip
    rows = Rows(shape, [lens], dtype, device, [shape.dim])
    q = torch.randn(window, shape.heads * shape.group, shape.dim, device=device).to(dtype)
    args = (rows.pools[0], rows.table[0], rows.lens[0], max(lens) + 5, shape.dim**-0.5, reduce)
    args += (softcap,)
    got, want = kernels.window_scores(q, *args), reference.window_scores(q, *args)
    assert_close(got, want, torch.float32 if dtype == torch.float32 else torch.float16)
    assert torch.equal(got, kernels.window_scores(q, *args)), "two runs differ: a race"
    past = torch.arange(max(lens) + 5, device=device) >= rows.lens[0].max()
    assert (got[:, past] == 0).all()


def check_pages(shape: Shape, spans: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Bounds are exact; scores are close, and never below the largest q.k of the page."""
    groups = 1 if shape.layout == "shared" else shape.heads
    inner = 1 if shape.layout == "head" else shape.heads
    num_pages = spans * groups * width + 1
    k = torch.randn(num_pages, inner, shape.page, shape.dim, device=device).to(dtype)
    pages = torch.randperm(num_pages, device=device)
    low = torch.full((num_pages, inner, shape.dim), float("nan"), dtype=dtype, device=device)
    high = low.clone()
    kernels.page_bounds(k, pages, low, high)
    assert torch.equal(low, k.amin(2))
    assert torch.equal(high, k.amax(2))
    table = pages[1:].reshape(spans, groups, width).int()
    q = torch.randn(spans, shape.heads * shape.group, shape.dim, device=device).to(dtype)
    got = kernels.page_scores(q, low, high, table, shape.group)
    assert_close(got, reference.page_scores(q, low, high, table, shape.group), dtype)


def check_slots(
    shape: Shape, lens: list[list[int]], dtype: torch.dtype, device: str, softcap: float = 0.0
) -> None:
    """Scores and gathered mass of one query per row; what lies past a row's end stays as it is."""
    rows = Rows(shape, lens, dtype, device, [shape.dim])
    (pool,) = rows.pools
    q = torch.randn(len(lens), shape.heads * shape.group, shape.dim, device=device).to(dtype)
    precision = torch.float32 if dtype == torch.float32 else torch.float16
    slot = torch.arange(rows.table.shape[2] * shape.page, device=device)
    live = (slot < rows.lens[..., None]).expand(-1, shape.heads, -1)
    args, tables = (pool, rows.table, rows.lens), packed_table(rows.table)
    for limits in ({}, {"scale": 0.3}, {"scale": 0.3, "normalise": True}):
        got = kernels.slot_scores(q, *args, **limits)
        want = reference.slot_scores(q, *args, **limits)
        assert got.shape == want.shape
        assert_close(got[live], want[live], precision)
        walked = kernels.slot_scores(q, pool, tables, rows.lens, **limits)
        assert torch.equal(walked[live], got[live]), "packed tables are read otherwise"
    mass = torch.rand(pool.shape[:3], device=device)
    seen = torch.randint(0, 9, pool.shape[:3], device=device).float()
    empty = pool[..., 0].isnan()
    how = {"scale": shape.dim**-0.5, "left": 0.75, "softcap": softcap}
    found, twins = [(mass.clone(), seen.clone()) for _ in range(2)], (mass.clone(), seen.clone())
    reference.add_mass(q, *args, *twins, **how)
    kernels.add_mass(q, *args, *found[0], **how)
    kernels.add_mass(q, pool, tables, rows.lens, *found[1], **how)
    for pair in found:
        assert_close(pair[0], twins[0], precision)
        assert torch.equal(pair[1], twins[1])
        assert torch.equal(pair[0][empty], mass[empty]), "slots of no row have changed"
    assert torch.equal(found[0][0], found[1][0])
    kernels.add_mass(q, *args, mass, **{**how, "left": 0.0})
    total = mass[~empty].sum()
    assert_close(total, (rows.lens > 0).expand(-1, shape.heads).sum() * shape.group, precision)


def check_fused(tokens: int, dtype: torch.dtype, device: str) -> None:
    """The kernels between matrix products, on strided inputs, partial rotation and odd sizes."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    wide = draw(tokens, 203)
    x, residual = wide[:, :96], draw(tokens, 96)
    for weight in (draw(96), draw(96).float()):
        assert_close(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
        want = reference.add_rms_norm(x, residual, weight, 1e-6)
        for found, twin in zip(kernels.add_rms_norm(x, residual, weight, 1e-6), want, strict=True):
            assert_close(found, twin, dtype)
    for activation in ("silu", "gelu_tanh"):
        both = draw(tokens, 2 * 1100)
        assert_close(kernels.gated(both, activation), reference.gated(both, activation), dtype)
    for interleaved in (False, True):
        turn = draw(tokens, 1, 7), draw(tokens, 1, 7)
        raw, weight = draw(tokens, 30)[:, :26], draw(12)
        args = (raw, weight, 1e-6, *turn, interleaved)
        assert_close(kernels.latent_rows(*args), reference.latent_rows(*args), dtype)
        x, found, twin = draw(tokens, 11, 20)[..., 6:], draw(tokens, 11, 40), draw(tokens, 11, 14)
        kernels.rotate_into(found[..., 5:19], x, *turn, interleaved)
        reference.rotate_into(twin, x, *turn, interleaved)
        assert_close(found[..., 5:19], twin, dtype)
        kernels.rotate_into(x, x, *turn, interleaved)  # in place
        assert_close(x, twin, dtype)
    for dim, half, heads in ((16, 8, 9), (24, 6, 5), (64, 32, 3)):
        qk = draw(tokens, heads * dim + 5)[:, : heads * dim].unflatten(1, (heads, dim))
        turn = draw(tokens, 1, half), draw(tokens, 1, half)
        for weights in ((None, None), (draw(dim), draw(dim).float())):
            args = (qk, *turn, heads - 1, *weights, 1e-6)
            assert_close(kernels.norm_rotate(*args), reference.norm_rotate(*args), dtype)


@contextmanager
def rows_held_in_parts(columns: int, most: int = 1 << 15) -> Iterator[None]:
    """`top_pages` cuts rows into parts of so many columns, and reads them again where none fits."""
    names = "_HELD_COLUMNS", "_BLOCK_W", "_MOST_COLUMNS"
    before = [getattr(select, name) for name in names]
    for name, value in zip(names, (columns, columns, most), strict=True):
        setattr(select, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(select, name, value)


def check_top_tokens(columns: int, device: str) -> None:
    """Scores that are all different, of both signs and of every size; slots are chosen."""
    scores = torch.randn(4, 1, columns, device=device) * 10 ** torch.linspace(
        -30, 30, columns, device=device
    ).roll(columns // 3)
    lens = torch.tensor([columns, columns - 1, columns // 2, 1], dtype=torch.int32, device=device)
    for budget in (1, columns // 7, columns - 2):
        args = (scores, lens[:, None], torch.full_like(lens, budget), 1)
        limits = {"sinks": 0, "least": 1, "width": budget}
        found, want = kernels.top_pages(*args, **limits), reference.top_pages(*args, **limits)
        assert torch.equal(found, want)


def check_top_pages(heads: int, groups: int, columns: int, device: str) -> None:
    """Choices equal the twin's exactly: ties, NaN, zeros of both signs, short and empty rows."""
    page, lens_of = 4, [0, 1, 4, 5, 4 * columns, 3 * columns, columns, 2 * columns + 1]
    lens = torch.tensor(lens_of, device=device, dtype=torch.int32)[:, None].repeat(1, groups)
    if groups > 1:
        lens[-1, 0] = columns
    spans = len(lens_of)
    scores = torch.randn(spans, heads, columns, device=device)
    scores[scores.abs() < 0.2] = 0.0
    scores[torch.rand_like(scores) < 0.1] = -0.0
    scores[torch.rand_like(scores) < 0.1] = float("nan")
    scores[torch.rand_like(scores) < 0.05] = float("-inf")
    scores[torch.rand_like(scores) < 0.05] = float("inf")
    scores = scores.mul(4).round().div(4)  # many ties
    for budget in (30, 4 * columns):
        budgets = torch.full((spans,), budget, device=device, dtype=torch.int32)
        budgets[1::3] = 16
        most = int(budgets.max())
        width = min(columns, max(3, -(-most // page)))
        args = (scores, lens, budgets, page)
        for sinks in (0, 2):
            limits = {"sinks": sinks, "least": 3, "width": width}
            found, want = kernels.top_pages(*args, **limits), reference.top_pages(*args, **limits)
            assert torch.equal(found, want)
        table = PackedTable(
            torch.randint(0, 999, (100 + 4 * (columns + 2),), device=device, dtype=torch.int32),
            torch.randint(0, 100, (spans,), device=device),
            torch.full((spans,), columns + 2, device=device),
            row=1, groups=groups, columns=columns,
        )  # fmt: skip
        for index in (want, want[:, :1]):
            pairs = zip(
                kernels.take_pages(table, index, lens, page),
                reference.take_pages(table, index, lens, page),
                strict=True,
            )
            assert all(torch.equal(a, b) for a, b in pairs)
