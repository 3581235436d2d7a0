"""What the patterns share: blocks anchored at positions, causality, dense tails, pooled products.

  key blocks   0     1     2     3        Blocks of queries are anchored at the prompt's start, so
query 0      [ x ]                        that cuts of chunks that are multiples of the block do
block 1      [ x | x ]                    not move them. As long as nothing was evicted, slots are
      2      [ x |   | x ]                positions; else the diagonal may touch one block more.
      3      [ x | x | x | x ]  <- holds one of the prompt's `last` queries: reads everything
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.view import BlockMask
from sparseengine.methods.knobs import MethodConfig, knob

TILE = 1 << 25  # logits of an estimate that exist at one time
_TENSORS = 4  # of that size, at most
_BYTES_PER_BLOCK = 48  # of a pair of blocks of one head: masses, their order, masks, lists


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternConfig(MethodConfig):
    """Knobs of every pattern."""

    min_tokens: int = knob(8192, "prompts shorter than this run dense", low=0, high=1 << 30)
    last: int = knob(128, "newest queries of the prompt that read everything", low=1, high=1 << 20)
    block: int = knob(128, "queries and keys per block", choices=(16, 32, 64, 128))


@dataclass(frozen=True)
class Grid:
    """Where the blocks of one chunk's queries and of its rows' keys lie.

    block: B. offset: of the first query within its block. queries: n. start: position of the first
    query. lens: row lengths, one or one per KV head; all bounds below are [G, nQ] or [G, nQ, nK].
    """

    block: int
    start: int
    queries: int
    lens: tuple[int, ...]
    device: torch.device

    @property
    def offset(self) -> int:
        return self.start % self.block

    @property
    def num_rows(self) -> int:
        """nQ."""
        return -(-(self.offset + self.queries) // self.block)

    @property
    def num_columns(self) -> int:
        """nK."""
        return -(-max(self.lens) // self.block)

    @cached_property
    def first_query(self) -> Tensor:
        """int64 [nQ]: the first query of each block, of those in the chunk."""
        rows = torch.arange(self.num_rows, device=self.device)
        return (rows * self.block - self.offset).clamp_min(0)

    @cached_property
    def last_query(self) -> Tensor:
        """int64 [nQ]: the last one."""
        rows = torch.arange(1, self.num_rows + 1, device=self.device)
        return (rows * self.block - self.offset).clamp_max(self.queries) - 1

    @cached_property
    def old(self) -> Tensor:
        """int64 [G, 1]: keys of the row that are older than the chunk."""
        if len(set(self.lens)) == 1:
            return torch.full((1, 1), self.lens[0] - self.queries, device=self.device)
        return torch.tensor(self.lens, device=self.device)[:, None] - self.queries

    @property
    def first_slot(self) -> Tensor:
        """int64 [G, nQ, 1]: the row slot of each block's first query."""
        return (self.old + self.first_query)[..., None]

    @property
    def last_slot(self) -> Tensor:
        return (self.old + self.last_query)[..., None]

    @cached_property
    def columns(self) -> Tensor:
        """int64 [nK]: the first slot of each block of keys."""
        return torch.arange(self.num_columns, device=self.device) * self.block

    @cached_property
    def causal(self) -> Tensor:
        """bool [G, nQ, nK]: blocks with a key that one of the queries sees."""
        return self.columns <= self.last_slot

    @cached_property
    def diagonal(self) -> Tensor:
        """bool [G, nQ, nK]: blocks that hold the queries' own slots."""
        return self.causal & (self.columns + self.block > self.first_slot)

    def seen(self, heads: int) -> Tensor:
        """bool [heads, nQ, nK], `causal` for query heads (or 1, when all rows are alike)."""
        return by_head(self.causal, heads)


def by_head(x: Tensor, heads: int) -> Tensor:
    """[G, ...] -> [heads, ...]: row groups to query heads, in order; one group stays as it is."""
    return x if x.shape[0] in (1, heads) else x.repeat_interleave(heads // x.shape[0], 0)


class BlockPattern(PrefillPattern):
    """A pattern that is a choice of blocks: a subclass writes `choose`.

    looks: whether it looks at queries and keys.
    """

    config_class = PatternConfig
    looks: ClassVar[bool] = True

    @property
    def block(self) -> int:
        block: int = self.config.block
        return block

    def choose(self, at: LayerStep, chunk: int, grid: Grid) -> Tensor | None:
        """bool [Hq or G, nQ, nK]: blocks to read. What lies behind a query is cut off afterwards,
        its own blocks are added. None reads everything."""
        raise NotImplementedError

    def pattern(self, at: LayerStep, chunk: int) -> BlockMask | None:
        part = at.plan.chunks[chunk]
        prompt, config = part.request.prompt_len, self.config
        dense_from = (prompt - config.last) // self.block * self.block  # first dense block's start
        if prompt < config.min_tokens or part.start >= dense_from:
            return None
        grid = Grid(self.block, part.start, len(part.tokens), at.lens(chunk), at.q.device)
        chosen = self.choose(at, chunk, grid)
        if chosen is None:
            return None
        heads = at.spec.q_heads if max(len(chosen), len(grid.causal)) > 1 else 1
        is_dense = part.start + grid.last_query >= prompt - config.last  # [nQ]
        mask = by_head(chosen, heads) | by_head(grid.diagonal, heads) | is_dense[:, None]
        return BlockMask(mask & grid.seen(heads), grid.block, grid.offset)

    def scratch_bytes(self, queries: int, length: int) -> int:
        layers = [spec for spec in self.model.layers if spec.kind in self.traits.kinds]
        if length < self.config.min_tokens or not layers:
            return 0
        heads = max(spec.q_heads for spec in layers) if self.looks else 1
        blocks = (queries // self.block + 2) * (length // self.block + 1)
        found = heads * blocks * _BYTES_PER_BLOCK
        if self.looks:
            channels = max(spec.kv_heads * spec.head_dim for spec in layers)
            found += 3 * length * channels * self.model.dtype.itemsize  # gathered, padded, in order
            found += _TENSORS * 4 * min(TILE, max(queries, 128) * length)
        return found


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [m, D] . keys [n, D] -> [m, n], summed and returned in fp32 (fp64 for fp64)."""
    if queries.is_cuda and queries.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(queries, keys.T, out_dtype=torch.float32)
    wide = torch.promote_types(queries.dtype, torch.float32)
    return queries.to(wide) @ keys.to(wide).T


def largest(mass: Tensor, count: Tensor | int) -> Tensor:
    """bool like mass [..., n]: the `count` ([..., 1] or one number) largest, ties by position."""
    order = mass.sort(stable=True, dim=-1, descending=True).indices
    rank = torch.arange(mass.shape[-1], device=mass.device).expand_as(order)
    return torch.zeros_like(order).scatter_(-1, order, rank) < count


def covering(mass: Tensor, total: Tensor, forced: Tensor) -> Tensor:
    """bool like mass [..., n]: `forced` and, largest first, all before which less than `total` is.

    mass must not be negative. total [..., 1] is what the kept mass has to reach; entries without
    mass are never added.
    """
    first = mass.masked_fill(forced, float("inf"))
    order = first.sort(stable=True, dim=-1, descending=True).indices
    ordered = mass.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(forced).scatter_(-1, order, (before < total) & (ordered > 0))
    return kept | forced
