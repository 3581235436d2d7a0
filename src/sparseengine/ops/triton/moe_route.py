# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants, which Python types cannot express.)
"""The choice of experts in one launch. Twin: `ops/reference/moe.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseengine.ops.routing import RouterSpec

_ELEMENTS = 1024  # scores per program: a few tokens


@triton.jit
def _taken(choice, at):
    """Mask of the largest entry of each row of [N, M], the first of equals; `at` counts columns."""
    best = tl.argmax(choice, 1, tie_break_left=True)
    return at[None, :] == best[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits, bias, ids, weights, num_tokens, logits_st, masked, scale, epsilon,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, TWO: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    alive = t < num_tokens
    g, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    expert = tl.reshape(g[:, None] * SIZE + s[None, :], [BLOCK_G * BLOCK_S])
    real = tl.reshape((g < GROUPS)[:, None] & (s < SIZE)[None, :], [BLOCK_G * BLOCK_S])
    at = t.to(tl.int64)[:, None] * logits_st + expert[None, :]
    x = tl.load(logits + at, mask=alive[:, None] & real[None, :], other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        power = tl.exp(x - tl.max(x, 1)[:, None])
        score = power / tl.sum(power, 1)[:, None]
    choice = score
    if BIASED:
        choice += tl.load(bias + expert, mask=real, other=0.0)[None, :]
    choice = tl.where(choice != choice, float("inf"), choice)  # NaN counts as the largest
    choice = tl.where(real[None, :], choice, float("-inf"))
    if GROUPS > 1:
        grouped = tl.reshape(choice, [BLOCK_T * BLOCK_G, BLOCK_S])
        of_group = tl.max(grouped, 1)
        if TWO:
            of_group += tl.max(tl.where(_taken(grouped, s), float("-inf"), grouped), 1)
        of_group = tl.reshape(of_group, [BLOCK_T, BLOCK_G])
        of_group = tl.where((g < GROUPS)[None, :], of_group, float("-inf"))
        kept = tl.zeros([BLOCK_T, BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = _taken(of_group, g)
            kept = tl.where(best, 1, kept)
            of_group = tl.where(best, float("-inf"), of_group)
        keep = tl.reshape(kept, [BLOCK_T * BLOCK_G])[:, None] != 0
        choice = tl.reshape(tl.where(keep, grouped, masked), [BLOCK_T, BLOCK_G * BLOCK_S])
        choice = tl.where(real[None, :], choice, float("-inf"))
    column = tl.arange(0, BLOCK_G * BLOCK_S)
    k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        best = _taken(choice, column)
        here = (k == i)[None, :]
        chosen = tl.where(here, tl.sum(tl.where(best, expert[None, :], 0), 1)[:, None], chosen)
        weight = tl.where(here, tl.sum(tl.where(best, score, 0.0), 1)[:, None], weight)
        choice = tl.where(best, float("-inf"), choice)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 1) + epsilon)[:, None]
    to = t.to(tl.int64)[:, None] * TOP_K + k[None, :]
    ok = alive[:, None] & (k < TOP_K)[None, :]
    tl.store(ids + to, chosen, mask=ok)
    tl.store(weights + to, weight * scale, mask=ok)


def moe_route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """Experts int32 [T, K] and weights fp32 [T, K]; logits fp32 [T, E], bias fp32 [E] or None."""
    num_tokens = logits.shape[0]
    ids = torch.empty(num_tokens, spec.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    block_g = triton.next_power_of_2(spec.num_groups)
    block_s = triton.next_power_of_2(spec.group_size)
    block_t = max(1, _ELEMENTS // (block_g * block_s))
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    _route_kernel[(triton.cdiv(num_tokens, block_t),)](
        logits, logits if bias is None else bias, ids, weights, num_tokens, logits.stride(0),
        float(spec.masked_score), float(spec.scale), float(spec.epsilon),
        GROUPS=spec.num_groups, SIZE=spec.group_size, BLOCK_G=block_g, BLOCK_S=block_s,
        TOP_GROUPS=spec.top_groups, TOP_K=spec.top_k, BLOCK_K=triton.next_power_of_2(spec.top_k),
        BLOCK_T=block_t, SIGMOID=spec.scoring == "sigmoid", BIASED=bias is not None,
        TWO=spec.group_score == "top2_sum", NORMALISE=spec.normalise, num_warps=4,
    )  # fmt: skip
    return ids, weights
