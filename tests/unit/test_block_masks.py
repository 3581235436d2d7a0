"""Views with block masks: every backend equals masked softmax attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_views import Shape, layer_of, spans_view
from block_masks import random_mask
from torch import Tensor

from sparseengine.attention import BACKENDS
from sparseengine.attention.cpu import CpuBackend
from sparseengine.attention.reference import ReferenceBackend, span_rows
from sparseengine.attention.routes import choose_backend
from sparseengine.core.attention import AttentionNeed, DeviceCaps
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView, BlockMask, leading
from sparseengine.errors import UnsupportedError

SHAPES = [
    Shape(layout="head", page=16, group=2),
    Shape(layout="shared", page=4, group=1, dim=24),
    Shape(layout="picked", page=1, group=3, value_dim=8),
]
CPU = DeviceCaps(kind="cpu")


def oracle(q: Tensor, view: AttentionView, layer: LayerSpec) -> Tensor:
    """One query, one head, one key at a time."""
    out = torch.zeros(len(q), layer.q_heads, layer.value_dim, dtype=torch.float64)
    cu_q = view.cu_q.tolist()
    for span in range(len(cu_q) - 1):
        n, mask = cu_q[span + 1] - cu_q[span], view.masks.get(span)
        for head, (keys, values) in enumerate(span_rows(view, span, layer)):
            for g in range(head * layer.group_size, (head + 1) * layer.group_size):
                for i in range(n):
                    seen = range(len(keys) - n + i + 1)
                    if mask is not None:
                        blocks = mask.mask[g if len(mask.mask) > 1 else 0]
                        row = blocks[(mask.offset + i) // mask.block].tolist()
                        seen = [s for s in seen if row[s // mask.block]]
                    at = torch.tensor(list(seen))
                    x = keys[at].double() @ q[cu_q[span] + i, g].double() * layer.softmax_scale
                    if layer.softcap:
                        x = layer.softcap * (x / layer.softcap).tanh()
                    out[cu_q[span] + i, g] = x.softmax(0) @ values[at].double()
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
def test_backends_equal_the_oracle(
    shape: Shape, softcap: float, alike: bool, segments: int
) -> None:
    torch.manual_seed(3)
    groups = 1 if shape.layout == "shared" else shape.heads
    queries = [1, 40, 37, 3]
    total = [[7] * groups, [70] * groups, [90] * groups, [40] * groups]
    if groups > 1 and not alike:
        total[2][1] = 61
    lens = [total]
    if segments == 2:
        old = [[n // 3 for n in row] for row in total]
        lens = [
            old,
            [[n - o for n, o in zip(a, b, strict=True)] for a, b in zip(total, old, strict=True)],
        ]
    view = spans_view(shape, queries, lens, torch.float32, "cpu")
    layer = replace(layer_of(shape), softcap=softcap)
    masks = {
        span: random_mask(queries[span], total[span], layer.q_heads, 16, offset, alike=alike)
        for span, offset in {1: 5, 2: 0}.items()
    }
    view = view.masked(masks)
    q = torch.randn(sum(queries), layer.q_heads, shape.dim)
    want = oracle(q, view, layer)
    for backend in (ReferenceBackend(), CpuBackend()):
        got = backend.run(q, view, layer, None)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_half_precision_on_the_cpu() -> None:
    torch.manual_seed(0)
    shape = SHAPES[0]
    for dtype in (torch.bfloat16, torch.float16):
        view = spans_view(shape, [40], [[[70, 70]]], dtype, "cpu")
        view = view.masked({0: random_mask(40, [70, 70], 4, 16, 3)})
        q = torch.randn(40, 4, shape.dim).to(dtype)
        got = CpuBackend().run(q, view, layer_of(shape), None)
        want = ReferenceBackend().run(q.float(), view, layer_of(shape), None)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_masked_spans_are_never_single_ones() -> None:
    shape = SHAPES[0]
    view = spans_view(shape, [1, 1, 5], [[[9, 9]] * 3], torch.float32, "cpu")
    assert view.num_single == 2
    mask = BlockMask(torch.ones(1, 1, 1, dtype=torch.bool), 16, 0)
    masked = view.masked({1: mask})
    assert masked.num_single == 1
    assert leading(masked, 1).masks == {}
    assert view.masked({}) is view


def need(kind: LayerKind, **values: bool) -> AttentionNeed:
    layer = LayerSpec(kind=kind, q_heads=4, kv_heads=1, head_dim=16, value_dim=16)
    return AttentionNeed(
        layer=layer, dtype=torch.float32, page_size=16, per_head=False, block_masks=True, **values
    )


def test_routes_say_who_reads_block_masks() -> None:
    assert choose_backend(need(LayerKind.FULL), CPU).selected == "cpu"
    with pytest.raises(UnsupportedError, match="it has no sparse prefill"):
        choose_backend(need(LayerKind.FULL, deterministic=True), CPU)
    interpreted = DeviceCaps(kind="cpu", has_triton=True, interpreted=True)
    triton = BACKENDS.get("triton")()
    assert triton.supports(need(LayerKind.FULL), interpreted).ok
    answer = triton.supports(need(LayerKind.LATENT), interpreted)
    assert not answer.ok
    assert "no sparse prefill" in answer.reason


def test_lists_of_blocks() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from sparseengine.ops.triton.blocks import block_lists

    mask = torch.rand(3, 5, 40) < 0.3
    mask[0, 0], mask[1, 1] = False, True
    index, counts = block_lists(mask)
    for h in range(3):
        for r in range(5):
            want = mask[h, r].nonzero().flatten().tolist()
            assert index[h, r, : len(want)].tolist() == want
            assert int(counts[h, r]) == len(want)
