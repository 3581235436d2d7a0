"""What an attention backend must answer and do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparseengine.core.cache import CacheManager
from sparseengine.core.plan import StepPlan
from sparseengine.core.specs import LayerSpec
from sparseengine.core.view import AttentionView


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCaps:
    """Probed facts about a device; choices are made from these, never from a device's name."""

    kind: Literal["cpu", "cuda"]
    arch: tuple[int, int] | None = None
    multiprocessors: int = 0
    memory_bytes: int = 0
    has_triton: bool = False
    interpreted: bool = False
    cudnn: int = 0  # version, 0 without it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed:
    """Host facts a route is chosen by; hashable. block_masks: its views carry some."""

    layer: LayerSpec
    dtype: torch.dtype
    page_size: int
    per_head: bool
    codec: tuple[str, ...] = ()
    deterministic: bool = False
    block_masks: bool = False


@dataclass(frozen=True, slots=True)
class Support:
    """An answer with its reason, which is filled on yes, too: routes are explained, not guessed."""

    ok: bool
    reason: str


class AttentionBackend(Protocol):
    """Runs one view of one layer. Knows no method.

    graph_safe: `run` never waits for the device, so that a captured graph can hold it.
    """

    name: str
    graph_safe: bool

    def supports(self, need: AttentionNeed, device: DeviceCaps) -> Support: ...

    def plan(self, plan: StepPlan, cache: CacheManager) -> None:
        """Host, once per step."""
        ...

    def run(
        self, q: Tensor, view: AttentionView, layer: LayerSpec, scores: Tensor | None
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv], in q's dtype."""
        ...
