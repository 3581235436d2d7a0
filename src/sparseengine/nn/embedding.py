"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """`weight` [vocab, hidden], looked up by token id."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        empty = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, hidden]."""
        return F.embedding(ids, self.weight)
