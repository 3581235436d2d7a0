"""Quest (arXiv:2406.10774): bounds of a page's keys tell how much attention it can receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from sparseengine import ops
from sparseengine.core.method import LayerStep, SealedPages
from sparseengine.core.specs import AuxSpec, Per
from sparseengine.methods.families import SelectionConfig, SelectionMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestConfig(SelectionConfig):
    """Knobs of Quest."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"dense_layers": 2, "sink_pages": 0, "min_pages": 1},
        }
    )


class Quest(SelectionMethod):
    """Reads the pages whose upper bound of q.k is largest (arXiv:2406.10774); evicts nothing.

    The bound is sum_d max(q_d kmin_d, q_d kmax_d) over the channel-wise extremes of the page's
    rotated keys, kept in K's dtype so that nothing is rounded inwards. Deviations: one page list
    per KV head (the largest bound of its query group; the authors choose per query head); the open
    page and the sink page are forced, which the authors do not do.
    """

    name = "quest"
    config_class = QuestConfig

    def aux(self) -> tuple[AuxSpec, ...]:
        return tuple(
            AuxSpec(name=name, per=Per.PAGE, shape=("head_dim",), dtype=self.model.dtype)
            for name in ("kmin", "kmax")
        )

    def seal(self, pages: SealedPages) -> None:
        """Summarise pages that became full: keys [N, U, P, D] -> kmin, kmax [N, U, D]."""
        if not self._acts.isdisjoint(pages.layers):
            aux = pages.aux
            ops.page_bounds(pages.payload[0], pages.pages, aux["kmin"], aux["kmax"])

    def mixed_budget(self, budget: int, longest: int) -> int | None:
        """Rows within their budgets are read whole, so there must be room for whole rows."""
        return max(budget, longest) if self.fixed_budget is None else None

    def score_pages(self, at: LayerStep, table: Tensor) -> Tensor:
        return ops.page_scores(at.q, at.aux("kmin"), at.aux("kmax"), table, at.spec.group_size)
