"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseengine import ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the mean square is taken in float32."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        empty = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps

    def scale(self) -> Tensor:
        """What the normed channels are multiplied by."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(residual + x, its norm), both [T, size]."""
        return ops.add_rms_norm(x, residual, self.scale(), self.eps)


class ShiftedRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), in float32 until the result is rounded (Gemma)."""

    gain: Tensor | None

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(size, eps, dtype=dtype, device=device)
        self.register_buffer("gain", None, persistent=False)

    def prepare(self) -> None:
        """Called once after the weights are in place."""
        self.gain = 1.0 + self.weight.detach().float()

    def scale(self) -> Tensor:
        return 1.0 + self.weight.float() if self.gain is None else self.gain

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        wide = x.float() if x.device.type == "cpu" else x  # kernels of devices work in float32
        return ops.rms_norm(wide, self.scale(), self.eps).to(x.dtype)
