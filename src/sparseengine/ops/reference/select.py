"""From page scores to the pages a row reads, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseengine.core.view import PackedTable

_TOP = torch.finfo(torch.float32).max  # an infinite score is below what is forced


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
    finite = torch.where(scores.isnan(), float("-inf"), scores.clamp_max(_TOP))
    ranked = torch.where(forced, float("inf"), finite)
    ranked = torch.where(column <= last, ranked, float("-inf"))
    budget = budgets[:, None]
    some = torch.minimum(used, (budget // page_size).clamp(min=least))
    count = torch.where(lens <= budget, used, some).expand(scores.shape[:2])[..., None]
    chosen = _top(ranked, count.long(), min(width, scores.shape[2]))
    place = torch.where(
        chosen, chosen.cumsum(-1) - 1, width
    )  # what is not chosen goes past the end
    out = column.new_full((*scores.shape[:2], width + 1), -1, dtype=torch.int32)
    columns = column.to(torch.int32).expand(scores.shape)
    return out.scatter_(-1, place, columns)[..., :width]


def _top(ranked: Tensor, count: Tensor, most: int) -> Tensor:
    """True at the `count` [S, H, 1] largest of each row, at most `most`; no wait for the device."""
    best = ranked.topk(most, dim=-1, sorted=True).values
    floor = best.gather(-1, (count - 1).clamp(0, most - 1))
    floor = torch.where(count > 0, floor, float("inf"))
    above, ties = ranked > floor, ranked == floor
    room = count - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


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
