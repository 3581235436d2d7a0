"""Mixtures of experts, a group of `sparseengine bench kernels`.

Layers of well-known models, bf16, at decode and prefill sizes, with fresh routings. Each row is
compared with the plain-torch twin in fp32 first. One layer's experts exceed the L2 cache, so that
one copy of them suffices. Bytes are those of the experts that any token chose, read once; FLOP are
those of the two products. torch's grouped product is timed on its own, on rows that are sorted
already, and as a whole layer around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseengine import ops
from sparseengine.bench.timing import Bench, relative_error
from sparseengine.ops import reference
from sparseengine.ops.routing import RouterSpec

TOKENS = (16, 320, 1024, 2048, 8192)
ROUTINGS = 3
CHECKED = 16  # tokens that the twin computes
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes of one mixture: experts, choices, hidden and inner width."""

    name: str
    router: RouterSpec
    hidden: int
    inner: int

    @property
    def expert_bytes(self) -> int:
        """Of one expert in bf16."""
        return 3 * self.hidden * self.inner * 2


LAYERS = (
    Layer(
        name="qwen3-30b-a3b",
        router=RouterSpec(num_experts=128, top_k=8, normalise=True),
        hidden=2048,
        inner=768,
    ),
    Layer(
        name="glm-4.7-flash",
        router=RouterSpec(
            num_experts=64,
            top_k=4,
            scoring="sigmoid",
            correction_bias=True,
            normalise=True,
            scale=1.8,
            epsilon=1e-20,
        ),
        hidden=2048,
        inner=1536,
    ),
)


def grouped_products(gate_up: Tensor, down: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped products around a SwiGLU: rows [T * K, H] by expert, ends int32 [E]."""
    gate, up = torch._grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
    return torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)


def torch_layer(gate_up: Tensor, down: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The whole layer around torch's grouped product, without a wait of the host."""
    num_tokens, top_k = ids.shape
    by_expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(
        by_expert, torch.arange(gate_up.shape[0], device=ids.device, dtype=ids.dtype), right=True
    )
    out = torch.empty(num_tokens * top_k, x.shape[1], device=x.device, dtype=x.dtype)
    out[order] = grouped_products(gate_up, down, x[order // top_k], ends.int())
    return (out.view(num_tokens, top_k, -1).float() * weights[..., None]).sum(1).to(x.dtype)


class LayerBench:
    """One layer's experts and everything that is timed on them."""

    def __init__(self, bench: Bench, layer: Layer) -> None:
        self.bench, self.layer = bench, layer
        experts, hidden, inner = layer.router.num_experts, layer.hidden, layer.inner
        self.gate_up = bench.normal(experts, 2 * inner, hidden) * hidden**-0.5
        self.down = bench.normal(experts, hidden, inner) * inner**-0.5
        self.bias = torch.randn(experts, device=bench.device) * 0.01

    def run(self, num_tokens: int) -> None:
        """All rows of the table for one number of tokens."""
        layer, spec = self.layer, self.layer.router
        bias = self.bias if spec.correction_bias else None
        logits = [
            torch.randn(num_tokens, spec.num_experts, device=self.bench.device)
            for _ in range(ROUTINGS)
        ]
        routed = [ops.moe_route(each, bias, spec) for each in logits]
        inputs = [(self.bench.normal(num_tokens, layer.hidden), *each) for each in routed]
        active = sum(int((torch.bincount(i.flatten()) > 0).sum()) for i, _ in routed) / ROUTINGS
        num_bytes = int(active * layer.expert_bytes)
        flop = 2 * num_tokens * spec.top_k * 3 * layer.hidden * layer.inner
        for name, function in (("", self._ours), (" torch", self._torch)):
            error = self._error(function, inputs[0])
            calls = [partial(function, *each) for each in inputs]
            self.bench.add(f"{layer.name} {num_tokens}{name}", calls, num_bytes, error, flop)
        rows = self.bench.normal(num_tokens * spec.top_k, layer.hidden)
        ends = [
            torch.bincount(ids.flatten(), minlength=spec.num_experts).cumsum(0).int()
            for ids, _ in routed
        ]
        products = [partial(grouped_products, self.gate_up, self.down, rows, each) for each in ends]
        name = f"{layer.name} {num_tokens} torch products"
        self.bench.add(name, products, num_bytes, None, flop)
        choices = [partial(ops.moe_route, each, bias, spec) for each in logits]
        self.bench.add(f"{layer.name} {num_tokens} choice", choices, 4 * logits[0].numel(), None)

    def _ours(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.moe_experts(x, self.gate_up, self.down, ids, weights)

    def _torch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch_layer(self.gate_up, self.down, x, ids, weights)

    def _error(
        self,
        function: Callable[[Tensor, Tensor, Tensor], Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
    ) -> float:
        x, ids, weights = (each[:CHECKED] for each in inputs)
        want = reference.moe_experts(
            x.float(), self.gate_up.float(), self.down.float(), ids.long(), weights
        )
        error = relative_error(function(*inputs)[:CHECKED], want)
        if not error < TOLERANCE:
            raise RuntimeError(f"{self.layer.name}: relative error {error:.1e} against the twin")
        return error


def bench_moe(bench: Bench) -> None:
    """All layers at all numbers of tokens."""
    for layer in LAYERS:
        some = replace(layer, hidden=64, inner=32) if bench.small else layer
        timed = LayerBench(bench, some)
        for num_tokens in TOKENS[:1] if bench.small else TOKENS:
            timed.run(num_tokens)
