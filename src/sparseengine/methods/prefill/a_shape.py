"""A-shape: the first tokens and the nearest ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.prefill import PrefillTraits
from sparseengine.methods.knobs import knob
from sparseengine.methods.prefill.base import BlockPattern, Grid, PatternConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AShapeConfig(PatternConfig):
    """Knobs of the A-shape."""

    sink: int = knob(128, "first tokens that every query reads", low=0, high=1 << 30)
    window: int = knob(3968, "tokens before a query that it reads at least", low=0, high=1 << 30)


class AShape(BlockPattern):
    """Reads the first `sink` tokens and the nearest `window`, in whole blocks (arXiv:2407.02490).

    The static pattern that MInference calls A-shape, for all heads alike. It looks at no query and
    costs nothing to choose. A query reads the blocks that hold one of its `window` predecessors or
    one of the sinks. Sizes are the authors' defaults (128 and 3,968 tokens); their tri-shape, which
    adds a dense end of the prompt, is what `last` makes of every pattern here.
    """

    name = "a_shape"
    config_class = AShapeConfig
    looks = False
    traits = PrefillTraits(invariant="always")

    def choose(self, at: LayerStep, chunk: int, grid: Grid) -> Tensor:
        near: Tensor = grid.columns + grid.block > grid.first_slot - self.config.window
        sink: Tensor = grid.columns < self.config.sink
        return near | sink
