"""Sparse prefill: an axis of its own beside the method of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sparseengine.core.method import LayerStep
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.core.view import BlockMask


@dataclass(frozen=True, slots=True)
class PrefillTraits:
    """Static facts about a pattern.

    invariant: what results depend on beside the request. "always": how the prompt is chunked does
      not matter. "blocks": nor does it if chunks end at multiples of the block, as they do wherever
      a step has room for one. "no": the pattern looks at the newest queries of each chunk.
    kinds: the layer kinds it acts on; layers of other kinds stay dense.
    """

    invariant: str = "blocks"
    kinds: frozenset[LayerKind] = frozenset({LayerKind.FULL})


class PrefillPattern:
    """Chooses the blocks of keys that prompt queries read. Evicts nothing; goes with any method.

    One instance serves every request with the same knobs and keeps no state.
    """

    name: ClassVar[str]
    traits: ClassVar[PrefillTraits] = PrefillTraits()
    config_class: ClassVar[type]

    def __init__(self, config: Any, model: ModelSpec) -> None:
        self.config = config
        self.model = model

    @property
    def block(self) -> int:
        """Queries and keys per block; 1 if it has none."""
        return 1

    def pattern(self, at: LayerStep, chunk: int) -> BlockMask | None:
        """Device, before attention, for chunks of a prompt: what they read; None is everything."""
        return None

    def scratch_bytes(self, queries: int, length: int) -> int:
        """About what choosing takes at one layer for a chunk, behind a row of `length` tokens."""
        return 0
