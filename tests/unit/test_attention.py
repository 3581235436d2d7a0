"""Attention backends against a formula written query by query, and the choice among them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from attention_views import Shape, layer_of, spans_view
from torch import Tensor

from sparseengine.attention import BACKENDS
from sparseengine.attention.caps import device_caps
from sparseengine.attention.deterministic import DeterministicBackend
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.attention.routes import choose_backend
from sparseengine.core.attention import AttentionNeed, DeviceCaps
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView, Segment
from sparseengine.errors import ConfigError, UnsupportedError

F64 = torch.float64
SHAPES = [
    Shape(heads=2, group=3, dim=8, value_dim=6, page=4, layout="head"),
    Shape(heads=2, group=2, dim=8, page=16, layout="shared"),
    Shape(heads=3, group=1, dim=8, page=1, layout="picked"),
]
PLAIN = [ReferenceBackend, DeterministicBackend]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def by_hand(q: Tensor, view: AttentionView, layer: LayerSpec) -> Tensor:
    """One query and one query head at a time, over Python lists of slots."""
    out = torch.zeros(q.shape[0], layer.q_heads, layer.value_dim, dtype=F64)
    cu_q = view.cu_q.tolist()
    for s in range(len(cu_q) - 1):
        num_q = cu_q[s + 1] - cu_q[s]
        for hq in range(layer.q_heads):
            h = hq // layer.group_size
            slots = []
            for part in view.segments:
                g = h if part.table.shape[1] > 1 else 0
                k_pool = part.payload[0][0]
                v_pool = k_pool if part.values_in_keys else part.payload[1][0]
                inner = h if k_pool.shape[1] > 1 else 0
                for i in range(int(part.lens[s, g])):
                    page, offset = int(part.table[s, g, i // part.page_size]), i % part.page_size
                    slots.append((k_pool[page, inner, offset], v_pool[page, inner, offset]))
            for i in range(num_q):
                position = len(slots) - num_q + i
                first = 0 if view.window is None else position - view.window + 1
                seen = [slots[j] for j in range(max(first, 0), position + 1)]
                if not seen:
                    continue
                query = q[cu_q[s] + i, hq]
                logits = [float(query @ k) * layer.softmax_scale for k, _ in seen]
                if layer.softcap:
                    logits = [layer.softcap * math.tanh(x / layer.softcap) for x in logits]
                weights = [math.exp(x - max(logits)) for x in logits]
                for w, (_, v) in zip(weights, seen, strict=True):
                    out[cu_q[s] + i, hq] += w / sum(weights) * v[: layer.value_dim]
    return out


def queries(view: AttentionView, shape: Shape, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(int(view.cu_q[-1]), shape.heads * shape.group, shape.dim).to(dtype)


def ragged(shape: Shape, lens: list[list[int]]) -> list[list[int]]:
    return [row[:1] if shape.layout == "shared" else row[: shape.heads] for row in lens]


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 6])
def test_ragged_rows_causal_mask_and_groups(
    backend: type, shape: Shape, window: int | None
) -> None:
    lens = ragged(shape, [[21, 9, 70], [0, 0, 0], [12, 30, 14], [5, 5, 5]])
    view = spans_view(shape, [1, 1, 12, 5], [lens], F64, "cpu", window)
    q, layer = queries(view, shape), layer_of(shape, window)
    got = backend().run(q, view, layer, None)
    torch.testing.assert_close(got, by_hand(q, view, layer), rtol=0, atol=1e-10)
    assert (got[1] == 0).all(), "a row of length 0 contributes nothing"


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("window", [None, 6])
def test_segments_join_into_one_row(backend: type, window: int | None) -> None:
    shape = SHAPES[0]
    lens = [[[17, 3], [64, 0]], [[0, 4], [2, 2]], [[1, 1], [8, 8]]]
    view = spans_view(shape, [1, 8], lens, F64, "cpu", window)
    q, layer = queries(view, shape), layer_of(shape, window)
    got = backend().run(q, view, layer, None)
    torch.testing.assert_close(got, by_hand(q, view, layer), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", PLAIN)
def test_scale_and_soft_cap_of_a_layer(backend: type) -> None:
    shape = SHAPES[0]
    view = spans_view(shape, [1, 12], [[[21, 9], [12, 30]]], F64, "cpu", window=7)
    q, layer = queries(view, shape), replace(layer_of(shape, 7), scale=0.9, softcap=1.5)
    got = backend().run(q, view, layer, None)
    torch.testing.assert_close(got, by_hand(q, view, layer), rtol=0, atol=1e-10)
    plain = by_hand(q, view, replace(layer, softcap=0.0))
    assert (plain - got).abs().max() > 0.1, "the cap must matter"


@pytest.mark.parametrize("backend", PLAIN)
def test_latent_values_are_a_prefix_of_the_keys(backend: type) -> None:
    shape = Shape(heads=1, group=4, dim=8, value_dim=5, page=4, layout="head")
    view = spans_view(shape, [1, 6], [[[9], [11]]], F64, "cpu", values_in_keys=True)
    q, layer = queries(view, shape), layer_of(shape, latent=True)
    got = backend().run(q, view, layer, None)
    torch.testing.assert_close(got, by_hand(q, view, layer), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", PLAIN)
def test_output_has_the_queries_dtype(backend: type) -> None:
    view = spans_view(SHAPES[0], [1, 3], [[[9, 2], [4, 4]]], torch.bfloat16, "cpu")
    q = queries(view, SHAPES[0], torch.bfloat16)
    assert backend().run(q, view, layer_of(SHAPES[0]), None).dtype == torch.bfloat16


def part_of(view: AttentionView, span: int, first: int, count: int) -> AttentionView:
    """The view of queries first..first + count of one span, as an earlier chunk would see it."""
    segment = view.segments[0]
    later = int(view.cu_q[span + 1] - view.cu_q[span]) - first - count
    own = Segment(
        segment.payload,
        (),
        segment.values_in_keys,
        segment.table[span : span + 1],
        segment.lens[span : span + 1] - later,
        segment.page_size,
    )
    cu_q = torch.tensor([0, count], dtype=torch.int32)
    return AttentionView((own,), cu_q, view.window, int(count == 1), count, view.max_len)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 50])
def test_deterministic_bits_depend_neither_on_batch_nor_on_chunking(
    shape: Shape, window: int | None
) -> None:
    lens = ragged(shape, [[300, 211, 90], [75, 75, 75], [150, 150, 150]])
    view = spans_view(shape, [1, 75, 90], [lens], torch.float32, "cpu", window)
    q, layer = queries(view, shape, torch.float32), layer_of(shape, window)
    backend = DeterministicBackend()
    whole = backend.run(q, view, layer, None)
    want = ReferenceBackend().run(q.double(), view, layer, None)
    torch.testing.assert_close(whole.double(), want, rtol=0, atol=1e-5)
    for span in range(3):
        lo, hi = int(view.cu_q[span]), int(view.cu_q[span + 1])
        for size in (1, 7, 16, 33, hi - lo):
            for first in range(0, hi - lo, size):
                count = min(size, hi - lo - first)
                part = part_of(view, span, first, count)
                got = backend.run(q[lo + first : lo + first + count], part, layer, None)
                assert torch.equal(got, whole[lo + first : lo + first + count])


def need(**changes: object) -> AttentionNeed:
    layer = LayerSpec(kind=LayerKind.FULL, q_heads=4, kv_heads=2, head_dim=64, value_dim=64)
    facts = {"layer": layer, "dtype": torch.float32, "page_size": 16, "per_head": True}
    return AttentionNeed(**{**facts, **changes})  # type: ignore[arg-type]


HOPPER = DeviceCaps(kind="cuda", arch=(9, 0), multiprocessors=132, has_triton=True)
HOST = DeviceCaps(kind="cpu", has_triton=True)


def test_cuda_takes_triton_and_keeps_reasons_for_all() -> None:
    route = choose_backend(need(), HOPPER, site="layers.3.attn")
    assert (route.selected, route.site, route.evidence) == (
        "triton",
        "layers.3.attn",
        "static_plan",
    )
    assert route.reason
    assert {name for name, _ in route.rejected} == set(BACKENDS) - {"triton"}
    assert all(reason for _, reason in route.rejected)
    assert json.loads(json.dumps(route.to_dict()))["selected"] == "triton"


@pytest.mark.parametrize(
    ("caps", "facts", "word"),
    [
        (DeviceCaps(kind="cuda", arch=(9, 0)), {}, "not installed"),
        (DeviceCaps(kind="cuda", arch=(7, 5), has_triton=True), {}, "capability"),
        (HOPPER, {"dtype": torch.float64}, "float64"),
        (
            HOPPER,
            {"layer": LayerSpec(kind=LayerKind.LATENT, q_heads=8, kv_heads=1, head_dim=640)},
            "640",
        ),
    ],
)
def test_cuda_falls_to_the_reference_and_says_why(
    caps: DeviceCaps, facts: dict[str, object], word: str
) -> None:
    route = choose_backend(need(**facts), caps)
    assert route.selected == "reference"
    assert word in dict(route.rejected)["triton"]


def test_the_host_takes_the_cpu_backend_and_triton_says_what_it_needs() -> None:
    route = choose_backend(need(), HOST)
    assert route.selected in ("cpu", "reference")
    assert "CUDA device" in dict(route.rejected)["triton"]


def test_deterministic_need_takes_the_deterministic_backend() -> None:
    for caps in (HOST, HOPPER):
        route = choose_backend(need(deterministic=True), caps)
        assert route.selected == "deterministic"
        assert all("deterministic=True" in reason for _, reason in route.rejected)


def test_a_named_backend_is_taken_or_refused_with_its_reason() -> None:
    assert choose_backend(need(), HOST, "reference").selected == "reference"
    with pytest.raises(UnsupportedError, match="CUDA device") as caught:
        choose_backend(need(), HOST, "triton")
    assert len(caught.value.reasons) == 1
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        choose_backend(need(), HOST, "tritn")


def test_no_backend_for_a_codec_lists_every_reason() -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose_backend(need(codec=("int8", "int8")), HOPPER)
    assert len(caught.value.reasons) == 4
    assert all("codec" in reason for reason in caught.value.reasons)


def test_caps_of_the_host_are_probed() -> None:
    caps = device_caps("cpu")
    assert caps.kind == "cpu"
    assert caps.memory_bytes > 1 << 28
    assert device_caps(torch.device("cpu")) is caps
