"""Drives one layer with given q, k, v and reports, per step, which positions each head read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contract.driver import PAGE, PLAIN, POSITIONS, Reads, replay_chunk
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.plan import merge_plans
from sparseengine.core.context import StepContext
from sparseengine.core.method import SparseMethod
from sparseengine.core.params import SparseParams
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec, Rotary
from sparseengine.engine.controller import Controller


@dataclass
class Driven:
    """reads[i][kv head]: positions read in step i. outs[i]: attention outputs [T, Hq, Dv].

    kept[i][kv head]: row lengths after step i. pages[i]: head pages held after step i.
    """

    reads: list[list[list[int]]] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    kept: list[tuple[int, ...]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


def spec_of(
    q_heads: int,
    kv_heads: int,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    inv_freq: tuple[float, ...] = (),
) -> ModelSpec:
    """A model of one FULL layer; inv_freq: by which its keys were turned, if they were."""
    layer = LayerSpec(
        kind=LayerKind.FULL, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim, value_dim=dim
    )
    return ModelSpec(
        layers=(layer,),
        vocab_size=4,
        hidden_size=4,
        max_position=1 << 16,
        dtype=dtype,
        rotaries=(Rotary(inv_freq=inv_freq),) if inv_freq else (),
    )


def random_layer(
    length: int, q_heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q [L, Hq, D], k, v [L, Hkv, D]; channel 0 of k tells the position and does not meet q."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(length, q_heads, dim, generator=rng)
    k = torch.randn(length, kv_heads, dim, generator=rng)
    v = torch.randn(length, kv_heads, dim, generator=rng)
    return mark(q, k), k, v


def mark(q: Tensor, k: Tensor) -> Tensor:
    """Write positions into channel 0 of k in place; returns q, which does not see them."""
    k[..., 0] = torch.arange(len(k))[:, None] / POSITIONS
    q[..., 0] = 0
    return q


@torch.no_grad()
def drive(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Sequence[int],
    budget: int | None,
    decodes: int | None = None,
    page_size: int = PAGE,
    attend: bool = True,
    shrink_to: int | None = None,
    pattern: PrefillPattern | None = None,
    sparse: SparseParams = PLAIN,
) -> Driven:
    """Run chunks of `steps` tokens. The last `decodes` ones (default: trailing ones) are DECODE.

    shrink_to: budget that the method is asked to come down to before the last step.
    """
    if decodes is None:
        decodes = 0
        while decodes < len(steps) - 1 and steps[-1 - decodes] == 1:
            decodes += 1
    prompt_len = sum(steps[: len(steps) - decodes])
    model = method.model
    cache = PagedCache(
        model, merge_plans(model, [method.cache_plan()]), num_pages=2048, dtype=model.dtype,
        poison=True,
    )  # fmt: skip
    controller = Controller(model, cache, {"m": method}, {"p": pattern} if pattern else {})
    backend = Reads(attend=attend)
    tokens = list(range(sum(steps)))
    request = Request(
        0, tokens, prompt_len, decodes + 1, method="m", budget=budget, prefill="p",
        sparse=sparse,
    )  # fmt: skip
    cache.admit(request, cache.match(request))
    out, at = Driven(), 0
    for i, size in enumerate(steps):
        purpose = Purpose.DECODE if i >= len(steps) - decodes else Purpose.PREFILL
        chunk = Chunk(request, tuple(tokens[at : at + size]), at, purpose, True)
        plan = StepPlan((chunk,))
        cache.reserve(plan)
        ctx = StepContext(plan, cache, controller, (backend,), model)
        part = slice(at, at + size)
        out.outs.append(ctx.attend(0, q[part], k[part], v[part]))
        controller.end_step(plan)
        reads = backend.log[-1][0]
        if chunk.ends_prompt:
            for run in method.replay(request):
                again = StepPlan((replay_chunk(request, run),))
                _rerun(StepContext(again, cache, controller, (backend,), model), run, q, k, v)
        if shrink_to is not None and i == len(steps) - 2:
            rows = [cache.layer_step(0, q[part], k[part], v[part])]
            controller.retain(method.shrink(request, shrink_to, rows))
        cache.check()
        out.reads.append(reads)
        out.kept.append(cache.lens(0, 0))
        out.pages.append(cache.usage(0).pages)
        at += size
    return out


def _rerun(ctx: StepContext, run: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> None:
    """A token's q, k and v are the same wherever it is."""
    ctx.cache.reserve(ctx.plan)
    ctx.attend(0, q[list(run)], k[list(run)], v[list(run)])
    ctx.controller.end_step(ctx.plan)
    ctx.cache.check()
