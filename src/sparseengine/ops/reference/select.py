"""From page scores to the pages a row reads, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine.core.view import PackedTable


def top_pages(
    scores: Tensor,
    lens: Tensor,
    budgets: Tensor,
    page_size: int,
    *,
    sinks: int,
    least: int,
    width: int,
) -> Tensor:
    """The columns of each row's highest scores, ascending: int32 [S, H, width], -1 pads the end.

    scores: fp32 [S, H, W]; NaN counts as the lowest. lens: int32 [S, G] tokens of a row, G being 1
    or H. budgets: int32 [S] tokens that may be read. A row not longer than its budget is read
    whole; else budget // page_size pages are, at least `least`. The first `sinks` pages and the
    last one are always among them. Ties go to the smaller column. width bounds all counts.
    """
    used = (lens + page_size - 1) // page_size
    last = used[..., None] - 1  # [S, G, 1]
    column = torch.arange(scores.shape[2], device=scores.device)
    forced = (column == last) | (column < sinks)
    ranked = torch.where(forced, float("inf"), torch.nan_to_num(scores, nan=float("-inf")))
    ranked = torch.where(column <= last, ranked, float("-inf"))
    budget = budgets[:, None]
    some = torch.minimum(used, (budget // page_size).clamp(min=least))
    count = torch.where(lens <= budget, used, some).expand(scores.shape[:2])[..., None]
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.where(column < count, order, scores.shape[2]).sort(dim=-1).values[..., :width]
    return torch.where(chosen < scores.shape[2], chosen, -1).to(torch.int32)


def take_pages(
    table: PackedTable, index: Tensor, lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Chosen columns of packed tables: page ids int32 [S, G', K], and tokens in them [S, G'].

    index: int32 [S, G, K] columns, -1 pads become page 0. lens: int32 [S, G of the table].
    """
    column = index.long().clamp_min(0)
    live = index >= 0
    pages = torch.where(live, table.take(column), 0)
    fill = (lens[..., None] - column * page_size).clamp(0, page_size)
    count = torch.where(live, fill, 0).sum(2, dtype=torch.int32)
    return pages, count
