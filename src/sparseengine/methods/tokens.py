"""What methods share that select single tokens instead of pages."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.core.method import LayerStep
from sparseengine.core.view import Selection
from sparseengine.methods.families import SelectionMethod

_RECENT = 1e30  # above any score, below what is forced


class TokenSelection(SelectionMethod):
    """Reads the tokens with the highest score in each decode step; retains everything.

    The budget counts tokens read per row, the newest one and sinks included. A row that is not
    longer than the budget is read whole. Prefill is dense.
    """

    def _best(
        self, at: LayerStep, scores: Tensor, recent: Tensor, sinks: Tensor, width: int
    ) -> Selection:
        """The slots with the highest scores [S, H, L], H being 1 or kv_heads.

        recent: int64 [S, G, 1], the first of the slots that are read before all others, the newest
        first. sinks: int64 [S], how many first slots are forced, as the newest is. width: the
        largest count.
        """
        lens = at.packed()[1]
        lens = lens[:, :1] if scores.shape[1] == 1 else lens
        slot = torch.arange(scores.shape[2], device=scores.device)
        newer = _RECENT * (1 + (slot - recent) / scores.shape[2])
        scores = torch.where(slot >= recent, newer.to(scores.dtype), scores)
        scores = torch.where(slot < sinks[:, None, None], float("inf"), scores)
        width = min(width, scores.shape[2])
        index = ops.top_pages(scores, lens, self.budgets(at), 1, sinks=0, least=1, width=width)
        return Selection(index, "slot")

    def _width(self, at: LayerStep) -> int | None:
        """The most tokens that a row of this step reads; None when all rows are read whole."""
        budget, exceeds = self.limits(at)
        return max(1, budget) if exceeds else None
