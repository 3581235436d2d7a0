"""Flags of `bench throughput`, and the plan they make: which engines, which shapes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseengine.bench.results import add_result_arguments
from sparseengine.config import EngineConfig, default_of
from sparseengine.console import add_engine_arguments, engine_config, hyper_params, note
from sparseengine.errors import ConfigError
from sparseengine.provenance import read_size

if TYPE_CHECKING:
    from sparseengine.llm import LLM

MIN_STEPS = 5


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods", metavar="A,B", help="several methods, as --sparse-method a,b (dense is added)"
    )
    parser.add_argument(
        "--input-len", "--lengths", dest="lengths", default="1024", metavar="N,N", help="prompts"
    )
    parser.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="tokens per request [default: 128]"
    )
    parser.add_argument(
        "--batch-size",
        "--batch-sizes",
        "--num-prompts",
        dest="batches",
        default="1",
        metavar="N,N",
        help="requests at once; `max` is what fits with the engine's memory [default: 1]",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="runs of each batch [default: 1]"
    )
    parser.add_argument(
        "--hyper-params", metavar="JSON", help='knobs per method: {"method": {"knob": 1}}'
    )
    parser.add_argument(
        "--synthetic-kv",
        action="store_true",
        help="decode steps only: the cache is filled with random numbers instead of prefilled",
    )
    parser.add_argument(
        "--compare-transformers",
        action="store_true",
        help="also run transformers' generate on the same prompts and cores",
    )
    add_result_arguments(
        parser, plot="step times against batch, or against prompt length where that varies alone"
    )
    add_engine_arguments(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run measures: engines by label (dense first), prompt lengths, batch sizes.

    pairs: (length, batch) instead of all combinations; those that do not fit are left out.
    """

    engines: tuple[tuple[str, EngineConfig], ...]
    lengths: tuple[int, ...]
    batches: tuple[int | str, ...]
    output_len: int
    repeats: int
    compare_transformers: bool
    synthetic: bool = False
    pairs: tuple[tuple[int, int], ...] = ()

    def fixed_batches(self) -> list[int]:
        return [b for b in self.batches if isinstance(b, int)]

    def shapes(self, llm: LLM) -> Iterator[tuple[int, int, bool]]:
        """(input length, batch size, was `max`); `max` is resolved by this engine's memory."""
        for length, batch in self.pairs:
            limit = llm.resolved.max_model_len
            if length + self.output_len > limit:
                note(f"{length} x {batch}: left out, for max_model_len={limit}")
            elif batch > self._most(llm, length):
                note(f"{length} x {batch}: left out, for it does not fit into the KV memory")
            else:
                yield length, batch, False
        if self.pairs:
            return
        for length in self.lengths:
            for batch in self.batches:
                fixed = isinstance(batch, int)
                yield length, batch if fixed else max(1, self._most(llm, length)), not fixed

    def _most(self, llm: LLM, length: int) -> int:
        """The largest batch of requests of this length; 0 when not even one fits."""
        from sparseengine.engine.admission import charge, fitting

        engine = llm.engine
        sparse = llm.resolved.sparse
        method, budget = engine.intake.methods.resolve(sparse, length)
        cache, instance = engine.scheduler.cache, engine.intake.methods.instances[method]
        one = charge(cache, instance, length, self.output_len, budget, digests=sparse.digests)
        fits = fitting(cache, one)
        limit = llm.resolved.config.scheduler.max_num_seqs
        if fits > limit and "max" in self.batches:
            note(f"{method}: {fits} requests would fit, max_num_seqs={limit}; raise --max-num-seqs")
        return min(limit, fits)

    def settings(self) -> dict[str, Any]:
        return {
            "methods": [label for label, _ in self.engines],
            "lengths": list(self.lengths),
            "batches": list(self.batches),
            "output_len": self.output_len,
            "repeats": self.repeats,
            "synthetic_kv": self.synthetic,
        }


def budget_text(config: EngineConfig) -> str | None:
    """The budget or ratio that was asked for."""
    value = config.sparse.budget or config.sparse.ratio
    return None if value is None else str(value)


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan behind the flags. Raises `ConfigError` for impossible ones."""
    lengths = numbers("--input-len", args.lengths)
    batches = tuple(
        "max" if part.strip() == "max" else numbers("--batch-size", part)[0]
        for part in args.batches.split(",")
    )
    if args.output_len < MIN_STEPS + 2:
        raise ConfigError(
            f"--output-len {args.output_len} leaves fewer than {MIN_STEPS} steps to take a median "
            f"of; use {MIN_STEPS + 2} or more"
        )
    if args.synthetic_kv and args.compare_transformers:
        raise ConfigError(
            "--synthetic-kv has nothing that transformers could run; leave out one of the two"
        )
    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats} is not allowed; it must be 1 or more")
    return Plan(
        engines=tuple(_engines(args, lengths, batches)),
        lengths=lengths,
        batches=batches,
        output_len=args.output_len,
        repeats=args.repeats,
        compare_transformers=args.compare_transformers,
        synthetic=args.synthetic_kv,
    )


def numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(read_size(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not allowed; it must be {error}") from None
    if min(values) < 1:
        raise ConfigError(f"{flag} {text!r} is not allowed; it must be 1 or more")
    return values


def _engines(
    args: argparse.Namespace, lengths: Sequence[int], batches: Sequence[int | str]
) -> Iterator[tuple[str, EngineConfig]]:
    """The engines of whole batches."""
    # A default above the need would make the tables of a short benchmark large for nothing.
    fixed = [b for b in batches if isinstance(b, int)]
    extra: dict[str, Any] = {}
    if args.engine_max_num_seqs is None and fixed and "max" not in batches:
        extra["max_num_seqs"] = max(fixed)
    yield from engines_of(args, max(lengths) + args.output_len, **extra)


def engines_of(
    args: argparse.Namespace, longest: int, **extra: Any
) -> Iterator[tuple[str, EngineConfig]]:
    """Dense, then every method that was asked for, each an engine of its own.

    With --sparse-prefill all but the first are prefilled so, and dense attention behind such a
    prefill is among them.
    longest: tokens of the longest request; a shorter --max-model-len raises `ConfigError`, as does
    what a method cannot run on.
    """
    from sparseengine.methods import METHODS
    from sparseengine.methods.prefill import PATTERNS
    from sparseengine.resolve import resolve

    wanted = args.methods or args.engine_sparse_method or ""
    names = [METHODS.canonical(n.strip()) for n in wanted.split(",") if n.strip()]
    knobs = hyper_params(args.hyper_params)
    dense = METHODS.canonical(default_of("sparse.method"))
    pattern = PATTERNS.canonical(engine_config(args).sparse.prefill)
    has_pattern = pattern != default_of("sparse.prefill")
    entries = [(dense, False), *((name, has_pattern) for name in [dense, *names])]
    for name, is_patterned in dict.fromkeys(entries):
        given = {**extra, "sparse_method": name}
        if args.engine_enable_prefix_caching is None:  # what is measured twice must run twice
            given["enable_prefix_caching"] = False
        if name in knobs:
            given["sparse_config"] = knobs[name]
        if not is_patterned:
            given |= {"sparse_prefill": default_of("sparse.prefill"), "sparse_prefill_config": {}}
        local = argparse.Namespace(**vars(args))
        if METHODS.get(name).traits.takes == "none":
            local.engine_kv_budget = local.engine_sparse_config = None
        config = engine_config(local, **given)
        _check_length(config, longest)
        resolve(config)  # before any engine is measured
        yield f"{name}+{pattern}" if is_patterned else name, config


def _check_length(config: EngineConfig, longest: int) -> None:
    limit = config.model.max_model_len
    if limit is not None and longest > limit:
        raise ConfigError(
            f"the longest request, --input-len + --output-len = {longest}, is above "
            f"--max-model-len {limit}"
        )
