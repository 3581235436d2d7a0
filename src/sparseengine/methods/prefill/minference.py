"""MInference (arXiv:2407.02490): vertical and slash lines of the newest queries, for each head."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.prefill import PrefillTraits
from sparseengine.core.specs import ModelSpec
from sparseengine.errors import RequestError
from sparseengine.methods.knobs import knob
from sparseengine.methods.prefill.base import BlockPattern, Grid, PatternConfig, by_head, largest
from sparseengine.methods.prefill.lines import lines, pooled, read_lines
from sparseengine.methods.prefill.pooling import block_mass

LINES, A_SHAPE, BLOCKS = "vertical_and_slash", "stream_llm", "block_sparse"
_FORMAT = (
    "a list with an object per layer, head number -> [kind, size, size], where kind is "
    f"{LINES} (vertical, slash), {A_SHAPE} (first, near) or {BLOCKS} (sizes are ignored)"
)
_LARGEST_FILE = 8 << 20
_BLOCK_TOKENS = 6400  # of keys that a head of kind BLOCKS reads, as the authors' code has it


@dataclass(frozen=True, slots=True, kw_only=True)
class MInferenceConfig(PatternConfig):
    """Knobs of MInference."""

    vertical: int = knob(1000, "columns that a head reads, in tokens", low=1, high=1 << 30)
    slash: int = knob(6096, "diagonals that a head reads, in tokens", low=1, high=1 << 30)
    queries: int = knob(64, "newest queries of a chunk that choose the lines", low=1, high=1024)
    patterns: str = knob("", "JSON file with a pattern for each layer and head; none: lines")


class Heads(NamedTuple):
    """Patterns of a layer's query heads: their kinds, and two sizes in tokens, int64 [Hq, 1]."""

    kinds: tuple[str, ...]
    first: Tensor
    second: Tensor


class MInference(BlockPattern):
    """Reads, per query head, the vertical and slash lines of the newest queries' attention.

    The newest `queries` queries of a chunk attend to all keys before them. Summed along columns and
    along diagonals, the blocks of most mass are taken: `vertical` tokens of columns and `slash`
    tokens of diagonals, the first block and the nearest diagonal always among them. All blocks of
    queries of the chunk read the keys that these lines touch. No search for a pattern per head is
    part of this: all heads take lines of the authors' default sizes, unless `patterns` names a file
    in their format, whose kinds (lines, A-shape, blocks of largest pooled logits) are all read.

    Source: arXiv:2407.02490 and the authors' code (64 queries, 1,000 and 6,096, 30 columns and 100
    diagonals forced). Deviations: lines are chosen and read in whole blocks, which bounds what is
    read, where single columns of the authors are gathered one by one; a chunk of a longer prompt
    looks at its own newest queries.
    """

    name = "minference"
    config_class = MInferenceConfig
    traits = PrefillTraits(invariant="no")

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._given = _read(config.patterns, model) if config.patterns else None
        self._heads: dict[tuple[int, torch.device], Heads] = {}

    def choose(self, at: LayerStep, chunk: int, grid: Grid) -> Tensor:
        heads = self._of(at)
        keys = at.gather("keys", chunk)  # [Hkv, L, D]
        found = self._lines(at, chunk, grid, keys, heads)
        if len(set(heads.kinds)) == 1 and heads.kinds[0] == LINES:
            return found
        kind = {name: _is(heads.kinds, name, keys.device) for name in (A_SHAPE, BLOCKS)}
        first_slot = by_head(grid.first_slot, at.spec.q_heads)
        near = grid.columns + grid.block > first_slot - heads.second[..., None]
        shape = near | (grid.columns < heads.first[..., None])
        mass = block_mass(at, chunk, grid, keys)
        blocks = largest(mass, -(-_BLOCK_TOKENS // grid.block))
        found = torch.where(kind[A_SHAPE], shape, found)
        return torch.where(kind[BLOCKS], blocks, found)

    def _lines(self, at: LayerStep, chunk: int, grid: Grid, keys: Tensor, heads: Heads) -> Tensor:
        """bool [Hq, nQ, nK] of vertical and slash lines."""
        count = min(self.config.queries, grid.queries)
        found = lines(at, chunk, count, grid, keys)
        block = grid.block
        vertical, slash = pooled(found.vertical, block), pooled(found.slash, block)
        for mass in (vertical, slash):
            mass[:, 0] = float("inf")
        columns = largest(vertical, -(-heads.first // block))
        distances = largest(slash, -(-heads.second // block))
        return read_lines(columns, distances, grid)

    def _of(self, at: LayerStep) -> Heads:
        """The patterns of a layer's heads, on the device; made once."""
        key = (at.layer, at.q.device)
        if key not in self._heads:
            default = (LINES, self.config.vertical, self.config.slash)
            given = {} if self._given is None else self._given[at.layer]
            rows = [given.get(h, default) for h in range(at.spec.q_heads)]
            sizes = torch.tensor([row[1:] for row in rows], device=at.q.device)
            kinds = tuple(row[0] for row in rows)
            self._heads[key] = Heads(kinds, sizes[:, :1], sizes[:, 1:])
        return self._heads[key]


def _is(kinds: tuple[str, ...], name: str, device: torch.device) -> Tensor:
    """bool [Hq, 1, 1]."""
    return torch.tensor([kind == name for kind in kinds], device=device)[:, None, None]


def _read(path: str, model: ModelSpec) -> list[dict[int, tuple[str, int, int]]]:
    """The patterns of a file, one mapping per layer; raises `RequestError`.

    One message for all that may be wrong, so that it tells nothing of a file that holds none.
    """
    found: list[dict[int, tuple[str, int, int]]] = []
    try:
        file = Path(path)
        if file.is_file() and file.stat().st_size <= _LARGEST_FILE:
            data = json.loads(file.read_text(encoding="utf-8"))
            found = [{int(h): _entry(value) for h, value in layer.items()} for layer in data]
    except (
        OSError,
        ValueError,
        AttributeError,
        TypeError,
        LookupError,
        OverflowError,
        RecursionError,
    ):
        found = []
    heads = [spec.q_heads for spec in model.layers]
    fits = len(found) == len(heads) and all(
        0 <= head < count for layer, count in zip(found, heads, strict=True) for head in layer
    )
    if not fits:
        raise RequestError(
            f"sparse knob patterns={path!r} is not allowed; it must be a JSON file with {_FORMAT}; "
            f"this model has {len(heads)} layers with {max(heads, default=0)} query heads"
        )
    return found


def _entry(value: Any) -> tuple[str, int, int]:
    kind, first, second = value[0], int(value[1]), int(value[2])
    if kind not in (LINES, A_SHAPE, BLOCKS) or first < 0 or second < 0:
        raise ValueError(f"{value!r} is no pattern")
    return kind, first, second
