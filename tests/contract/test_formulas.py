"""Scores and kept sets equal kvpress' published definitions, written here anew with torch ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from contract.driver import make
from contract.reads import Driven, drive, random_layer, spec_of
from sparseengine.methods.families import EvictionMethod

LENGTH, BUDGET = 96, 40


def capture(name: str, heads: tuple[int, int] = (8, 2), **knobs: Any) -> tuple[Tensor, Driven]:
    """Scores [Hkv, L] that a method gave to a prompt, and what the next decode step read."""
    q, k, v = random_layer(LENGTH + 1, *heads, seed=11)
    method = make(spec_of(*heads), name, **knobs)
    assert isinstance(method, EvictionMethod)
    seen: list[Tensor] = []
    retain = method.retain

    def spy(scores: Tensor, lens: Tensor, budget: int) -> Tensor:
        seen.append(scores[0])
        return retain(scores, lens, budget)

    method.retain = spy  # type: ignore[method-assign]
    driven = drive(method, q, k, v, [50, LENGTH - 50, 1], BUDGET, 1)
    return seen[0], driven


def layer(heads: tuple[int, int] = (8, 2)) -> tuple[Tensor, Tensor]:
    """q [Hq, L, D] and k [Hkv, L, D] of the same prompt, heads first as kvpress has them."""
    q, k, _ = random_layer(LENGTH + 1, *heads, seed=11)
    return q[:LENGTH].transpose(0, 1), k[:LENGTH].transpose(0, 1)


def window_attention(q: Tensor, k: Tensor, window: int) -> Tensor:
    """[Hq, window, L]: softmax of the last queries over all keys, causal inside the window."""
    keys = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    logits = q[:, -window:] @ keys.transpose(1, 2) / q.shape[2] ** 0.5
    causal = torch.full((window, window), float("-inf")).triu(1)
    logits[..., -window:] += causal
    return logits.softmax(-1, dtype=torch.float32)


def kvpress_snapkv(q: Tensor, k: Tensor, window: int, kernel: int) -> Tensor:
    attention = window_attention(q, k, window)[..., :-window].mean(1)  # [Hq, L - w]
    pooled = F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2)
    scores = pooled.view(k.shape[0], -1, k.shape[1] - window).mean(1)
    return F.pad(scores, (0, window), value=float(scores.max()))


@pytest.mark.parametrize(("window", "kernel"), [(8, 5), (16, 7)])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (4, 1)])
def test_snapkv(window: int, kernel: int, heads: tuple[int, int]) -> None:
    got, driven = capture("snapkv", heads, preset="kvpress", window=window, kernel=kernel)
    expected = kvpress_snapkv(*layer(heads), window, kernel)
    torch.testing.assert_close(got[:, :-window], expected[:, :-window], atol=1e-6, rtol=1e-5)
    kept = expected.topk(BUDGET, dim=-1).indices.sort(-1).values
    assert [row[:-1] for row in driven.reads[-1]] == kept.tolist()


def test_max_pooling_comes_before_the_group_mean() -> None:
    got, _ = capture("snapkv", window=8, kernel=7, pooling="max")
    attention = window_attention(*layer(), 8)[..., :-8].mean(1)
    pooled = F.max_pool1d(attention, 7, stride=1, padding=3)
    torch.testing.assert_close(got[:, :-8], pooled.view(2, 4, -1).mean(1), atol=1e-6, rtol=1e-5)
    other_order = F.max_pool1d(attention.view(2, 4, -1).mean(1), 7, stride=1, padding=3)
    assert (got[:, :-8] - other_order).abs().max() > 1e-3, "the orders differ"


def test_knorm() -> None:
    got, _ = capture("knorm", skip_layers=())
    torch.testing.assert_close(got, -layer()[1].norm(dim=-1))


def kvpress_keydiff(k: Tensor) -> Tensor:
    anchor = F.normalize(k, p=2, dim=-1).mean(dim=-2, keepdim=True)
    return -F.cosine_similarity(k, anchor, dim=-1)


def test_keydiff() -> None:
    got, driven = capture("keydiff", sink=0, recent=0)
    expected = kvpress_keydiff(layer()[1])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    kept = expected.topk(BUDGET, dim=-1).indices.sort(-1).values
    assert [row[:-1] for row in driven.reads[-1]] == kept.tolist()


def test_keydiff_in_blocks() -> None:
    """BlockPress: survivors and the next block are scored together."""
    block, (_, k) = 32, layer()
    q, keys, v = random_layer(LENGTH + 1, 8, 2, seed=11)
    method = make(spec_of(8, 2), "keydiff", sink=0, recent=0, block_tokens=block)
    driven = drive(method, q, keys, v, [block] * (LENGTH // block) + [1], BUDGET, 1)
    for h in range(2):
        kept = torch.arange(0)
        for lo in range(0, LENGTH, block):
            now = torch.cat((kept, torch.arange(lo, lo + block)))
            scores = kvpress_keydiff(k[h, now][None])[0]
            kept = now[scores.topk(min(BUDGET, len(now))).indices.sort().values]
        assert driven.reads[-1][h][:-1] == kept.tolist()


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5])
def test_adakv(alpha: float) -> None:
    """AdaKVPress(SnapKVPress): a mask there, freed memory here; the kept sets agree."""
    knobs = {"preset": "kvpress", "window": 8, "kernel": 5, "alpha": alpha}
    method = make(spec_of(8, 2), "adakv", **knobs)
    driven = drive(
        method, *random_layer(LENGTH + 1, 8, 2, seed=11), [50, LENGTH - 50, 1], BUDGET, 1
    )
    scores = kvpress_snapkv(*layer(), 8, 5)
    safe = scores.topk(int(BUDGET * alpha), dim=-1).indices
    scores.scatter_(-1, safe, torch.finfo(scores.dtype).max)
    pruned = (-scores.reshape(-1)).topk(2 * (LENGTH - BUDGET)).indices
    mask = torch.ones(2 * LENGTH, dtype=torch.bool)
    mask[pruned] = False
    kept = [row.nonzero().flatten().tolist() for row in mask.view(2, LENGTH)]
    assert [row[:-1] for row in driven.reads[-1]] == kept


@pytest.mark.parametrize("sink", [0, 4])
def test_streaming_llm(sink: int) -> None:
    """StreamingLLMPress keeps sinks and the newest n_kept - sinks."""
    q, k, v = random_layer(LENGTH + 1)
    method = make(spec_of(4, 2), "streaming_llm", sink=sink, page_aligned=False, block_tokens=0)
    driven = drive(method, q, k, v, [LENGTH, 1], BUDGET, 1)
    scores = torch.ones(LENGTH)
    scores[sink : sink + LENGTH - BUDGET] = 0
    assert driven.reads[-1][0][:-1] == scores.nonzero().flatten().tolist()


def test_quest_bound_is_never_below_the_true_maximum() -> None:
    """The authors' form: q * kmax where q > 0, q * kmin elsewhere, summed over channels."""
    from sparseengine import ops

    q, k, _ = random_layer(64, 8, 2, seed=1)
    pool = k.transpose(0, 1).reshape(2, 4, 16, 8).transpose(0, 1).contiguous()  # [N, Hs, P, D]
    low, high = torch.empty(4, 2, 8), torch.empty(4, 2, 8)
    ops.page_bounds(pool, torch.arange(4), low, high)
    got = ops.page_scores(
        q, low, high, torch.arange(4, dtype=torch.int32)[None, None].expand(64, 1, 4), 4
    )
    pages = k.view(4, 16, 2, 8)
    for h in range(2):
        sign = (q[:, 4 * h : 4 * h + 4] > 0)[:, :, None]  # [L, g, 1, D]
        channel = torch.where(sign, pages[:, :, h].amax(1), pages[:, :, h].amin(1))
        bound = (channel * q[:, 4 * h : 4 * h + 4, None]).sum(-1).amax(1)
        torch.testing.assert_close(got[:, h], bound)
        true = torch.einsum("lgd,wpd->lgwp", q[:, 4 * h : 4 * h + 4], pages[:, :, h])
        assert (got[:, h] >= true.amax((1, 3)) - 1e-5).all()
