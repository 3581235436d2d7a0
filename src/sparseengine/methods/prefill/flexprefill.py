"""FlexPrefill (arXiv:2502.20766): each head, for each input, takes lines or pooled blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparseengine.core.method import LayerStep
from sparseengine.core.prefill import PrefillTraits
from sparseengine.methods.knobs import knob
from sparseengine.methods.prefill.base import BlockPattern, Grid, PatternConfig, largest
from sparseengine.methods.prefill.lines import lines, pooled, read_lines
from sparseengine.methods.prefill.pooling import block_mass, mean_keys, pooled_mass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexPrefillConfig(PatternConfig):
    """Knobs of FlexPrefill."""

    gamma: float = knob(0.9, "attention mass that a head has to cover", low=0.0, high=1.0)
    tau: float = knob(
        0.1, "divergence below which a head takes pooled blocks; 0: never", low=0.0, high=2.0
    )
    min_budget: int = knob(1024, "fewest tokens of each kind of line", low=1, high=1 << 30)
    max_budget: int = knob(1 << 30, "most tokens of each kind of line", low=1, high=1 << 30)


class Sides(NamedTuple):
    """How well pooling foresees the newest queries' attention over blocks: fp32 [Hq, nK] each."""

    estimate: Tensor
    truth: Tensor


class FlexPrefill(BlockPattern):
    """Reads, per query head, pooled blocks or lines, as many as cover `gamma` of the attention.

    The newest block of queries attends to all keys before it. If pooled attention (the softmax of
    mean query times mean keys) foresees its mass over blocks, to a Jensen-Shannon distance below
    `tau`, the head is query-aware: the pairs of blocks of largest pooled attention are read until
    they hold `gamma` of it. Any other head reads lines: of columns and of diagonals each as many as
    hold `gamma` of the mass, at least `min_budget` and at most `max_budget` tokens. The first
    block, the nearest diagonal and `min_budget` tokens of lines are read by every head.

    Source: arXiv:2502.20766 and the authors' code (block 128, gamma 0.9 or 0.95, tau 0.1,
    min_budget 512 to 1,024). Deviations: a chunk of a longer prompt looks at its own newest queries
    and covers `gamma` of its own pairs of blocks; gamma 1 reads everything.
    """

    name = "flexprefill"
    config_class = FlexPrefillConfig
    traits = PrefillTraits(invariant="no")

    def choose(self, at: LayerStep, chunk: int, grid: Grid) -> Tensor | None:
        gamma, block = self.config.gamma, grid.block
        if gamma >= 1:
            return None
        keys = at.gather("keys", chunk)  # [Hkv, L, D]
        count = min(block, grid.queries)
        found = lines(at, chunk, count, grid, keys)
        columns, distances = pooled(found.vertical, block), pooled(found.slash, block)
        sides = self._sides(at, chunk, grid, keys, columns / count, count)
        for mass in (columns, distances):
            mass[:, 0] = float("inf")
        least, most = -(-self.config.min_budget // block), -(-self.config.max_budget // block)
        size = [self._count(m, count, block).clamp(least, max(least, most)) for m in found]
        by_lines = read_lines(largest(columns, size[0]), largest(distances, size[1]), grid)
        if self.config.tau <= 0:
            return by_lines
        fewest = read_lines(largest(columns, least), largest(distances, least), grid)
        by_query = fewest | self._pairs(at, chunk, grid, keys)
        is_aware = distance(sides) < self.config.tau
        return torch.where(is_aware[:, None, None], by_query, by_lines)

    def _count(self, mass: Tensor, count: int, block: int) -> Tensor:
        """Blocks of lines that hold gamma of the mass [Hq, n]: int64 [Hq, 1]."""
        sums = mass.sort(-1, descending=True).values.cumsum(-1)
        columns: Tensor = (sums < self.config.gamma * count).sum(-1, keepdim=True)
        return columns // block + 1

    def _sides(
        self, at: LayerStep, chunk: int, grid: Grid, keys: Tensor, truth: Tensor, count: int
    ) -> Sides:
        """The newest queries' attention over blocks, foreseen and seen."""
        hi = at.span(chunk)[1]
        query = at.q[hi - count : hi].mean(0, dtype=truth.dtype)[:, None]  # [Hq, 1, D]
        seen = grid.seen(at.spec.q_heads)[:, -1:]
        means = mean_keys(at, chunk, grid, keys)
        return Sides(pooled_mass(at, query, means, seen)[:, 0], truth)

    def _pairs(self, at: LayerStep, chunk: int, grid: Grid, keys: Tensor) -> Tensor:
        """The pairs of blocks that hold gamma of all pooled attention: bool [Hq, nQ, nK]."""
        mass = block_mass(at, chunk, grid, keys)
        ordered, order = mass.flatten(1).sort(stable=True, dim=-1, descending=True)
        before = pad(ordered.cumsum(-1)[:, :-1], (1, 0))
        enough = (before < self.config.gamma * grid.num_rows) & (ordered > 0)
        chosen: Tensor = torch.zeros_like(enough).scatter_(-1, order, enough)
        return torch.unflatten(chosen, 1, list(mass.shape[1:]))


def distance(sides: Sides) -> Tensor:
    """Jensen-Shannon distance (the root of the divergence in nats): [Hq]."""
    middle = (sides.estimate + sides.truth) / 2
    parts = [torch.special.xlogy(p, p) - torch.special.xlogy(p, middle) for p in sides]
    divergence: Tensor = (parts[0] + parts[1]).sum(-1) / 2
    return divergence.clamp_min(0).sqrt()
