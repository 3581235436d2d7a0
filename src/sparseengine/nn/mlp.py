"""Gated feed-forward block."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from sparseengine import ops
from sparseengine.nn.linear import Linear, MergedLinear


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
        out: Tensor = self.down_proj(ops.gated(self.gate_up_proj(x), self.activation))
        return out


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)) with the tanh approximation of gelu (Gemma)."""

    activation: ClassVar[str] = "gelu_tanh"
