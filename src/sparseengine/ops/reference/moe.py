"""Mixture of experts: the choice of experts and their weighted sum; plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparseengine.ops.routing import RouterSpec


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest per row, larger first, then smaller index: int64 [T, count].

    NaN counts as the largest, so that a poisoned row still names experts that exist.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def moe_route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    logits: fp32 [T, E]. bias: fp32 [E] or None. Returns ids int64 [T, K], weights fp32 [T, K];
    equal scores go to the smaller index. Sources: the routers of transformers' qwen3_moe,
    deepseek_v2, deepseek_v3 and glm4_moe_lite; they leave the order of equal scores open.
    """
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        grouped = choice.reshape(-1, spec.num_groups, spec.group_size)
        if spec.group_score == "max":
            of_groups = grouped.amax(-1)
        else:
            of_groups = grouped.topk(2, dim=-1).values.sum(-1)
        dropped = torch.ones_like(of_groups, dtype=torch.bool)
        dropped.scatter_(-1, _largest(of_groups, spec.top_groups), False)
        choice = grouped.masked_fill(dropped[..., None], spec.masked_score).flatten(-2)
    ids = _largest(choice, spec.top_k)
    weights = scores.gather(-1, ids)
    if spec.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.epsilon)
    return ids, weights * spec.scale


def _linear(x: Tensor, weight: Tensor, row_tile: int | None) -> Tensor:
    """x W^T; with `row_tile` in products of exactly so many rows, zero-padded."""
    if row_tile is None:
        return F.linear(x, weight)
    pad = -x.shape[0] % row_tile
    tiles = torch.split(F.pad(x, (0, 0, 0, pad)), row_tile)
    return torch.cat([F.linear(tile, weight) for tile in tiles])[: x.shape[0]]


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    row_tile: int | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts: sum_k weights[t, k] * expert[ids[t, k]](x[t]).

    x: [T, H]. gate_up: [E, 2 * I, H], gate rows first. down: [E, H, I]. ids: int [T, K] in 0..E-1.
    weights: fp32 [T, K]. An expert is down(silu(gate(x)) * up(x)). Returns [T, H] in x's dtype,
    summed over K in fp32 (fp64 for fp64) in the order of ids. row_tile: None, or the row count of
    every matrix product, which makes a row's bits independent of the other rows.

    Work is one pair of products per expert that any token chose. The host waits for their counts.
    """
    num_tokens, top_k = ids.shape
    order = ids.flatten().argsort(stable=True)  # [T * K] pairs, by expert
    rows = x[order // top_k]
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    outs, start = torch.empty_like(rows), 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            gate, up = _linear(rows[part], gate_up[expert], row_tile).chunk(2, dim=-1)
            outs[order[part]] = _linear(F.silu(gate) * up, down[expert], row_tile)
            start += count
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    by_token = outs.view(num_tokens, top_k, x.shape[1])
    for k in range(top_k):  # element by element, so that a row's bits are its own
        total.addcmul_(by_token[:, k].to(wide), weights[:, k, None].to(wide))
    return total.to(x.dtype)
