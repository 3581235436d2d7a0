"""Checks of the mixture-of-experts kernels against their twins, on any device.

`interpreted_moe.py` runs them on the CPU under TRITON_INTERPRET=1 at tiny shapes (spawned by
tests/unit/test_moe.py); `test_moe_native.py` runs them on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernel_checks import assert_close
from torch import Tensor

from sparseengine.ops import reference
from sparseengine.ops import triton as kernels
from sparseengine.ops.routing import RouterSpec
from sparseengine.ops.triton.moe import Tile, moe_experts, sort_pairs

# how tokens [T, K] choose among E experts
ROUTES: dict[str, Callable[[int, int, int], Tensor]] = {
    "even": lambda t, e, k: torch.rand(t, e).argsort(1)[:, :k],
    "one": lambda t, e, k: torch.full((t, k), e - 1),
    "first": lambda t, e, k: torch.rand(t, max(k, e // 2)).argsort(1)[:, :k],
}
ROUTERS = {
    "softmax": RouterSpec(num_experts=8, top_k=2),
    "normalised": RouterSpec(num_experts=12, top_k=3, normalise=True, scale=2.5),
    "groups": RouterSpec(num_experts=40, top_k=6, num_groups=8, top_groups=3, scale=16.0),
    "sigmoid": RouterSpec(num_experts=64, top_k=4, scoring="sigmoid", correction_bias=True),
    "two-best": RouterSpec(
        num_experts=20,
        top_k=4,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=5,
        top_groups=2,
        group_score="top2_sum",
        normalise=True,
        scale=1.8,
        epsilon=1e-20,
    ),
    "masked-zero": RouterSpec(
        num_experts=8,
        top_k=2,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=2,
        top_groups=1,
        masked_score=0.0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes of one mixture: experts, choices, hidden and inner width."""

    experts: int = 8
    top_k: int = 3
    hidden: int = 32
    inner: int = 24


def stacks(layer: Layer, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(layer.experts, 2 * layer.inner, layer.hidden, device=device)
    down = torch.randn(layer.experts, layer.hidden, layer.inner, device=device)
    return (gate_up * layer.hidden**-0.5).to(dtype), (down * layer.inner**-0.5).to(dtype)


def tokens(
    layer: Layer, count: int, route: str, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, layer.hidden, device=device).to(dtype)
    ids = ROUTES[route](count, layer.experts, layer.top_k).int().to(device)
    return x, ids, torch.rand(count, layer.top_k, device=device)


def check_experts(
    layer: Layer,
    count: int,
    route: str,
    dtype: torch.dtype,
    device: str,
    tiles: tuple[Tile, Tile] | None = None,
) -> None:
    gate_up, down = stacks(layer, dtype, device)
    x, ids, weights = tokens(layer, count, route, dtype, device)
    got = moe_experts(x, gate_up, down, ids, weights, tiles=tiles)
    want = reference.moe_experts(x.double(), gate_up.double(), down.double(), ids.long(), weights)
    assert got.dtype == dtype
    assert_close(got, want, dtype)
    again = moe_experts(x, gate_up, down, ids.long(), weights, tiles=tiles)
    assert torch.equal(got, again), "two runs differ: a race"


def check_poisoned_rows(layer: Layer, count: int, dtype: torch.dtype, device: str) -> None:
    """A NaN token gives a NaN row and changes no bit of the others."""
    gate_up, down = stacks(layer, dtype, device)
    x, ids, weights = tokens(layer, count, "first", dtype, device)
    clean = kernels.moe_experts(x, gate_up, down, ids, weights)
    x[count // 2] = float("nan")
    poisoned = kernels.moe_experts(x, gate_up, down, ids, weights)
    others = torch.arange(count, device=device) != count // 2
    assert torch.isnan(poisoned[count // 2]).all()
    assert torch.equal(poisoned[others], clean[others])


def check_row_tiles(layer: Layer, count: int, dtype: torch.dtype, device: str) -> None:
    """With a fixed row tile a row's bits do not depend on the rest of the call."""
    gate_up, down = stacks(layer, dtype, device)
    x, ids, weights = tokens(layer, count, "even", dtype, device)
    whole = kernels.moe_experts(x, gate_up, down, ids, weights, 16)
    for part in (slice(0, 1), slice(2, 5), slice(count // 2, count)):
        alone = kernels.moe_experts(x[part], gate_up, down, ids[part], weights[part], 16)
        assert torch.equal(alone, whole[part])


def check_sort(experts: int, count: int, top_k: int, rows: int, route: str, device: str) -> None:
    """Pairs by expert and in order; every pair is in exactly one tile of its expert."""
    ids = ROUTES[route](count, experts, top_k).int().to(device)
    order, tiles = sort_pairs(ids, experts, rows)
    flat = ids.flatten().cpu().long()
    assert torch.equal(order.cpu().long(), flat.argsort(stable=True))
    covered: list[int] = []
    for expert, first, end, _ in tiles.tolist():
        if expert >= 0:
            part = order.cpu()[first : min(first + rows, end)].long()
            assert len(part) > 0
            assert (flat[part] == expert).all()
            covered += part.tolist()
    assert sorted(covered) == list(range(count * top_k))
    assert torch.equal(tiles[:, 0] >= 0, (tiles[:, 0] >= 0).sort(descending=True).values)


def check_route(spec: RouterSpec, count: int, device: str) -> None:
    """Ties, rows of NaN and ordinary rows give the twin's experts and weights."""
    logits = torch.randn(count, spec.num_experts)
    logits[0] = 0.0
    logits[1] = float("nan")
    logits[2] = logits[2].round()
    bias = torch.randn(spec.num_experts) * 0.5 if spec.correction_bias else None
    want_ids, want = reference.moe_route(logits, bias, spec)
    got_ids, got = kernels.moe_route(
        logits.to(device), None if bias is None else bias.to(device), spec
    )
    assert torch.equal(got_ids.cpu().long(), want_ids)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-7, equal_nan=True)
