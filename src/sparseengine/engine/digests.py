"""What decode steps make of digests: how much attention was evicted, and some of it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseengine.attention import digests
from sparseengine.core.cache import CacheManager
from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Purpose, Request, StepPlan
from sparseengine.core.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedMass:
    """Estimated attention that the query of one decode step would pay to evicted tokens.

    mean, max: over the query heads of all layers that methods act on (FULL and LATENT ones); heads
    whose rows lost nothing count as 0. position: of the step's token in the text.
    """

    position: int
    mean: float
    max: float


@dataclass(slots=True)
class _Step:
    """Sum and maximum over the heads of the layers seen so far, on the device."""

    total: Tensor
    most: Tensor


class DigestReader:
    """Attends to the digests of requests that keep some, in their decode steps.

    Device work alone: numbers come to the host when a request ends. Kept rows are read a second
    time for their log-sum-exp, by plain tensor operations.
    """

    def __init__(self, model: ModelSpec, cache: CacheManager) -> None:
        self._cache = cache
        self._heads = sum(model.layers[i].q_heads for i in model.sparse_layers)
        self._steps: dict[int, dict[int, _Step]] = {}

    @staticmethod
    def chunks(plan: StepPlan) -> tuple[int, ...]:
        """Decodes of requests with digests."""
        return tuple(
            i
            for i, c in enumerate(plan.chunks)
            if c.purpose is Purpose.DECODE and c.request.sparse.digests
        )

    def read(self, at: LayerStep, out: Tensor, chunks: Sequence[int]) -> Tensor:
        """Attention of these chunks [T, Hq, Dv] with what digests add to it, if they ask for it."""
        for i in chunks:
            chunk = at.plan.chunks[i]
            steps = self._steps.setdefault(chunk.request.id, {})
            if chunk.start not in steps:
                zero = torch.zeros((), dtype=torch.float32, device=out.device)
                steps[chunk.start] = _Step(zero, zero)
            segment = self._cache.digests(chunk.request.id, at.layer)
            if segment is None:
                continue
            token = at.span(i)[0]
            q = at.q[token]
            lens = at.table()[1][i]
            kept = digests.row_lse(q, at.gather("keys", i), lens, at.spec)
            found = digests.attend(q, segment, at.spec)
            share = torch.sigmoid(found.lse - kept)  # [Hkv, g]
            step = steps[chunk.start]
            step.total = step.total + share.sum(dtype=torch.float32)
            step.most = torch.maximum(step.most, share.max().float())
            if chunk.request.sparse.compensate:
                before = out[token].to(share.dtype).view_as(found.out)
                mixed = torch.lerp(before, found.out, share[..., None])
                out[token] = mixed.flatten(0, 1).to(out.dtype)
        return out

    def result(self, request: Request) -> list[DroppedMass]:
        """Of the steps whose tokens the request kept, in order."""
        last = request.prompt_len + request.num_generated - 1
        steps = self._steps.get(request.id, {})
        found = [(at, s) for at, s in sorted(steps.items()) if at < last]
        if not found:
            return []
        both = torch.stack([torch.stack([s.total, s.most]) for _, s in found]).tolist()
        return [
            DroppedMass(position=at, mean=total / self._heads, max=most)
            for (at, _), (total, most) in zip(found, both, strict=True)
        ]

    def forget(self, request_id: int) -> None:
        self._steps.pop(request_id, None)
