"""From a resolved configuration to a running engine: weights, memory, wiring."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from sparseengine.attention import BACKENDS
from sparseengine.attention.deterministic import WINDOW_ALIGN
from sparseengine.cache.manager import PagedCache
from sparseengine.core.attention import AttentionBackend
from sparseengine.core.params import SamplingParams
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.engine.collector import Collector
from sparseengine.engine.controller import Controller
from sparseengine.engine.engine import Engine
from sparseengine.engine.fit import TABLE_SHARE, fit_table, weight_bytes
from sparseengine.engine.intake import Intake, MethodTable
from sparseengine.engine.memory import (
    MemoryTable,
    cpu_kv_bytes,
    estimated_activations,
    most_usable_bytes,
)
from sparseengine.engine.runner import Model, Runner
from sparseengine.engine.scheduler import Scheduler
from sparseengine.errors import ConfigError
from sparseengine.models import load_model
from sparseengine.nn.linear import make_deterministic
from sparseengine.resolve import Resolved

_SHOWN_OUTPUT_TOKENS = 256


class Built(NamedTuple):
    """An engine, its tokenizer (None for a model without one) and where its memory went."""

    engine: Engine
    tokenizer: Any
    memory: MemoryTable


def build_engine(resolved: Resolved) -> Built:
    """Load the weights, size the KV memory, wire the parts together.

    Raises `ConfigError` when the checkpoint is damaged or the memory holds no page.
    """
    config, spec = resolved.config, resolved.spec
    tokenizer = resolved.source.load_tokenizer()
    network = load_model(resolved.source, spec, resolved.device, resolved.dtype)
    if config.runtime.deterministic:
        make_deterministic(network)
    model: Model = cast(Model, network)
    backends = make_backends(resolved)
    methods = MethodTable(spec, resolved.methods, resolved.groups, resolved.sparse)
    methods.resolve(methods.default, resolved.max_model_len)
    activations, measured = estimated_activations(resolved), False
    if resolved.device.type == "cuda":
        activations, measured = profile_activations(resolved, model, backends, methods), True
    cache = make_cache(resolved, activations)
    controller = Controller(spec, cache, methods.instances)
    runner = Runner(model, spec, cache, controller, backends, resolved.device)
    collector = Collector(
        controller,
        runner,
        None if tokenizer is None else tokenizer.backend_tokenizer,
        resolved.source.eos_token_ids,
    )
    engine = Engine(
        intake=Intake(
            spec,
            methods,
            tokenizer,
            max_model_len=resolved.max_model_len,
            eos_ids=resolved.source.eos_token_ids,
            max_logprobs=config.runtime.max_logprobs,
            seed=config.model.seed,
        ),
        scheduler=Scheduler(config.scheduler, cache, methods.instances, collector),
        runner=runner,
        controller=controller,
        collector=collector,
    )
    table = fit_table(
        resolved,
        cache,
        weights=weight_bytes(network),
        activations=activations,
        measured=measured,
        output_tokens=max(1, min(_SHOWN_OUTPUT_TOKENS, resolved.max_model_len // 4)),
    )
    return Built(engine, tokenizer, table)


def make_backends(resolved: Resolved) -> tuple[AttentionBackend, ...]:
    """The chosen backend of every layer; layers with the same route share one."""
    made: dict[str, AttentionBackend] = {}
    for route in resolved.routes:
        if route.selected not in made:
            made[route.selected] = BACKENDS.get(route.selected)()
    return tuple(made[route.selected] for route in resolved.routes)


def make_cache(resolved: Resolved, activations: int) -> PagedCache:
    """The KV memory: a number of pages or bytes when the config says so, else what is free."""
    config = resolved.config
    size: dict[str, Any] = {}
    if config.cache.num_gpu_blocks_override is not None:
        size["num_pages"] = config.cache.num_gpu_blocks_override
    elif config.cache.kv_cache_memory_bytes is not None:
        size["total_bytes"] = config.cache.kv_cache_memory_bytes
    elif resolved.device.type == "cuda":
        size["total_bytes"] = _cuda_kv_bytes(resolved, activations)
    else:
        size["total_bytes"] = cpu_kv_bytes(resolved)
    return PagedCache(
        resolved.spec,
        resolved.groups,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_chunk=config.scheduler.max_num_batched_tokens,
        window_align=WINDOW_ALIGN if config.runtime.deterministic else 1,
        device=resolved.device,
        dtype=resolved.dtype,
        **size,
    )


def _cuda_kv_bytes(resolved: Resolved, activations: int) -> int:
    """The asked share of the device, less what is in use and what a step needs on top."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(resolved.device)
    share = resolved.config.cache.gpu_memory_utilization
    left = int(total * share) - (total - free) - activations
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization={share} of {total >> 20} MiB leaves nothing for KV: "
            f"{(total - free) >> 20} MiB are in use and a step needs {activations >> 20} MiB; "
            "raise it, or lower max_num_batched_tokens"
        )
    return min(int(left * (1 - TABLE_SHARE)), most_usable_bytes(resolved))


def profile_activations(
    resolved: Resolved,
    model: Model,
    backends: tuple[AttentionBackend, ...],
    methods: MethodTable,
) -> int:
    """Peak bytes of the largest step on top of weights and KV, by running it once."""
    scheduler = resolved.config.scheduler
    tokens = min(scheduler.max_num_batched_tokens, resolved.max_model_len - 1)
    key, budget = methods.resolve(methods.default, tokens)
    size = max((g.page_size for g in resolved.groups), default=1)
    torch.cuda.synchronize(resolved.device)
    torch.cuda.reset_peak_memory_stats(resolved.device)
    cache = PagedCache(
        resolved.spec,
        resolved.groups,
        num_pages=-(-tokens // size) + 1,
        device=resolved.device,
        dtype=resolved.dtype,
    )
    before = torch.cuda.memory_allocated(resolved.device)
    controller = Controller(resolved.spec, cache, methods.instances)
    runner = Runner(model, resolved.spec, cache, controller, backends, resolved.device)
    request = Request(
        id=0,
        tokens=[0] * tokens,
        prompt_len=tokens,
        max_tokens=1,
        sampling=SamplingParams(temperature=0.0),
        method=key,
        budget=budget,
    )
    plan = StepPlan((Chunk(request, tuple(request.tokens), 0, Purpose.PREFILL, True),))
    with torch.no_grad():
        cache.admit(request, cache.match(request))
        cache.reserve(plan)
        hidden = runner.forward(plan)
        controller.end_step(plan)
        rows = min(scheduler.max_num_seqs, tokens)
        logits = model.logits(hidden[:rows])
        logits.log_softmax(-1)
    torch.cuda.synchronize(resolved.device)
    peak = torch.cuda.max_memory_allocated(resolved.device) - before
    cache.release(request.id)
    controller.forget(request.id)
    return int(peak)
