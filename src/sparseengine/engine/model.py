"""What the engine needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sparseengine.core.context import StepContext


class Model(Protocol):
    """A network over the tokens of a step."""

    def __call__(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """ids, positions int64 [T] -> hidden [T, hidden_size], or [N, ...] of `ctx.wanted`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> fp32 [N, vocab_size]."""
        ...
