"""Linear layers whose weights are filled from one or several checkpoint tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x W^T + b. `weight` [out, in] and `bias` [out] are uninitialised until loaded."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias:
            empty = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        else:
            self.register_parameter("bias", None)

    def prepare(self) -> None:
        """Called once after the weights are in place; the place to pack them."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several column-parallel projections of one input as one matrix (Q, K, V or gate, up).

    `parts` are the output sizes, all rank-local. Part i of a checkpoint fills the rows `rows(i)`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(in_features, sum(parts), bias, dtype=dtype, device=device)
        self.parts = tuple(parts)
        self._starts = (0, *accumulate(self.parts))

    def rows(self, part: int) -> slice:
        """The output rows that part `part` of a checkpoint fills."""
        return slice(self._starts[part], self._starts[part + 1])

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """y [T, sum(parts)] -> one view [T, part] per part."""
        return y.split(self.parts, dim=-1)
