"""Long prompt chunks by fused operators: cuts, merges, rows in order, and who takes which span."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from attention_views import Shape, hosted, layer_of, spans_view
from hypothesis import given
from hypothesis import strategies as st

from sparseengine import ops
from sparseengine.attention import BACKENDS
from sparseengine.attention import gathered as backends
from sparseengine.attention.gathered import CudnnBackend, FlashBackend
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.attention.routes import choose_backend
from sparseengine.core.attention import AttentionNeed, DeviceCaps
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec
from sparseengine.engine.memory import attention_scratch_bytes
from sparseengine.ops import dense, reference
from sparseengine.ops.parts import Part, attend_parts, cut_row

HOPPER = DeviceCaps(kind="cuda", arch=(9, 0), multiprocessors=132, has_triton=True, cudnn=91002)
LAYER = LayerSpec(kind=LayerKind.FULL, q_heads=32, kv_heads=8, head_dim=128, value_dim=128)
WIDE = replace(LAYER, head_dim=256, value_dim=256)
MODEL = ModelSpec(
    layers=(LAYER,), vocab_size=9, hidden_size=9, max_position=9, dtype=torch.bfloat16
)


@given(st.integers(1, 5000), st.integers(0, 200_000), st.sampled_from([1, 16, 512]))
def test_a_cut_row_has_every_key_once_and_few_sizes(num_q: int, old: int, unit: int) -> None:
    longest = 64 * unit
    row = cut_row(num_q, old + num_q, unit, longest)
    *unmasked, square = row.parts
    at = 0
    for part in row.parts:
        assert part.first == at
        at += part.rows
    assert old - unit < square.first <= old < old + num_q <= at < old + num_q + unit
    assert square.causal
    assert square.rows == row.queries
    assert row.queries % unit == 0
    assert row.front == old - square.first
    sizes = [p.rows for p in unmasked]
    assert sizes == sorted(sizes, reverse=True)
    assert not any(p.causal for p in unmasked)
    assert set(sizes) <= {unit << i for i in range(7)}
    assert all(sizes.count(n) == 1 for n in sizes if n < longest)
    assert row.pairs >= row.needed_pairs > 0


def test_cuts_of_prompts_in_chunks_repeat_few_sizes() -> None:
    """What cuDNN plans for: prompts of 128k in chunks of 8,192, and with 20 decodes beside them."""
    aligned, shifted = set(), set()
    for chunk, found in ((8192, aligned), (8172, shifted)):
        for old in range(0, 131072 - chunk, chunk):
            row = dense.cut_for_cudnn(chunk, old + chunk, 32, 256)
            assert row is not None
            found.update((row.queries, part) for part in ((p.rows, p.causal) for p in row.parts))
    assert aligned == {(8192, (8192, True)), *((8192, (8192 << i, False)) for i in range(3))}
    assert len(shifted) <= 16


def test_short_chunks_and_much_padding_do_not_pay() -> None:
    assert dense.cut_for_cudnn(0, 0, 32, 256) is None
    assert dense.cut_for_cudnn(512, 512, 32, 256) is None
    assert dense.cut_for_cudnn(4096, 4096, 32, 256) is None
    assert dense.cut_for_cudnn(1, 131072, 32, 256) is None
    assert dense.cut_for_cudnn(8192, 8192, 32, 256) is not None
    assert dense.cut_for_cudnn(2048, 32768, 32, 256) is not None
    assert dense.cut_for_cudnn(520, 131072, 32, 256) is None, "1,024 rows for 520 queries"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_q", "length", "unit", "longest"),
    [(1, 1, 4, 8), (7, 7, 4, 8), (8, 40, 8, 64), (13, 131, 8, 8), (30, 95, 16, 64), (5, 9, 1, 1)],
)
def test_parts_merge_to_the_whole(
    dtype: torch.dtype, num_q: int, length: int, unit: int, longest: int
) -> None:
    """(13, 131, 8, 8) has more parts than are merged at once."""
    torch.manual_seed(1)
    q = torch.randn(num_q, 6, 16).to(dtype)[:, :4]  # strides of a slice, as a layer's queries have
    k, v = torch.randn(length, 2, 16).to(dtype), torch.randn(length, 2, 12).to(dtype)
    row = cut_row(num_q, length, unit, longest)
    assert num_q != 13 or len(row.parts) > 8

    def fetch(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.zeros(2, part.rows, 2, 16).to(dtype)
        real = min(part.rows, length - part.first)
        whole[0, :real] = k[part.first : part.first + real]
        whole[1, :real, :, :12] = v[part.first : part.first + real]
        return whole[0], whole[1, :, :, :12]

    def fused(*parts: object) -> tuple[torch.Tensor, torch.Tensor]:
        return dense._fused_flash(*parts, scale=0.3)  # type: ignore[arg-type]

    out = torch.full((num_q, 4, 12), float("nan"), dtype=dtype)
    attend_parts(q, row, fetch, fused, ops.merge_parts, out)
    want = reference.dense_attention(q, k, v, 0.3)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


def test_rows_of_one_known_length_are_long_rows() -> None:
    lens = [[9, 9], [9000, 9000], [9000, 8999], [100, 100], [20000, 20000]]
    queries = [1, 9000, 8000, 100, 9000]
    view = spans_view(Shape(heads=2, group=2, dim=16, page=512), queries, [lens], torch.half, "cpu")
    layer = replace(LAYER, kv_heads=2)
    backend = CudnnBackend()
    found = backend._long_rows(hosted(view, queries), layer)
    assert list(found) == [1, 4]
    assert (found[4].num_q, found[4].length) == (9000, 20000)
    assert list(backend._long_rows(hosted(view, queries, first=2), layer)) == [4]
    assert backend._long_rows(view, layer) == {}, "the device alone knows the lengths"
    assert backend._long_rows(replace(hosted(view, queries), window=64), layer) == {}
    assert backend._long_rows(hosted(view, queries), replace(layer, softcap=30.0)) == {}
    two = replace(hosted(view, queries), segments=view.segments * 2)
    assert backend._long_rows(two, layer) == {}


@pytest.mark.parametrize("as_tuple", [True, False])
def test_flash_attention_when_installed(monkeypatch: pytest.MonkeyPatch, as_tuple: bool) -> None:
    """A module of FlashAttention's interface takes whole gathered rows, one call a span."""
    need = AttentionNeed(layer=LAYER, dtype=torch.bfloat16, page_size=16, per_head=True)
    backends.flash_module.cache_clear()
    without = FlashBackend().supports(need, HOPPER)
    assert not without.ok
    assert "flash_attn_interface" in without.reason
    calls = []

    def flash_attn_func(q, k, v, *, softmax_scale, causal):  # type: ignore[no-untyped-def]
        assert causal
        assert q.shape[0] == k.shape[0] == v.shape[0] == 1
        calls.append((q.shape[1], k.shape[1]))
        out = reference.dense_attention(q[0], k[0], v[0], softmax_scale)[None]
        return (out, torch.empty(0)) if as_tuple else out

    fake = ModuleType("flash_attn_interface")
    fake.__spec__ = ModuleSpec(fake.__name__, None)
    fake.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    backends.flash_module.cache_clear()
    assert FlashBackend().supports(need, HOPPER).ok
    no_cudnn = replace(HOPPER, cudnn=0)
    assert choose_backend(need, no_cudnn).selected == "flash"
    assert choose_backend(need, HOPPER).selected == "cudnn"
    assert choose_backend(need, HOPPER, "flash").selected == "flash"

    monkeypatch.setattr(backends, "_FLASH_OPERATIONS", 0)
    shape = Shape(heads=2, group=2, dim=16, page=4)
    queries, lens = [7, 20], [[30, 30], [20, 20]]
    view = spans_view(shape, queries, [lens], torch.float32, "cpu")
    q, layer = torch.randn(27, 4, 16), layer_of(shape)
    got = FlashBackend().run(q, hosted(view, queries), layer, None)
    torch.testing.assert_close(got, ReferenceBackend().run(q, view, layer, None))
    assert calls == [(7, 30), (20, 20)]
    backends.flash_module.cache_clear()


@pytest.mark.parametrize(
    ("facts", "caps", "selected", "word"),
    [
        ({}, HOPPER, "cudnn", ""),
        ({"layer": replace(LAYER, kind=LayerKind.WINDOW, window=128)}, HOPPER, "triton", "WINDOW"),
        ({"layer": replace(LAYER, softcap=50.0)}, HOPPER, "triton", "soft cap"),
        ({"layer": replace(LAYER, head_dim=100)}, HOPPER, "triton", "multiples of 8"),
        ({"dtype": torch.float32}, HOPPER, "triton", "bfloat16"),
        ({}, replace(HOPPER, cudnn=0), "triton", "torch has none"),
        ({}, replace(HOPPER, cudnn=8900), "triton", "90100"),
        ({}, replace(HOPPER, arch=(8, 0)), "triton", "9.0"),
        ({"layer": WIDE}, HOPPER, "cudnn", ""),
        ({"layer": WIDE}, replace(HOPPER, cudnn=90501), "triton", "91000"),
        ({"layer": WIDE}, replace(HOPPER, arch=(10, 0)), "triton", "128 channels"),
        ({}, replace(HOPPER, has_triton=False), "reference", "triton backend"),
    ],
)
def test_routes(facts: dict[str, object], caps: DeviceCaps, selected: str, word: str) -> None:
    usual = {"layer": LAYER, "dtype": torch.bfloat16, "page_size": 16, "per_head": True}
    route = choose_backend(AttentionNeed(**{**usual, **facts}), caps)  # type: ignore[arg-type]
    assert route.selected == selected
    assert word in dict(route.rejected).get("cudnn", "")
    if selected == "cudnn":
        assert "long prompt chunks" in route.reason
        assert "cudnn comes before" in str(route.rejected)


def test_scratch_of_long_rows_is_bounded_and_counted() -> None:
    """More than a short row's, and no more for rows of a million tokens than for their parts."""
    backend, triton = CudnnBackend(), BACKENDS.get("triton")()
    short, long, longer = (
        backend.scratch_bytes(LAYER, 8192, n, 2) for n in (8192, 131072, 1 << 20)
    )
    part = 32768 * 8 * 256 * 2
    results = 9 * (8192 + 512) * 32 * (128 * 2 + 4)
    assert short < long <= longer < part + 1.4 * results
    window = replace(LAYER, kind=LayerKind.WINDOW, window=128)
    spec = replace(MODEL, layers=(window, LAYER))
    assert attention_scratch_bytes((triton, backend), spec, 8192, 131072) == long
    assert attention_scratch_bytes((triton, triton), spec, 8192, 131072) == 0
