"""KeyDiff (arXiv:2504.15364): keys unlike the mean key direction matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from sparseengine.core.method import LayerStep
from sparseengine.methods.families import EvictionConfig, EvictionMethod
from sparseengine.methods.knobs import knob
from sparseengine.methods.knorm import content_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiffConfig(EvictionConfig):
    """Knobs of KeyDiff."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "kvpress": {"sink": 0, "recent": 0},
            "paper": {"sink": 0, "recent": 0, "block_tokens": 128},
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


class KeyDiff(EvictionMethod):
    """Retains the keys least similar to the mean key direction of their head (arXiv:2504.15364).

    Looks at no query. Deviations: one eviction when the prompt ends unless `block_tokens` is set;
    sinks and recent tokens are forced. Blocks end at multiples of `block_tokens` whatever the chunk
    size, and the anchor is recomputed over survivors and block.
    """

    name = "keydiff"
    config_class = KeyDiffConfig
    keys_suffice = True

    def prefill_block(self) -> int | None:
        return self.config.block_tokens or None

    def score(self, at: LayerStep, chunk: int) -> Tensor:
        """Negative cosine to the mean direction: fp32 [Hkv, L]. Slots past a row are zero keys."""
        unit = normalize(content_keys(at, chunk), dim=-1)  # [H, L, D]
        anchor = normalize(unit.sum(1, keepdim=True), dim=-1)
        return -(unit * anchor).sum(-1)
