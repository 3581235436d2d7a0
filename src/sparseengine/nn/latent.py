"""Multi-head latent attention: one narrow tensor per token is stored, all heads are read from it.

Source: DeepSeek-V2 (arXiv:2405.04434). A token's row is its normed latent followed by one rotated
key that all heads share. There are two ways to attend, equal up to rounding:

    absorbed   queries move into the latent space; attention is multi-query, its values are the
               keys' first channels, and its result moves back to the heads. Reads one row a token.
    expanded   the rows become per-head keys and values; attention is ordinary, with narrower heads.

Decoding is always absorbed; `expansion_pays` decides for a step's other chunks. Rows are never
rotated again: after an eviction they keep the positions they were written with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sparseengine import ops
from sparseengine.core.context import StepContext
from sparseengine.core.method import LayerStep
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import Wanted
from sparseengine.nn.linear import Linear, MergedLinear
from sparseengine.nn.norm import RMSNorm
from sparseengine.nn.rope import Rotation
from sparseengine.ops.dense import LONGEST_MADE, UNIT
from sparseengine.ops.parts import Part, most_scratch, padded, result_bytes

_NORM_EPS = 1e-6  # of the norms inside the block, whatever the config says of the others
_EXPANDED_BYTES = 1 << 29  # keys and values of a part of a row, some heads at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDims:
    """Sizes of a latent attention block, all rank-local.

    nope, rope: channels of a head's query without and with rotation. value: of its values. kv_rank:
    channels of the latent. q_rank: of the compressed query, None where queries are not compressed.
    """

    heads: int
    nope: int
    rope: int
    value: int
    kv_rank: int
    q_rank: int | None = None

    @property
    def query(self) -> int:
        """Channels of a head's query."""
        return self.nope + self.rope

    def layer(self, scale_factor: float = 1.0) -> LayerSpec:
        """The layer as cache and backends see it; `scale_factor` multiplies the softmax scale."""
        return LayerSpec(
            kind=LayerKind.LATENT,
            q_heads=self.heads,
            kv_heads=1,
            head_dim=self.kv_rank + self.rope,
            value_dim=self.kv_rank,
            scale=self.query**-0.5 * scale_factor,
        )


def expansion_pays(chunks: Iterable[tuple[int, int]], dims: LatentDims) -> bool:
    """Whether these chunks of (queries n, keys L) cost fewer operations expanded than absorbed.

    Per head, in multiply-adds: n (L - n / 2) pairs of a query and a key it sees take
    2 kv_rank + rope channels absorbed and nope + rope + value expanded; a result back from the
    latent space takes kv_rank x value a query, and expanding takes kv_rank x (nope + value) a key.
    Ties, and no chunks at all, are absorbed.
    """
    absorbed = expanded = 0.0
    for queries, keys in chunks:
        pairs = queries * (keys - queries / 2)
        absorbed += pairs * (2 * dims.kv_rank + dims.rope) + queries * dims.kv_rank * dims.value
        expanded += pairs * (dims.query + dims.value)
        expanded += keys * dims.kv_rank * (dims.nope + dims.value)
    return expanded < absorbed


class HeadsUp(Linear):
    """latent -> each head's (key without rotation, value); `weight` [H (nope + value), kv_rank].

    Its two halves, per head, are also what moves queries into the latent space and results back,
    so that the plain weight is kept on every device.
    """

    def __init__(
        self, dims: LatentDims, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        rows = dims.heads * (dims.nope + dims.value)
        super().__init__(dims.kv_rank, rows, dtype=dtype, device=device)
        self.dims = dims

    def prepare(self) -> None:
        """Nothing: a packed weight has no halves."""

    def per_head(self) -> Tensor:
        """The weight as [H, nope + value, kv_rank]."""
        return self.weight.view(self.dims.heads, -1, self.dims.kv_rank)

    def absorb(self, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Queries without rotation [T, H, nope] -> [T, H, kv_rank], into `out` if there is one."""
        return self._by_head(q, self.per_head()[:, : self.dims.nope], out)

    def values(self, mixed: Tensor) -> Tensor:
        """Results in the latent space [T, H, kv_rank] -> [T, H, value]."""
        return self._by_head(mixed, self.per_head()[:, self.dims.nope :].mT)

    def expansion(self, first: int, count: int) -> Tensor:
        """Weight [count, query + value, kv_rank + rope] that makes rows keys and values of heads.

        It passes the rotated key on to every head, so that one product makes whole keys.
        """
        dims, own = self.dims, self.per_head()[first : first + count]
        whole = own.new_zeros(len(own), dims.query + dims.value, dims.kv_rank + dims.rope)
        whole[:, : dims.nope, : dims.kv_rank] = own[:, : dims.nope]
        whole[:, dims.nope : dims.query, dims.kv_rank :].diagonal(dim1=1, dim2=2).fill_(1)
        whole[:, dims.query :, : dims.kv_rank] = own[:, dims.nope :]
        return whole

    def _by_head(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x [T, H, m], weight [H, m, n] -> [T, H, n]; see `Linear.row_tile`."""
        num_rows = x.shape[0]
        y = x.new_empty(num_rows, weight.shape[0], weight.shape[2]) if out is None else out
        tile = self.row_tile
        if tile is None:
            torch.bmm(x.transpose(0, 1), weight, out=y.transpose(0, 1))
            return y
        for start in range(0, num_rows, tile):
            rows = x[start : start + tile]
            full = x.new_zeros(tile, *x.shape[1:])
            full[: len(rows)] = rows
            product = torch.bmm(full.transpose(0, 1), weight).transpose(0, 1)
            y[start : start + tile] = product[: len(rows)]
        return y


class LatentAttention(nn.Module):
    """Query and latent projections, rotation, attention either way, output projection.

    Methods see absorbed queries [T, H, kv_rank + rope] and rows as keys: their products are the
    heads' attention logits. `bias` is that of the compressing and of the output projection.
    """

    def __init__(
        self,
        layer: int,
        dims: LatentDims,
        hidden_size: int,
        *,
        scale: float,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.layer, self.dims, self.scale = layer, dims, scale
        row, rank = dims.kv_rank + dims.rope, dims.q_rank
        self.q_a_layernorm: RMSNorm | None = None
        if rank is None:
            self.q_proj = Linear(hidden_size, dims.heads * dims.query, dtype=dtype, device=device)
            self.kv_a_proj_with_mqa = Linear(hidden_size, row, bias, dtype=dtype, device=device)
        else:
            names = ("q_a_proj", "kv_a_proj_with_mqa")
            self.a_proj = MergedLinear(
                hidden_size, (rank, row), bias, names=names, dtype=dtype, device=device
            )
            self.q_a_layernorm = RMSNorm(rank, _NORM_EPS, dtype=dtype, device=device)
            self.q_b_proj = Linear(rank, dims.heads * dims.query, dtype=dtype, device=device)
        self.kv_a_layernorm = RMSNorm(dims.kv_rank, _NORM_EPS, dtype=dtype, device=device)
        self.kv_b_proj = HeadsUp(dims, dtype=dtype, device=device)
        self.o_proj = Linear(dims.heads * dims.value, hidden_size, bias, dtype=dtype, device=device)

    def forward(
        self, hidden: Tensor, rotation: Rotation, ctx: StepContext, wanted: Wanted | None = None
    ) -> Tensor:
        """hidden [T, hidden] -> [T, hidden], or [N, hidden] of the tokens that are wanted."""
        q, row = self._project(hidden)
        nope, rope = torch.split(q, [self.dims.nope, self.dims.rope], dim=-1)  # [T, H, ...]
        row = self._row(row, rotation)
        absorbed = q.new_empty(*q.shape[:2], self.dims.kv_rank + self.dims.rope)
        self.kv_b_proj.absorb(nope, out=absorbed[..., : self.dims.kv_rank])
        turn = rotation.cos, rotation.sin, rotation.interleaved
        ops.rotate_into(absorbed[..., self.dims.kv_rank :], rope, *turn)
        at = ctx.store(self.layer, absorbed, row, row[..., : self.dims.kv_rank])
        singles, chunks = ctx.plan.num_decodes, len(ctx.plan.chunks)
        asking = [len(c.tokens) for c in ctx.plan.chunks] if wanted is None else wanted.counts
        if not self._expands(at, range(singles, chunks), asking):
            out = self.kv_b_proj.values(ctx.read(at, wanted=wanted))
        else:
            parts = [self.kv_b_proj.values(ctx.read(at, singles))] if singles else []
            rope.copy_(absorbed[..., self.dims.kv_rank :])  # `q` is whole now
            parts += [self._expanded(at, q, i, asking[i]) for i in range(singles, chunks)]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        ctx.observe(at)
        mixed: Tensor = self.o_proj(out.flatten(1))
        return mixed

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden] -> queries [T, H, nope + rope], rows [T, kv_rank + rope], raw."""
        if self.q_a_layernorm is None:
            q, row = self.q_proj(hidden), self.kv_a_proj_with_mqa(hidden)
        else:
            q, row = self.a_proj.split(self.a_proj(hidden))
            q = self.q_b_proj(self.q_a_layernorm(q))
        return torch.unflatten(q, -1, (self.dims.heads, self.dims.query)), row

    def _row(self, raw: Tensor, rotation: Rotation) -> Tensor:
        """What the cache stores: normed latent and rotated key, [T, 1, kv_rank + rope]."""
        norm, turn = self.kv_a_layernorm, (rotation.cos, rotation.sin, rotation.interleaved)
        return ops.latent_rows(raw, norm.scale(), norm.eps, *turn)[:, None]

    def _expands(self, at: LayerStep, chunks: range, asking: Sequence[int]) -> bool:
        """One choice for all chunks of a step that are not decodes; asking: queries of each chunk.

        Fixed row tiles promise bits that do not depend on chunking: absorbed always.
        """
        if self.kv_b_proj.row_tile is not None:
            return False
        sizes = ((asking[i], at.lens(i)[0]) for i in chunks)
        return expansion_pays(sizes, self.dims)

    def _expanded(self, at: LayerStep, query: Tensor, chunk: int, asking: int) -> Tensor:
        """Attention of a chunk's newest n = `asking` tokens over its row's expansion.

        query: of the step's tokens, [T, H, D] -> [n, H, value].
        """
        dims, end = self.dims, at.span(chunk)[1]
        first = end - asking
        rows = at.gather("keys", chunk)[0]  # [L, kv_rank + rope]
        step = self._heads_at_once(end - first, rows.shape[0], rows.element_size())
        parts = []
        for h in range(0, dims.heads, step):
            fetch = partial(self._expand, rows, self.kv_b_proj.expansion(h, step))
            here = query[first:end, h : h + step]
            parts.append(ops.attend_row(here, rows.shape[0], dims.value, fetch, self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _expand(self, rows: Tensor, weight: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Keys [n, h, query] and values [n, h, value] of a part; weight is an `expansion`.

        Zero rows behind the row's end expand to zeros.
        """
        mine = padded(rows[part.first : part.first + part.rows], 0, part.rows)
        both = torch.unflatten(mine @ weight.flatten(0, 1).T, 1, weight.shape[:2])
        keys, values = torch.split(both, [self.dims.query, self.dims.value], dim=-1)
        return keys, values

    def _heads_at_once(self, chunk: int, length: int, itemsize: int) -> int:
        keys = most_scratch(chunk, length, UNIT, LONGEST_MADE)[0]
        head_bytes = keys * (self.dims.query + self.dims.value) * itemsize
        return max(1, min(self.dims.heads, _EXPANDED_BYTES // max(head_bytes, 1)))

    def scratch_bytes(self, length: int, chunk: int) -> int:
        """What a chunk in a row of `length` tokens takes: the gathered row, and parts of heads."""
        dims, itemsize = self.dims, self.kv_b_proj.weight.element_size()
        if not length:
            return 0
        row = 3 * length * (dims.kv_rank + dims.rope) * itemsize  # gathered, masked, in order
        heads = self._heads_at_once(chunk, length, itemsize)
        keys, queries, results = most_scratch(chunk, length, UNIT, LONGEST_MADE)
        part = keys * heads * (dims.query + dims.value) * itemsize
        return row + part + result_bytes(queries, heads, dims.value, itemsize, results)
