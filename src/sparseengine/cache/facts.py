"""Numbers of each chunk's request that device work of a step looks up."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseengine.cache.sides import RequestSides
from sparseengine.cache.tables import Index, Ints
from sparseengine.cache.tensors import upload, upload_into
from sparseengine.core.plan import StepPlan


class RequestFacts:
    """Of one step at a time, uploaded when first asked for; or at fixed addresses for captures."""

    def __init__(self, sides: RequestSides, device: torch.device) -> None:
        self._sides, self._device = sides, device
        self.begin(StepPlan(()))

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        self._budgets: Tensor | None = None
        self._rings: Tensor | None = None

    def budgets(self) -> Tensor:
        """int32 [2, S]: the budget of each chunk's request, 0 for none; 1 if it outgrows it."""
        if self._budgets is None:
            self._budgets = upload(self._host_budgets(), self._device)
        return self._budgets

    def rings(self) -> Tensor:
        """int64 [2, S]: where each chunk's request has its rings (0: nowhere), and the position of
        its chunk's first token."""
        if self._rings is None:
            self._rings = upload(self._host_rings(), self._device)
        return self._rings

    def _host_budgets(self) -> Ints:
        requests = [c.request for c in self._plan.chunks]
        both = [[r.budget or 0 for r in requests], [r.outgrows_budget for r in requests]]
        return np.array(both, np.int32)

    def _host_rings(self) -> Index:
        chunks = self._plan.chunks
        both = [[self._sides.ring_slot(c.request.id) for c in chunks], [c.start for c in chunks]]
        return np.array(both, np.int64)

    # ── captured decode steps ────────────────────────────────────────────────────────────────────

    def make_static(self, max_rows: int) -> None:
        self._static_budgets = torch.zeros(2, max_rows, dtype=torch.int32, device=self._device)
        self._static_rings = torch.zeros(2, max_rows, dtype=torch.int64, device=self._device)

    def load_static(self, bucket: int) -> None:
        """Bring the current step to the fixed addresses; padded rows have neither."""
        pad = ((0, 0), (0, bucket - len(self._plan.chunks)))
        upload_into(self._static_budgets[:, :bucket], np.pad(self._host_budgets(), pad))
        if self._sides.has_rings:
            upload_into(self._static_rings[:, :bucket], np.pad(self._host_rings(), pad))

    def clear_static(self, bucket: int, budget: int | None) -> None:
        self._static_budgets[:, :bucket] = budget or 0
        self._static_rings[:, :bucket] = 0

    def use_static(self, bucket: int) -> None:
        """Let what lies at the fixed addresses be the step's, until the next one begins."""
        self._budgets = self._static_budgets[:, :bucket]
        self._rings = self._static_rings[:, :bucket]
