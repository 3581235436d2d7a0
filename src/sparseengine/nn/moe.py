"""Mixture of experts: a router, experts stored as two stacks, and an optional shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseengine import ops
from sparseengine.nn.linear import Linear
from sparseengine.nn.mlp import SwiGLU
from sparseengine.ops.routing import RouterSpec

__all__ = ["Experts", "MoE", "Router", "RouterSpec"]


class Router(Linear):
    """Scores every expert; logits are fp32 (fp64 for fp64) whatever the model's dtype."""

    def __init__(
        self,
        hidden_size: int,
        spec: RouterSpec,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(hidden_size, spec.num_experts, dtype=dtype, device=device)
        self.spec = spec
        self.e_score_correction_bias: nn.Parameter | None = None
        if spec.correction_bias:
            empty = torch.empty(spec.num_experts, dtype=torch.float32, device=device)
            self.e_score_correction_bias = nn.Parameter(empty, requires_grad=False)

    def prepare(self) -> None:
        """Packs fp32 weights; others are converted at each call."""
        if self.weight.dtype == torch.float32:
            super().prepare()

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> logits fp32 [T, E]."""
        if x.is_cuda and self.row_tile is None and x.dtype.itemsize == 2:
            # Products of half-precision numbers are exact in fp32: nothing is lost.
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return super().forward(x if x.dtype == torch.float64 else x.float())

    def _product(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super()._product(x)
        return F.linear(x, self.weight.to(x.dtype))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> experts int [T, K], weights fp32 [T, K]."""
        return ops.moe_route(self(x), self.e_score_correction_bias, self.spec)


class Experts(nn.Module):
    """SwiGLU experts. gate_up_proj: [E, 2 * I, H], gate rows first; down_proj: [E, H, I].

    row_tile: None, or the fixed number of rows of every matrix product (`make_deterministic`).
    """

    row_tile: int | None = None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        wide = torch.empty(
            num_experts, 2 * intermediate_size, hidden_size, dtype=dtype, device=device
        )
        narrow = torch.empty(
            num_experts, hidden_size, intermediate_size, dtype=dtype, device=device
        )
        self.gate_up_proj = nn.Parameter(wide, requires_grad=False)
        self.down_proj = nn.Parameter(narrow, requires_grad=False)

    def places(self, owner: str) -> dict[str, Tensor]:
        """Checkpoint name -> the view it fills: three matrices per expert."""
        places: dict[str, Tensor] = {}
        inner = self.down_proj.shape[2]
        for expert, narrow in enumerate(self.down_proj.data):
            wide = self.gate_up_proj.data[expert]
            places[f"{owner}.{expert}.gate_proj.weight"] = wide[:inner]
            places[f"{owner}.{expert}.up_proj.weight"] = wide[inner:]
            places[f"{owner}.{expert}.down_proj.weight"] = narrow
        return places

    def stacked_places(self, owner: str) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
        """Another layout that checkpoints have: name -> (the stack it fills, names it replaces)."""
        experts, inner = range(self.down_proj.shape[0]), self.down_proj.shape[2]
        stacks = {
            "gate_up_proj": (self.gate_up_proj.data, ("gate_proj", "up_proj")),
            "gate_proj.weight": (self.gate_up_proj.data[:, :inner], ("gate_proj",)),
            "up_proj.weight": (self.gate_up_proj.data[:, inner:], ("up_proj",)),
            "down_proj": (self.down_proj.data, ("down_proj",)),
            "down_proj.weight": (self.down_proj.data, ("down_proj",)),
        }
        return {
            f"{owner}.{leaf}": (
                stack,
                tuple(f"{owner}.{i}.{part}.weight" for i in experts for part in parts),
            )
            for leaf, (stack, parts) in stacks.items()
        }

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], experts int [T, K], weights fp32 [T, K] -> [T, hidden]."""
        return ops.moe_experts(x, self.gate_up_proj, self.down_proj, ids, weights, self.row_tile)


class MoE(nn.Module):
    """Feed-forward block of routed experts, plus one of `shared_size` that every token visits."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        router: RouterSpec,
        *,
        shared_size: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, router, dtype=dtype, device=device)
        self.experts = Experts(
            router.num_experts, hidden_size, intermediate_size, dtype=dtype, device=device
        )
        self.shared_experts: SwiGLU | None = None
        if shared_size:
            self.shared_experts = SwiGLU(hidden_size, shared_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out: Tensor = self.experts(x, *self.gate.choose(x))
        return out if self.shared_experts is None else out + self.shared_experts(x)
