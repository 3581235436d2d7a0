"""Deterministic choices under a budget. Ties: larger score first, then smaller position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

MARGIN = 1 - 1e-4  # of an error target: fp32 softmaxes are that exact


def top_mask(scores: Tensor, count: int | Tensor, most: int | None = None) -> Tensor:
    """True at the `count` largest scores along the last axis; ties go to the smaller position.

    scores: float [..., L] without NaN. count: an integer, or int64 [...] with one per row, between
    0 and L. most: a host number that no count exceeds, which saves sorting the rest. Returns bool
    [..., L]. No host synchronisation.
    """
    length = scores.shape[-1]
    most = length if most is None else min(most, length)
    if isinstance(count, int):
        most = count = min(count, length)
    if most <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    ranked = scores.topk(most, dim=-1, sorted=True).values
    wanted = count if isinstance(count, int) else count[..., None]
    if isinstance(wanted, int):
        least = ranked[..., -1:]
    else:
        least = ranked.gather(-1, (wanted - 1).clamp(0, most - 1))
        least = torch.where(wanted > 0, least, float("inf"))
    above = scores > least
    ties = scores == least
    room = wanted - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


def tokens_for_error(scores: Tensor, masses: Tensor, error: float, page_size: int) -> Tensor:
    """Fewest tokens of each row, taken by score, whose left-out rest has a mass of at most `error`.

    scores, masses: fp32 [..., L]; ties as in `top_mask`. Rounded up to whole pages, beyond L maybe.
    With kept mass m, an attention output changes by at most 2 (1 - m) max |v|. Sums in fp64, and a
    margin covers the rounding of the masses themselves. Returns int64 [...].
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranked = masses.double().gather(-1, order)
    left = ranked.flip(-1).cumsum(-1).flip(-1)  # mass of this token and of all behind it
    needed = (left > error * MARGIN).sum(-1)
    return -(-needed // page_size) * page_size


def split_protected(budget: int, sink: int, recent: int) -> tuple[int, int]:
    """How many sinks and recent tokens fit a budget: sinks take at most half of it.

    The rest goes to the newest tokens, so that a budget of one keeps the newest token.
    """
    kept_sink = min(sink, budget // 2)
    return kept_sink, min(recent, budget - kept_sink)


def protect(scores: Tensor, lens: Tensor, sink: int | Tensor, recent: int | Tensor) -> Tensor:
    """Scores in which sinks and recent tokens always win and slots past a row always lose.

    scores: [..., L]; NaN counts as the lowest score. lens: int64 [...] row lengths. sink, recent:
    numbers of tokens, or int64 [..., 1] for each row.
    """
    top = torch.finfo(scores.dtype).max
    scores = torch.nan_to_num(scores, nan=float("-inf"), posinf=top, neginf=-top)
    slot = torch.arange(scores.shape[-1], device=scores.device)
    end = lens[..., None]
    forced = (slot < sink) | (slot >= end - recent)
    scores = torch.where(forced, float("inf"), scores)
    return torch.where(slot < end, scores, float("-inf"))


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round non-negative shares to integers that sum to `total` exactly.

    The shares are scaled to sum to `total`, rounded down, and the largest remainders (then the
    smaller index) get the rest. All-zero shares are treated as equal ones.
    """
    amount = sum(shares)
    weights = list(shares) if amount > 0 else [1.0] * len(shares)
    amount = amount if amount > 0 else float(len(shares))
    exact = [w * total / amount for w in weights]
    out = [int(x) for x in exact]
    order = sorted(range(len(out)), key=lambda i: (out[i] - exact[i], i))
    for i in order[: total - sum(out)]:
        out[i] += 1
    return out


def pyramid_ends(length: int, window: int, spare: int, beta: int) -> tuple[int, int]:
    """Share of the first and of the last layer when the mean share is `spare` tokens."""
    least = spare // beta
    most = 2 * spare - least
    if most >= length - window:
        most = length - window
        least = 2 * spare - most
    return most, least


def is_flat_pyramid(layers: int, length: int, spare: int) -> bool:
    return layers < 2 or spare <= 0 or length < 2 * spare


@lru_cache(maxsize=4096)
def exact_pyramid(layers: int, length: int, budget: int, window: int, beta: int) -> tuple[int, ...]:
    """Budgets per layer, never increasing, that sum to layers * budget."""
    spare = budget - window
    if is_flat_pyramid(layers, length, spare):
        return (budget,) * layers
    most, least = pyramid_ends(length, window, spare, beta)
    shares = [most * (layers - 1) - i * (most - least) for i in range(layers)]
    return tuple(n + window for n in largest_remainder(shares, layers * spare))
