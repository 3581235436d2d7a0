"""Tokens drawn on the device: one function for eager steps and captured ones.

A draw is the inverse CDF at a given number, over the tokens that temperature, min_p, top_k and
top_p leave. All of it is device work of static shapes, so that a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseengine.core.params import SamplingParams

NEG_INF = float("-inf")
NUM_KNOBS = 5
_FEW = 512  # tokens ranked at first on a CPU, where more can be ranked after a look at them


def knobs_of(params: Sequence[SamplingParams], numbers: Sequence[float]) -> NDArray[np.float64]:
    """float64 [5, N]: temperature (0: the largest logit), number in [0, 1), top_k, top_p, min_p."""
    rows = [
        (0.0 if p.greedy else p.temperature, u, max(0, p.top_k), p.top_p, p.min_p)
        for p, u in zip(params, numbers, strict=True)
    ]
    return np.array(rows, np.float64).reshape(-1, NUM_KNOBS).T


def truncates(params: SamplingParams) -> bool:
    """Whether top_k or top_p leave tokens out."""
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0)


def draw(logits: Tensor, knobs: Tensor, *, truncate: bool) -> Tensor:
    """Tokens int64 [N] of rows [N, V] fp32. knobs: `knobs_of` on the device.

    truncate: some row `truncates`; rows that do not are drawn from whole in either case.
    """
    heat, min_p = knobs[0].float(), knobs[4].float()
    greedy = heat == 0
    scaled = logits / torch.where(greedy, 1.0, heat)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)  # tiny temperatures must not overflow
    scaled.masked_fill_(scaled.exp() < min_p[:, None], NEG_INF)
    if truncate:
        scaled = _truncated(scaled, knobs[2].long(), knobs[3])
    cdf = scaled.double().exp_().cumsum(-1)  # [N, V]
    total = cdf[:, -1]
    target = torch.minimum(knobs[1] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)
    token.clamp_(max=logits.shape[-1] - 1)  # only a row of NaN gets there
    return torch.where(greedy, logits.argmax(-1), token)


def _truncated(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Rows [N, V], whose maximum is 0, cut to their `top_k` largest, then to the nucleus `top_p`.

    Ties go to the smaller token id.
    """
    vocab = scaled.shape[-1]
    limited = (top_k > 0) & (top_k < vocab)
    most = torch.where(limited, top_k, vocab)
    everything = scaled.double().exp_().sum(-1)
    if scaled.is_cuda or vocab <= _FEW:
        ranked = scaled.sort(dim=-1, descending=True).values
    else:
        ranked = scaled.topk(_FEW, dim=-1).values
        mass = ranked.double().exp_().sum(-1)
        if not torch.where(limited, top_k <= _FEW, mass >= top_p * everything).all():
            ranked = scaled.sort(dim=-1, descending=True).values
    within = torch.arange(ranked.shape[-1], device=scaled.device) < most[:, None]
    weight = ranked.double().exp_() * within
    total = torch.where(limited, weight.sum(-1), everything)
    before = weight.cumsum(-1) - weight
    nucleus = (within & (before < (top_p * total)[:, None])).sum(-1)
    kept = torch.where(top_p < 1.0, nucleus, most)
    last = (kept.clamp(max=ranked.shape[-1]) - 1).clamp_(min=0)
    least = ranked.gather(-1, last[:, None])
    above, ties = scaled > least, scaled == least
    room = kept[:, None] - above.sum(-1, keepdim=True)
    is_kept = above | (ties & (ties.cumsum(-1) <= room)) | (kept == vocab)[:, None]
    return scaled.masked_fill_(~is_kept, NEG_INF)
