"""Gated feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseengine.nn.linear import Linear, MergedLinear
from sparseengine.ops import cpu


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); `intermediate_size` is rank-local."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        parts = (intermediate_size, intermediate_size)
        self.gate_up_proj = MergedLinear(
            hidden_size, parts, bias, names=("gate_proj", "up_proj"), dtype=dtype, device=device
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        mixed = cpu.silu_mul(gate, up) if x.device.type == "cpu" else F.silu(gate) * up
        out: Tensor = self.down_proj(mixed)
        return out
