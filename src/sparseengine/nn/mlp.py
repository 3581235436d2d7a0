"""Gated feed-forward block."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from sparseengine import ops
from sparseengine.nn.linear import Linear, MergedLinear
from sparseengine.ops import cpu


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); `intermediate_size` is rank-local.

    merged: the checkpoint holds gate and up as one matrix, `gate_up_proj`.
    """

    activation: ClassVar[str] = "silu"

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        merged: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        parts = (intermediate_size, intermediate_size)
        names = () if merged else ("gate_proj", "up_proj")
        self.gate_up_proj = MergedLinear(
            hidden_size, parts, bias, names=names, dtype=dtype, device=device
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        both = self.gate_up_proj(x)
        if both.is_cuda:
            mixed = ops.gated(both, self.activation)
        else:
            mixed = self.mix(*self.gate_up_proj.split(both))
        out: Tensor = self.down_proj(mixed)
        return out

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation between the products on a CPU: gate, up [T, size] -> [T, size]."""
        return cpu.silu_mul(gate, up)


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)) with the tanh approximation of gelu (Gemma)."""

    activation: ClassVar[str] = "gelu_tanh"

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        return cpu.gelu_mul(gate, up)
