"""Mixture-of-experts kernels against their twins on a CUDA device, compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: kernels run natively here", allow_module_level=True)

from kernel_checks import assert_close, seeded_and_poisoned
from moe_checks import (
    ROUTERS,
    ROUTES,
    Layer,
    check_experts,
    check_poisoned_rows,
    check_route,
    check_row_tiles,
    check_sort,
    stacks,
    tokens,
)

from sparseengine.nn.moe import MoE, RouterSpec
from sparseengine.ops import reference
from sparseengine.ops.triton.moe import moe_experts

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = Layer(experts=16, top_k=4, hidden=256, inner=192)
ODD = Layer(experts=6, top_k=2, hidden=136, inner=88)
LARGE = Layer(experts=32, top_k=8, hidden=2048, inner=768)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with seeded_and_poisoned(int(torch.seed() % 2**31)):
        yield


@pytest.mark.parametrize(
    ("dtype", "route"), [*((BF16, route) for route in ROUTES), (F16, "first"), (F32, "even")]
)
@pytest.mark.parametrize("layer", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("count", [1, 40, 150, 1100])
def test_experts(layer: Layer, route: str, dtype: torch.dtype, count: int) -> None:
    check_experts(layer, count, route, dtype, "cuda")


@pytest.mark.parametrize("count", [16, 70, 130, 2048])
def test_experts_of_a_real_width(count: int) -> None:
    check_experts(LARGE, count, "even", BF16, "cuda")


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("count", [7, 1100])
def test_poisoned_rows(dtype: torch.dtype, count: int) -> None:
    check_poisoned_rows(SMALL, count, dtype, "cuda")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_row_tiles(dtype: torch.dtype) -> None:
    check_row_tiles(SMALL, 300, dtype, "cuda")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("count", [1, 300, 1025, 9000])
@pytest.mark.parametrize("rows", [16, 128])
def test_sort(route: str, count: int, rows: int) -> None:
    check_sort(128, count, 8, rows, route, "cuda")


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("count", [3, 1000])
def test_route(router: str, count: int) -> None:
    check_route(ROUTERS[router], count, "cuda")


@pytest.mark.parametrize("count", [16, 320, 2048])
def test_a_captured_graph_serves_any_routing(count: int) -> None:
    """Captured with one routing, replayed with others: bits equal those of eager calls."""
    gate_up, down = stacks(SMALL, BF16, "cuda")
    x, ids, weights = tokens(SMALL, count, "even", BF16, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moe_experts(x, gate_up, down, ids, weights)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = moe_experts(x, gate_up, down, ids, weights)
    for route in ("one", "first", "even"):
        for held, fresh in zip(
            (x, ids, weights), tokens(SMALL, count, route, BF16, "cuda"), strict=True
        ):
            held.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, moe_experts(x, gate_up, down, ids, weights))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_whole_block_in_a_graph(dtype: torch.dtype) -> None:
    """Router, experts and shared expert: nothing in between waits for the device."""
    spec = RouterSpec(
        num_experts=16, top_k=4, scoring="sigmoid", correction_bias=True, normalise=True, scale=1.8
    )
    block = MoE(256, 192, spec, shared_size=320, dtype=dtype, device="cuda")
    for name, parameter in block.named_parameters():
        parameter.data.normal_(0.0, 0.1 if "bias" in name else 0.06)
    x = torch.randn(48, 256, device="cuda").to(dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        block(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = block(x)
    x.copy_(torch.randn(48, 256, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, block(x))
    ids, weights = block.gate.choose(x)
    stack = (block.experts.gate_up_proj.double(), block.experts.down_proj.double())
    want = reference.moe_experts(x.double(), *stack, ids.long(), weights)
    assert block.shared_experts is not None
    assert_close(out, want + block.shared_experts(x).double(), dtype)
