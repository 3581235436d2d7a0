"""How a budget is shared out over the rows of a request: a stage of every scored eviction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseengine.methods.budgets import (
    exact_pyramid,
    largest_remainder,
    protect,
    split_protected,
    top_mask,
)

KINDS = ("uniform", "pyramid", "adakv", "page_quanta")
SCOPES = ("layer", "model")
FLOOR = 0.2  # part of the budget that adakv leaves to every row
BETA = 20  # steepness of the pyramid


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who gets which part of rows * budget tokens. Sinks and newest tokens always stay.

    uniform: every row keeps `budget` tokens. pyramid: a layer's rows keep a number that falls
    linearly over the layers (arXiv:2406.02069); budgets sum to layers * budget. adakv: the scope's
    best rows * budget tokens stay, of which each row's best fifth of the budget is safe
    (arXiv:2407.11550, kvpress' form). page_quanta: the tokens of a row, best first, are cut into
    pages; a page is worth the sum of its scores, and the scope's most valuable rows *
    ceil(budget / page) pages stay, so that no slot of a page is wasted.

    scope: the rows that share: those of one layer, or of all layers that store equal sizes. Scores
    of several layers compare if they are attention, less so if they are norms. parts: with adakv in
    a layer, a row's budget is (1 - floor) * its part of the layer's best + floor * budget instead
    (the authors' form).
    """

    kind: str
    scope: str = "layer"
    floor: float = FLOOR
    parts: bool = False

    @property
    def shares(self) -> bool:
        """Whether one row's budget depends on the scores of others."""
        return self.kind in ("adakv", "page_quanta")

    def cap(self, budget: int, page_size: int) -> int:
        """Tokens that the mean row may retain: whole pages where pages are shared out."""
        return -(-budget // page_size) * page_size if self.kind == "page_quanta" else budget

    def layer_budgets(
        self, layers: int, prompt_len: int, budget: int, forced: int
    ) -> tuple[int, ...]:
        """Tokens per row, by acting layer, before rows share. forced: sinks and newest tokens."""
        if self.kind != "pyramid":
            return (budget,) * layers
        return exact_pyramid(layers, prompt_len, budget, min(forced, budget), BETA)

    def held(
        self, rows: Sequence[int], budgets: Sequence[int], page_size: int, grown: int, again: bool
    ) -> int:
        """Mean tokens of acting rows after the cut and `grown` further tokens, whole pages.

        rows: per acting layer. again: rows are cut repeatedly, so that pages may be partly filled.
        """
        budget = -(-sum(r * b for r, b in zip(rows, budgets, strict=True)) // max(1, sum(rows)))
        if self.kind == "pyramid":
            pages = sum(
                r * -(-(b + grown) // page_size) for r, b in zip(rows, budgets, strict=True)
            )
            return -(-pages * page_size // max(1, sum(rows)))
        slack = page_size - 1 if self.kind == "adakv" or (self.shares and again) else 0
        return self.cap(budget, page_size) + grown + slack

    def retain(
        self,
        scores: Tensor,
        lens: Tensor,
        budgets: Sequence[int],
        protected: tuple[int, int],
        page_size: int,
    ) -> Tensor:
        """Which slots stay: fp32 [N, H, L] and int64 [N, H] of N layers -> bool [N, H, L].

        budgets: per layer, from `layer_budgets`. Ties go to the smaller position (or rank of a
        page), then the smaller layer, then the smaller head.
        """
        shielded = protect(scores, lens, *protected)
        budget, shape = max(budgets), shielded.shape
        if not self.shares:
            most = torch.tensor(budgets, device=lens.device)[:, None]
            return top_mask(shielded, torch.minimum(lens, most), budget)
        if self.scope == "model":
            shielded, lens = shielded.flatten(0, 1)[None], lens.flatten()[None]
        elif len(set(budgets)) > 1:  # layer by layer, a small one protecting less
            each = zip(torch.split(scores, 1), torch.split(lens, 1), budgets, strict=True)
            return torch.cat(
                [
                    self.retain(s, n, (b,), split_protected(b, *protected), page_size)
                    for s, n, b in each
                ]
            )
        return self._shared(shielded, lens, budget, page_size).view(shape)

    def _shared(self, shielded: Tensor, lens: Tensor, budget: int, page_size: int) -> Tensor:
        """Rows of each N share: fp32 [N, R, L], int64 [N, R] -> bool [N, R, L]."""
        if self.kind == "adakv":
            share = share_parts if self.parts else share_tokens
            return share(shielded, lens, budget, self.floor)
        pages = -(-budget // page_size)
        return share_pages(shielded, lens, pages, page_size)


def share_tokens(shielded: Tensor, lens: Tensor, budget: int, floor: float) -> Tensor:
    """The best R * budget of each N: fp32 [N, R, L], int64 [N, R] -> bool [N, R, L].

    shielded: what `protect` returns. The best floor * budget slots of each row are safe. Position
    by position, so that ties are fair to rows.
    """
    rows, least = shielded.shape[1], int(budget * floor)
    safe = top_mask(shielded, lens.clamp(max=least), least)
    flat = torch.where(safe, float("inf"), shielded).mT.flatten(1)  # [N, L * R]
    best = top_mask(flat, lens.sum(1).clamp(max=rows * budget), rows * budget)
    return best.view(len(best), -1, rows).mT


def share_parts(shielded: Tensor, lens: Tensor, budget: int, floor: float) -> Tensor:
    """Row budgets from each row's part of the best R * budget, then the row's own best.

    fp32 [N, R, L], int64 [N, R] -> bool [N, R, L]; shielded: what `protect` returns.
    """
    rows = shielded.shape[1]
    free = shielded.masked_fill(shielded == float("inf"), float("-inf"))  # protected ones are apart
    forced = (shielded == float("inf")).sum(2)  # [N, R]
    room = max(0, budget - int(forced.max()))
    best = top_mask(free.mT.flatten(1), rows * room)
    parts = best.view(len(best), -1, rows).sum(1)  # [N, R]
    counts = [
        largest_remainder([(1 - floor) * n + floor * room for n in row], rows * room)
        for row in parts.tolist()
    ]
    extra = torch.tensor(counts, dtype=torch.int64, device=shielded.device)
    return top_mask(shielded, torch.minimum(forced + extra, lens))


def share_pages(shielded: Tensor, lens: Tensor, pages: int, page_size: int) -> Tensor:
    """Whole pages by value: fp32 [N, R, L], int64 [N, R] -> bool [N, R, L].

    shielded: what `protect` returns. In each of N the rows share R * pages pages, or keep all if
    they have no more. A row's m-th page is worth the sum of its scores of ranks m * P to
    (m + 1) * P - 1; pages with a protected slot are beyond price. Values never increase with m, so
    taking the best first is optimal (for negative scores a last, partly filled page counts as the
    one before it).
    """
    count, rows, length = shielded.shape
    held = -(-lens // page_size)  # [N, R] pages that a row has
    most = -(-length // page_size)
    ranked = shielded.sort(dim=-1, descending=True).values
    ranked = torch.nn.functional.pad(ranked, (0, most * page_size - length), value=float("-inf"))
    forced = ranked[..., ::page_size] == float("inf")  # [N, R, M]
    finite = torch.where(ranked.isinf(), 0.0, ranked).double()  # a sum that no order changes
    value = finite.view(count, rows, most, page_size).sum(-1)
    value = torch.where(forced, float("inf"), value).cummin(-1).values.movedim(-1, 1)
    exists = torch.arange(most, device=lens.device)[:, None] < held[:, None]  # [N, M, R]
    value = torch.where(exists, value, float("-inf")).flatten(1)
    taken = top_mask(value, held.sum(1).clamp(max=rows * pages), rows * pages)
    kept = taken.view(count, most, rows).sum(1) * page_size  # [N, R]
    return top_mask(shielded, torch.minimum(kept, lens))
