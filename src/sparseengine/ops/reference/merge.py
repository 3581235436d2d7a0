"""Exact merge of attention over disjoint key sets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_lse(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a union of key sets from attention over each of them.

    outs: [..., D] normalised outputs. lses: [...] log-sum-exp of the scaled logits; -inf marks a
    set that no query sees, whose output is ignored, even NaN. Returns (out, lse); where all sets
    are empty, out is 0 and lse is -inf.
    """
    lse = torch.stack(tuple(lses))  # [n, ...]
    peak = lse.amax(0)
    base = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    weight = (lse - base).exp()
    total = weight.sum(0)
    out = torch.zeros_like(outs[0], dtype=torch.promote_types(outs[0].dtype, lse.dtype))
    for w, o in zip(weight, outs, strict=True):
        out = out + torch.where((w > 0)[..., None], w[..., None] * o, torch.zeros_like(out))
    out = out / torch.where(total > 0, total, torch.ones_like(total))[..., None]
    return out, total.log() + base
