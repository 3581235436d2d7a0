"""Random attention views for tests: ragged rows in NaN-poisoned pools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView, HostRows, Segment


@dataclass(frozen=True)
class Shape:
    """kv heads, query heads per KV head, head dim, page size, layout of tables and pools.

    layout: "shared" (G = 1, Hs = H), "head" (G = H, Hs = 1), "picked" (G = H, Hs = H).
    """

    heads: int = 2
    group: int = 4
    dim: int = 16
    page: int = 16
    layout: str = "head"
    value_dim: int = 0

    @property
    def dv(self) -> int:
        return self.value_dim or self.dim


class Rows:
    """Rows of given lengths in freshly drawn, NaN-poisoned pools."""

    def __init__(
        self, shape: Shape, lens: list[list[int]], dtype: torch.dtype, device: str, dims: list[int]
    ) -> None:
        groups = len(lens[0])
        page, width = shape.page, max(1, max(-(-n // shape.page) for row in lens for n in row))
        num_pages = len(lens) * groups * width + 3
        inner = 1 if shape.layout == "head" else shape.heads
        self.pools = [
            torch.full((num_pages, inner, page, d), float("nan"), dtype=dtype, device=device)
            for d in dims
        ]
        free = torch.randperm(num_pages).tolist()
        self.table = torch.randint(0, num_pages, (len(lens), groups, width), dtype=torch.int32)
        for s, row in enumerate(lens):
            for g, n in enumerate(row):
                pages = torch.tensor([free.pop() for _ in range(-(-n // page))], dtype=torch.int64)
                self.table[s, g, : len(pages)] = pages.int()
                at = torch.arange(n)
                for pool in self.pools:
                    head = slice(None) if groups == 1 else (0 if inner == 1 else g)
                    size = (n, inner, pool.shape[3]) if groups == 1 else (n, pool.shape[3])
                    values = torch.randn(size, device=device).to(dtype)
                    pool[pages[at // page].to(device), head, (at % page).to(device)] = values
        self.table = self.table.to(device)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)


def spans_view(
    shape: Shape,
    queries: list[int],
    lens: list[list[list[int]]],
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
    values_in_keys: bool = False,
) -> AttentionView:
    """A view of len(lens) segments; lens[segment][span] has one length per row group."""
    dims = [shape.dim] if values_in_keys else [shape.dim, shape.dv]
    segments = []
    for per_span in lens:
        rows = Rows(shape, per_span, dtype, device, dims)
        segments.append(
            Segment(
                payload=tuple((pool,) for pool in rows.pools),
                codec=(),
                values_in_keys=values_in_keys,
                table=rows.table,
                lens=rows.lens,
                page_size=shape.page,
            )
        )
    cu_q = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    singles = next((i for i, n in enumerate(queries) if n != 1), len(queries))
    longest = max(
        sum(part[s][min(g, len(part[s]) - 1)] for part in lens)
        for s in range(len(queries))
        for g in range(shape.heads)
    )
    return AttentionView(tuple(segments), cu_q, window, singles, max(queries), max(longest, 1))


def hosted(view: AttentionView, queries: list[int], first: int = 0) -> AttentionView:
    """The view with what the host knows of it."""
    starts = tuple(accumulate(queries, initial=0))
    return replace(view, host=HostRows(starts, view.segments[0].lens.cpu().numpy(), first))


def layer_of(shape: Shape, window: int | None = None, latent: bool = False) -> LayerSpec:
    kind = LayerKind.LATENT if latent else LayerKind.WINDOW if window else LayerKind.FULL
    return LayerSpec(
        kind=kind,
        q_heads=shape.heads * shape.group,
        kv_heads=shape.heads,
        head_dim=shape.dim,
        value_dim=shape.dv,
        window=window,
    )
