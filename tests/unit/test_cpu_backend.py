"""The CPU backend equals the reference backend on every shape of view."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseengine.attention import cpu
from sparseengine.attention.cpu import CpuBackend
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.core.attention import AttentionNeed, DeviceCaps
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView, Segment

CPU = DeviceCaps(kind="cpu")


def layer_spec(kv_heads: int, group: int, dim: int, value_dim: int, latent: bool) -> LayerSpec:
    return LayerSpec(
        kind=LayerKind.LATENT if latent else LayerKind.FULL,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=dim,
        value_dim=value_dim,
    )


def random_segment(
    g: torch.Generator, layer: LayerSpec, lens: Tensor, page: int, *, bundled: bool, latent: bool
) -> Segment:
    """Pages of random ids, NaN in every slot that no row owns; pools are slices of wider ones.

    bundled: a page holds all KV heads; else one, and the table is per head where lens is.
    """
    spans, groups = lens.shape
    width = int(lens.max()) // page + 2
    stored = layer.kv_heads if bundled else 1
    num = spans * groups * width + 3
    table = torch.randperm(num, generator=g)[: spans * groups * width]
    table = table.view(spans, groups, width).to(torch.int32)
    payload = []
    for dim in layer.stored_dims:
        wide = torch.full((num, stored + 2, page, dim), float("nan"))
        pool = wide[:, 1 : 1 + stored]
        for s in range(spans):
            for r in range(groups):
                for slot in range(int(lens[s, r])):
                    entry = torch.randn(stored, dim, generator=g)
                    pool[int(table[s, r, slot // page]), :, slot % page] = entry
        payload.append((pool,))
    return Segment(tuple(payload), (), latent, table, lens.to(torch.int32), page)


def random_view(
    seed: int,
    layer: LayerSpec,
    spans: list[int],
    *,
    per_head: bool = False,
    segments: int = 1,
    window: int | None = None,
    page: int = 4,
    bundled: bool = True,
) -> tuple[Tensor, AttentionView]:
    """Queries of each span's length, and rows that hold them and some older keys."""
    g = torch.Generator().manual_seed(seed)
    groups = layer.kv_heads if per_head else 1
    latent = layer.kind is LayerKind.LATENT
    parts = []
    for i in range(segments):
        lens = torch.randint(0, 30, (len(spans), groups), generator=g)
        if i == segments - 1:
            lens = lens + torch.tensor(spans)[:, None]
        parts.append(
            random_segment(g, layer, lens, page, bundled=bundled and not per_head, latent=latent)
        )
    total = sum(p.lens.max() for p in parts)
    singles = next((i for i, n in enumerate(spans) if n != 1), len(spans))
    cu_q = torch.tensor([0, *spans]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(spans), layer.q_heads, layer.head_dim, generator=g)
    return q, AttentionView(tuple(parts), cu_q, window, singles, max(spans), int(total))


def agree(q: Tensor, view: AttentionView, layer: LayerSpec, tolerance: float = 1e-5) -> None:
    expected = ReferenceBackend().run(q, view, layer, None)
    got = CpuBackend().run(q, view, layer, None)
    assert got.dtype == q.dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["numba", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both decode paths: the compiled kernel and the one without numba."""
    if request.param == "torch":
        monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: None)
    return str(request.param)


SPANS = {"decode": [1, 1, 1], "prefill": [7, 19], "mixed": [1, 1, 5, 1, 12]}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("segments", [1, 3])
def test_every_shape_equals_the_reference(
    path: str, spans: list[int], per_head: bool, window: int | None, segments: int
) -> None:
    layer = layer_spec(3, 3, 64, 64, latent=False)
    agree(*random_view(0, layer, spans, per_head=per_head, window=window, segments=segments), layer)


@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (32, 64), (8, 8), (20, 12)])
@pytest.mark.parametrize("page", [1, 5, 16])
def test_head_and_page_sizes(path: str, dims: tuple[int, int], page: int) -> None:
    layer = layer_spec(2, 4, *dims, latent=False)
    agree(*random_view(1, layer, [1, 1, 9], page=page), layer)
    agree(*random_view(2, layer, [1, 1, 9], page=page, per_head=True), layer)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_scale_and_soft_cap(
    path: str, spans: list[int], per_head: bool, window: int | None
) -> None:
    plain = layer_spec(2, 3, 64, 64, latent=False)
    capped = dataclasses.replace(plain, scale=0.2, softcap=1.5)
    q, view = random_view(8, capped, spans, per_head=per_head, window=window)
    agree(q, view, capped)
    uncapped = CpuBackend().run(q, view, dataclasses.replace(capped, softcap=0.0), None)
    assert (CpuBackend().run(q, view, capped, None) - uncapped).abs().max() > 0.01


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_windows_of_chunks_longer_than_a_tile(window: int, softcap: float) -> None:
    layer = dataclasses.replace(layer_spec(2, 2, 32, 32, latent=False), softcap=softcap)
    agree(*random_view(9, layer, [290, 257, 520], window=window, page=16), layer)


def test_values_in_keys(path: str) -> None:
    layer = layer_spec(1, 8, 80, 64, latent=True)
    agree(*random_view(3, layer, [1, 1, 6]), layer)


def test_one_head_pages_under_one_table(path: str) -> None:
    layer = layer_spec(1, 2, 32, 32, latent=False)
    agree(*random_view(4, layer, [1, 4], bundled=False), layer)


def test_per_head_tables_into_shared_pages(path: str) -> None:
    """What a page selection per KV head makes of a table that all heads shared."""
    layer = layer_spec(3, 2, 16, 16, latent=False)
    q, view = random_view(5, layer, [1, 1])
    segment = view.segments[0]
    lens = segment.lens.expand(2, 3).contiguous()
    table = segment.table.expand(2, 3, -1).contiguous()
    table[:, 1] = table[:, 1].flip(-1)  # another order for head 1, over whole pages only
    width = int(segment.lens.min()) // segment.page_size
    table[:, 1, :width] = segment.table[:, 0, :width].flip(-1)
    lens[:, 1] = width * segment.page_size
    picked = dataclasses.replace(segment, table=table, lens=lens)
    agree(q, dataclasses.replace(view, segments=(picked,)), layer)


def test_empty_rows_give_zeros(path: str) -> None:
    layer = layer_spec(2, 2, 32, 32, latent=False)
    q, view = random_view(6, layer, [1, 1, 5], per_head=True)
    lens = view.segments[0].lens.clone()
    lens[0] = 0
    lens[1, 1] = 0
    lens[2, 0] = 3  # fewer keys than queries: the first two queries see nothing
    emptied = dataclasses.replace(view.segments[0], lens=lens)
    view = dataclasses.replace(view, segments=(emptied,))
    agree(q, view, layer)
    assert not CpuBackend().run(q, view, layer, None)[0].any()


def test_long_rows_are_cut_and_merged(path: str) -> None:
    layer = layer_spec(2, 3, 32, 32, latent=False)
    g = torch.Generator().manual_seed(7)
    lens = torch.tensor([[700], [256], [257]])
    segment = random_segment(g, layer, lens, 16, bundled=True, latent=False)
    q = torch.randn(3, 6, 32, generator=g) * 4
    for window in (None, 300, 512):
        view = AttentionView((segment,), torch.arange(4).int(), window, 3, 1, 700)
        agree(q, view, layer)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_bfloat16(path: str, spans: list[int]) -> None:
    layer = layer_spec(2, 3, 64, 64, latent=False)
    q, view = random_view(8, layer, spans)
    segment = view.segments[0]
    payload = tuple((part[0].bfloat16(),) for part in segment.payload)
    view = dataclasses.replace(view, segments=(dataclasses.replace(segment, payload=payload),))
    agree(q.bfloat16(), view, layer, tolerance=2e-2)


def test_strided_queries_and_tables() -> None:
    layer = layer_spec(3, 3, 64, 64, latent=False)
    q, view = random_view(9, layer, [1, 1], segments=3)
    wide = torch.randn(2, 15, 64)
    wide[:, 2:11] = q
    strided = []
    for segment in view.segments:
        table = torch.stack([segment.table] * 2, dim=-1)[..., 0]
        assert table.stride(2) == 2
        strided.append(dataclasses.replace(segment, table=table))
    agree(wide[:, 2:11], dataclasses.replace(view, segments=tuple(strided)), layer)


def test_more_segments_than_the_kernel_takes() -> None:
    layer = layer_spec(2, 2, 16, 16, latent=False)
    agree(*random_view(12, layer, [1, 1], segments=20), layer)


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Bit for bit: decode rows keep their bits whatever shares the step."""
    layer = layer_spec(3, 3, 64, 64, latent=False)
    q, view = random_view(10, layer, [1] * 8)
    backend, segment = CpuBackend(), view.segments[0]
    together = backend.run(q, view, layer, None)
    for row in (0, 3, 7):
        alone = dataclasses.replace(
            segment, table=segment.table[row : row + 1], lens=segment.lens[row : row + 1]
        )
        solo_view = AttentionView((alone,), torch.tensor([0, 1]).int(), None, 1, 1, view.max_len)
        solo = backend.run(q[row : row + 1], solo_view, layer, None)
        assert torch.equal(solo[0], together[row])


def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_spec(3, 3, 64, 64, latent=False)
    q, view = random_view(11, layer, [1] * 6, per_head=True)
    monkeypatch.setattr(cpu, "_THREADED_BYTES", 0)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        results.append(CpuBackend().run(q, view, layer, None))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    spans=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16, 48])),
    page=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([None, 1, 5]),
    segments=st.integers(1, 2),
    per_head=st.booleans(),
)
def test_random_views(
    seed: int,
    spans: list[int],
    shape: tuple[int, int, int],
    page: int,
    window: int | None,
    segments: int,
    per_head: bool,
) -> None:
    layer = layer_spec(shape[0], shape[1], shape[2], shape[2], latent=False)
    q, view = random_view(
        seed, layer, spans, per_head=per_head, page=page, window=window, segments=segments
    )
    agree(q, view, layer)


def test_supports_says_which_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    need = AttentionNeed(
        layer=layer_spec(3, 3, 64, 64, latent=False),
        dtype=torch.float32,
        page_size=16,
        per_head=False,
    )
    answer = backend.supports(need, CPU)
    assert answer.ok
    assert "walks page tables" in answer.reason
    odd = dataclasses.replace(need, layer=layer_spec(1, 1, 24, 24, latent=False))
    assert "multiples of 16" in backend.supports(odd, CPU).reason
    half = dataclasses.replace(need, dtype=torch.float16)
    assert "float16" in backend.supports(half, CPU).reason
    for wrong in (
        dataclasses.replace(need, codec=("kivi",)),
        dataclasses.replace(need, deterministic=True),
        dataclasses.replace(need, dtype=torch.int8),
    ):
        assert not backend.supports(wrong, CPU).ok
    assert not backend.supports(need, DeviceCaps(kind="cuda")).ok
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: None)
    without = backend.supports(need, CPU)
    assert without.ok
    assert "numba is not installed" in without.reason
