"""What steps need of a device beside weights and KV pages, measured by running them once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparseengine.attention import BACKENDS
from sparseengine.cache.manager import PagedCache
from sparseengine.core.attention import AttentionBackend
from sparseengine.core.cache import PrefixHit
from sparseengine.core.params import SamplingParams
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.engine.controller import Controller
from sparseengine.engine.graphs import DecodeGraphs
from sparseengine.engine.intake import MethodTable
from sparseengine.engine.memory import attention_scratch_bytes, pattern_bytes, scratch_bytes
from sparseengine.engine.model import Model
from sparseengine.engine.runner import Runner
from sparseengine.resolve import Resolved

_GRAPH_SPARE = 1.25  # the largest graph is measured; the smaller ones share its memory, not quite


class Needs(NamedTuple):
    """Bytes: the largest eager step, and captured graphs."""

    activations: int
    graphs: int


def uses_graphs(resolved: Resolved) -> bool:
    """Decode steps are captured on CUDA devices if every layer's backend can be, and unless the
    config says otherwise."""
    if resolved.device.type != "cuda" or resolved.config.runtime.enforce_eager:
        return False
    return all(BACKENDS.get(route.selected).graph_safe for route in resolved.routes)


def make_graphs(resolved: Resolved, runner: Runner, methods: MethodTable) -> DecodeGraphs:
    """Graphs over the runner's own cache."""
    assert isinstance(runner.cache, PagedCache)
    assert isinstance(runner.controller, Controller)
    return DecodeGraphs(
        runner.model,
        resolved.spec,
        runner.cache,
        runner.controller,
        methods.instances,
        runner.backends,
        max_rows=resolved.config.scheduler.max_num_seqs,
        max_len=resolved.max_model_len,
    )


@torch.no_grad()
def profile(
    resolved: Resolved,
    model: Model,
    backends: tuple[AttentionBackend, ...],
    methods: MethodTable,
) -> Needs:
    """Run the largest prompt chunk, then capture the largest decode step, over a small cache."""
    scheduler, device = resolved.config.scheduler, resolved.device
    tokens = min(scheduler.max_num_batched_tokens, resolved.max_model_len - 1)
    size = max((g.page_size for g in resolved.groups), default=1)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    cache = PagedCache(
        resolved.spec,
        resolved.groups,
        num_pages=-(-tokens // size) + 1,
        max_num_seqs=scheduler.max_num_seqs,
        max_chunk=scheduler.max_num_batched_tokens,
        device=device,
        dtype=resolved.dtype,
    )
    before = torch.cuda.memory_allocated(device)
    controller = Controller(resolved.spec, cache, methods.instances, methods.patterns)
    runner = Runner(model, resolved.spec, cache, controller, backends, device)
    _prefill(runner, methods, tokens, scheduler.max_num_seqs)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    longest = resolved.max_model_len  # a chunk of such a row takes more than the one above
    wide, near = (scratch_bytes(model, n, tokens) for n in (longest, tokens))
    activations += max(0, wide - near)
    wide, near = (
        attention_scratch_bytes(backends, resolved.spec, tokens, n) for n in (longest, tokens)
    )
    activations += max(0, wide - near)
    wide, near = (pattern_bytes(resolved, n) for n in (longest, tokens))
    activations += max(0, wide - near)
    graphs = 0
    if uses_graphs(resolved):
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(device)
        captured = make_graphs(resolved, runner, methods)
        captured.capture_largest()
        graphs = int((torch.cuda.memory_reserved(device) - held) * _GRAPH_SPARE)
        del captured
    return Needs(int(activations), graphs)


def _prefill(runner: Runner, methods: MethodTable, tokens: int, max_rows: int) -> None:
    """One prompt of `tokens` as one chunk, and the logits of as many rows as ever sample."""
    key, budget = methods.resolve(methods.default, tokens)
    prefill, _ = methods.resolve_prefill(methods.default)
    request = Request(
        id=0,
        tokens=[0] * tokens,
        prompt_len=tokens,
        max_tokens=1,
        sampling=SamplingParams(temperature=0.0),
        method=key,
        budget=budget,
        prefill=prefill,
    )
    plan = StepPlan((Chunk(request, tuple(request.tokens), 0, Purpose.PREFILL, True),))
    cache = runner.cache
    cache.admit(request, PrefixHit())
    cache.reserve(plan)
    hidden = runner.forward(plan)
    runner.controller.end_step(plan)
    logits = runner.model.logits(hidden[: min(max_rows, tokens)])
    logits.log_softmax(-1)
    cache.release(request.id)
    methods.instances[key].forget(request.id)
