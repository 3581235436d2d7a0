"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseengine.ops import cpu


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

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        if x.device.type == "cpu":
            return cpu.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
