"""`sparseengine bench capacity`: how many requests each method admits, and what tables cost.

From a config alone, by the engine's own admission: the first request is charged its worst moment,
the others what they hold while they decode. Metadata is what the page tables and row state of one
request take beside its KV, host and device together, built for real.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparseengine.bench.options import budget_text, engines_of, numbers
from sparseengine.bench.results import Outcome, Results, add_result_arguments
from sparseengine.console import add_engine_arguments, note, positive
from sparseengine.errors import ConfigError

if TYPE_CHECKING:
    from sparseengine.config import EngineConfig
    from sparseengine.resolve import Resolved

NOTE = (
    "requests: admitted at once, with the memory to themselves; peak: while one is in prefill; "
    "metadata: page tables and row state of one request, as a part of its KV bytes; side: tensors "
    "that the method keeps beside KV, as such a part"
)


class Capacity:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--methods", metavar="A,B", help="several methods (dense is added)")
        parser.add_argument(
            "--hyper-params", metavar="JSON", help='knobs per method: {"method": {"knob": 1}}'
        )
        parser.add_argument(
            "--contexts",
            default="32K,128K",
            metavar="N,N",
            help="tokens of a request, its output among them [default: 32K,128K]",
        )
        parser.add_argument(
            "--output-len",
            type=positive,
            default=256,
            metavar="N",
            help="of these the tokens to generate [default: 256]",
        )
        parser.add_argument(
            "--device-memory-gb",
            type=float,
            metavar="GB",
            help="memory of the device (10^9 bytes) instead of this machine's",
        )
        add_result_arguments(parser)
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        results, contexts = Results(args), numbers("--contexts", args.contexts)
        if min(contexts) <= args.output_len:
            raise ConfigError(
                f"--contexts {args.contexts} leaves no prompt beside --output-len {args.output_len}"
            )
        rows: list[dict[str, Any]] = []
        for label, config in engines_of(args, min(contexts), **_extra(args)):
            rows += rows_of(label, config, contexts, args)
        if not rows:
            raise ConfigError(f"--contexts {args.contexts}: the model has fewer positions")
        results.publish(
            Outcome(bench="capacity", rows=rows, raw=[]), [_shown(row) for row in rows], NOTE
        )
        return 0


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    """No weights are read, and an accelerator elsewhere computes in bfloat16."""
    extra: dict[str, Any] = {}
    if args.engine_hf_config is not None:
        extra["load_format"] = "dummy"
    if args.device_memory_gb is not None and args.engine_dtype is None:
        extra["dtype"] = "bfloat16"
    return extra


def rows_of(
    label: str, config: EngineConfig, contexts: tuple[int, ...], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per context that the model has positions for."""
    from sparseengine.engine.fit import plan_cache
    from sparseengine.resolve import resolve

    resolved = resolve(config)
    elsewhere = args.device_memory_gb is not None
    memory = int(args.device_memory_gb * 1e9) if elsewhere else resolved.caps.memory_bytes
    rows = []
    for context in contexts:
        if context > resolved.spec.max_position:
            limit = resolved.spec.max_position
            note(f"{label}: {context} left out, for the model has {limit} positions")
            continue
        sized, prompt_len = replace(resolved, max_model_len=context), context - args.output_len
        plan = plan_cache(sized, memory_bytes=memory, prompt_tokens=prompt_len)
        rows.append(
            {
                "model": resolved.source.name,
                "method": label,
                "budget": budget_text(config),
                "input_len": prompt_len,
                "output_len": args.output_len,
                **admitted(sized, plan.cache, prompt_len, args.output_len),
                **overheads(sized, context),
                "kv_bytes": plan.cache.memory().payload,
                "weight_bytes": plan.weights,
            }
        )
    return rows


def admitted(resolved: Resolved, cache: Any, prompt_len: int, output_len: int) -> dict[str, Any]:
    """Requests that fit at once, and the KV bytes each is charged."""
    from sparseengine.engine.admission import charge, fitting
    from sparseengine.methods import make_method, resolve_budget

    sparse, size = resolved.sparse, resolved.config.cache.block_size
    method = make_method(sparse.method, sparse.knobs, resolved.spec, page_size=size)
    budget = resolve_budget(method, sparse, prompt_len)
    one = charge(cache, method, prompt_len, output_len, budget, digests=sparse.digests)
    page = cache.memory().payload / max(1, cache.total_pages())
    return {
        "requests": fitting(cache, one),
        "kv_bytes_per_request": int(one.steady * page),
        "peak_kv_bytes": int(one.most * page),
    }


def overheads(resolved: Resolved, tokens: int) -> dict[str, Any]:
    """Metadata and side tensors of one request of `tokens` tokens in every row, over its KV.

    On the meta device, which holds no KV but builds the tables; captured steps' buffers included.
    """
    import torch

    from sparseengine.cache.manager import PagedCache
    from sparseengine.core.cache import PrefixHit
    from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan

    size = max((g.page_size for g in resolved.groups), default=1)
    cache = PagedCache(
        resolved.spec,
        resolved.groups,
        num_pages=-(-tokens // size),
        max_num_seqs=1,
        max_chunk=tokens,
        device=torch.device("meta"),
        dtype=resolved.dtype,
    )
    cache.make_static(1)
    request = Request(id=0, tokens=[0] * tokens, prompt_len=tokens, max_tokens=1)
    cache.admit(request, PrefixHit())
    chunk = Chunk(request, tuple(request.tokens), 0, Purpose.PREFILL, True)
    cache.reserve(StepPlan((chunk,)))
    held = cache.memory()
    return {"metadata": held.tables / held.payload, "side_tensors": held.aux / held.payload}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": row["method"],
        "budget": row["budget"] or "-",
        "prompt + output": f"{row['input_len']:,} + {row['output_len']:,}",
        "requests": row["requests"],
        "KV MiB each": row["kv_bytes_per_request"] / 2**20,
        "peak MiB": row["peak_kv_bytes"] / 2**20,
        "metadata": f"{row['metadata']:.2%}",
        "side": f"{row['side_tensors']:.2%}",
    }


COMMAND = Capacity()
