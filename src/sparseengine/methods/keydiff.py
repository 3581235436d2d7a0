"""KeyDiff (arXiv:2504.15364): keys unlike the mean key direction matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Request, StepPlan
from sparseengine.core.specs import ModelSpec
from sparseengine.methods.bursts import INTERVAL_DOC, BurstEviction
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob
from sparseengine.methods.knorm import content_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiffConfig(EvictionConfig):
    """Knobs of KeyDiff."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "kvpress": {"sink": 0, "recent": 0},
            "paper": {"sink": 0, "recent": 0, "block_tokens": 128, "interval": 128},
        }
    )

    recent: int = knob(64, "newest tokens that are always retained", low=0, high=1 << 20)
    block_tokens: int = knob(
        0,
        "evict after every block of this many prompt tokens (the paper: 128), which bounds memory; "
        "0 evicts once, when the prompt ends",
        low=0,
        high=1 << 20,
    )
    interval: int = knob(0, f"{INTERVAL_DOC} (the paper: 128)", low=0, high=1 << 20)


class KeyDiff(BurstEviction):
    """Retains the keys least similar to the mean key direction of their head (arXiv:2504.15364).

    Looks at no query. Deviations: one eviction when the prompt ends unless `block_tokens` and
    `interval` are set; sinks and recent tokens are forced. Blocks end at multiples of
    `block_tokens` whatever the chunk size, and the anchor is recomputed over survivors and block.
    While decoding, `interval` tokens are a block: a row grows to budget + interval and is cut back.
    """

    name = "keydiff"
    config_class = KeyDiffConfig
    traits = EvictionMethod.traits
    keys_suffice = True

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        if config.interval:  # host work behind steps that a graph may run
            acts = replace(self.traits, decode_hooks=True)
            object.__setattr__(self, "traits", acts)

    def watch_decodes(self, at: LayerStep, chunks: list[int]) -> None:
        """Nothing: stored keys are all it looks at."""

    def captured_budget(self, plan: StepPlan, lens: Sequence[int]) -> int | None:
        """None: nothing happens within a step."""
        return None

    def can_shrink(self, request: Request) -> bool:
        return True

    def reusable(self, prompt_len: int) -> int:
        """All of the prompt: stored keys are all it looks at."""
        return 0 if self.config.block_tokens else prompt_len

    def prefill_block(self) -> int | None:
        return self.config.block_tokens or None

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Negative cosine to the mean direction: fp32 [Hkv, L]. Slots past a row are zero keys."""
        unit = normalize(content_keys(at, chunk), dim=-1)  # [H, L, D]
        anchor = normalize(unit.sum(1, keepdim=True), dim=-1)
        return -(unit * anchor).sum(-1)
