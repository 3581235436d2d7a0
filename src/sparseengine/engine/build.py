"""From a resolved configuration to a running engine: weights, memory, wiring."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from sparseengine.attention import BACKENDS
from sparseengine.attention.deterministic import WINDOW_ALIGN
from sparseengine.cache.manager import PagedCache
from sparseengine.core.attention import AttentionBackend
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
from sparseengine.engine.model import Model
from sparseengine.engine.prefix import Prefixes
from sparseengine.engine.profile import Needs, make_graphs, profile, uses_graphs
from sparseengine.engine.runner import Runner
from sparseengine.engine.scheduler import Scheduler
from sparseengine.engine.words import Words
from sparseengine.errors import ConfigError
from sparseengine.models import load_model
from sparseengine.nn.linear import make_deterministic
from sparseengine.ops import tuned
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
    tuned.use(resolved.tuned)
    tokenizer = resolved.source.load_tokenizer()
    network = load_model(resolved.source, spec, resolved.device, resolved.dtype)
    if config.runtime.deterministic:
        make_deterministic(network)
    model: Model = cast(Model, network)
    backends = make_backends(resolved)
    methods = make_table(resolved, tokenizer)
    methods.resolve(methods.default, resolved.max_model_len)
    needs, measured = Needs(estimated_activations(resolved), 0), False
    if resolved.device.type == "cuda":
        needs, measured = profile(resolved, model, backends, methods), True
    cache = make_cache(resolved, sum(needs))
    controller = Controller(spec, cache, methods.instances, methods.patterns)
    runner = Runner(model, spec, cache, controller, backends, resolved.device)
    if uses_graphs(resolved):
        runner.graphs = make_graphs(resolved, runner, methods)
        with torch.no_grad():
            runner.graphs.warm_up()
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
            grammar_timeout_s=config.runtime.grammar_timeout_s,
        ),
        scheduler=make_scheduler(resolved, cache, methods, controller, collector),
        runner=runner,
        controller=controller,
        collector=collector,
        overlap=config.runtime.async_scheduling and resolved.device.type == "cuda",
    )
    table = fit_table(
        resolved,
        cache,
        weights=weight_bytes(network),
        activations=needs.activations,
        graphs=needs.graphs,
        measured=measured,
        output_tokens=max(1, min(_SHOWN_OUTPUT_TOKENS, resolved.max_model_len // 4)),
    )
    return Built(engine, tokenizer, table)


def make_table(resolved: Resolved, tokenizer: Any) -> MethodTable:
    """The enabled methods, before any instance."""
    spec = resolved.spec
    return MethodTable(
        spec,
        resolved.methods,
        resolved.groups,
        resolved.sparse,
        resolved.dense_prefill,
        None if tokenizer is None else Words(tokenizer, spec.vocab_size),
    )


def make_scheduler(
    resolved: Resolved,
    cache: PagedCache,
    methods: MethodTable,
    controller: Controller,
    collector: Collector,
) -> Scheduler:
    """The scheduler, and what it knows of stored prefixes."""
    config, instances = resolved.config, methods.instances
    prefixes = Prefixes(cache, instances, enabled=config.cache.enable_prefix_caching)
    return Scheduler(config.scheduler, cache, instances, collector, controller.shrink, prefixes)


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
