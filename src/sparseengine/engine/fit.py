"""How many requests fit: for a running engine, and for a model that is not loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from sparseengine.cache.manager import PagedCache
from sparseengine.core.params import SparseParams
from sparseengine.engine.memory import (
    MemoryTable,
    cpu_kv_bytes,
    estimated_activations,
    memory_table,
    pattern_bytes,
    scratch_bytes,
)
from sparseengine.errors import ConfigError
from sparseengine.methods import METHODS, make_method, resolve_budget
from sparseengine.models import MODELS
from sparseengine.nn.linear import packs
from sparseengine.resolve import Resolved

TABLE_SHARE = 0.02  # of KV memory: page tables and row metadata


def weight_bytes(model: nn.Module, *, packed: bool = False) -> int:
    """Bytes of a model's parameters; shared ones count once.

    packed: of a model that is not loaded yet, once its linear layers are packed for a CPU: a head
    that shares the embedding gets a copy of its own.
    """
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    head = getattr(model, "lm_head", None)
    if packed and getattr(model, "tied", False) and isinstance(head, nn.Module):
        total += sum(p.numel() * p.element_size() for p in head.parameters())
    return total


def fit_table(
    resolved: Resolved,
    cache: PagedCache,
    *,
    weights: int,
    activations: int,
    measured: bool,
    output_tokens: int,
    graphs: int = 0,
) -> MemoryTable:
    """The memory table with every enabled method, and with dense attention for comparison."""
    prompt = resolved.max_model_len - output_tokens
    shown, budgets = {}, {}
    names = list(resolved.methods)
    dense = next(n for n in METHODS if METHODS.get(n).traits.family == "dense")
    for name in dict.fromkeys((*names, dense)):
        sparse = resolved.sparse if name == names[0] else SparseParams(name)
        method = make_method(
            name, sparse.knobs, resolved.spec, page_size=resolved.config.cache.block_size
        )
        shown[name] = method
        budgets[name] = resolve_budget(method, sparse, prompt)
    return memory_table(
        resolved,
        cache,
        shown,
        budgets,
        weights=weights,
        activations=activations,
        graphs=graphs,
        measured=measured,
        output_tokens=output_tokens,
    )


class Planned(NamedTuple):
    """A model that is not loaded, in a device of some size: its cache, on no device, and bytes."""

    cache: PagedCache
    weights: int
    activations: int


def plan_cache(resolved: Resolved, *, memory_bytes: int, prompt_tokens: int) -> Planned:
    """The KV memory of a device of `memory_bytes`, by arithmetic: nothing is loaded.

    It is sized as the engine would size it, on an accelerator when `resolved.device` is one or
    `memory_bytes` is not this host's. Activations are an estimate. Raises `ConfigError` when the
    weights alone do not fit.
    """
    architecture = resolved.spec.architecture
    model = MODELS.get(architecture)(resolved.source.hf_config, resolved.spec, device="meta")
    here = resolved.device.type == "cpu" and memory_bytes == resolved.caps.memory_bytes
    weights = weight_bytes(model, packed=here and packs(resolved.dtype))
    chunk = resolved.config.scheduler.max_num_batched_tokens
    activations = estimated_activations(resolved) + scratch_bytes(model, prompt_tokens, chunk)
    activations += pattern_bytes(resolved, prompt_tokens)
    share = resolved.config.cache.gpu_memory_utilization
    left = int(memory_bytes * share) - weights - activations
    if left <= 0:
        raise ConfigError(
            f"the weights take {weights / 1e9:.1f} GB and a step {activations / 1e9:.1f} GB: more "
            f"than gpu_memory_utilization={share} of {memory_bytes / 1e9:.1f} GB"
        )
    override = resolved.config.cache.num_gpu_blocks_override
    total_bytes = _kv_bytes(resolved, left, here) if override is None else None
    cache = PagedCache(
        resolved.spec,
        resolved.groups,
        total_bytes=total_bytes,
        num_pages=override,
        max_num_seqs=resolved.config.scheduler.max_num_seqs,
        max_chunk=resolved.config.scheduler.max_num_batched_tokens,
        device=torch.device("meta"),
        dtype=resolved.dtype,
    )
    return Planned(cache, weights, activations)


def planned_table(
    resolved: Resolved, *, memory_bytes: int, prompt_tokens: int, output_tokens: int
) -> MemoryTable:
    """What would fit into a device of `memory_bytes`; see `plan_cache`.

    Raises `ConfigError` when requests of this length exceed the model's positions, too.
    """
    limit = resolved.spec.max_position
    if prompt_tokens + output_tokens > limit:
        raise ConfigError(
            f"{prompt_tokens:,} + {output_tokens:,} tokens exceed the model's {limit:,} positions; "
            "lower --input-len or --output-len"
        )
    resolved = replace(resolved, max_model_len=prompt_tokens + output_tokens)
    plan = plan_cache(resolved, memory_bytes=memory_bytes, prompt_tokens=prompt_tokens)
    table = fit_table(
        resolved,
        plan.cache,
        weights=plan.weights,
        activations=plan.activations,
        measured=False,
        output_tokens=output_tokens,
    )
    return replace(table, device=f"a device of {memory_bytes / 1e9:.1f} GB")


def _kv_bytes(resolved: Resolved, left: int, here: bool) -> int:
    asked = resolved.config.cache.kv_cache_memory_bytes
    if asked is not None:
        if asked > left:
            raise ConfigError(
                f"kv_cache_memory_bytes={asked:,} does not fit: {left:,} bytes are left"
            )
        return asked
    return min(left, cpu_kv_bytes(resolved)) if here else int(left * (1 - TABLE_SHARE))
