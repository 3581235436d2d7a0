"""The start-up memory table: where the bytes go and how many requests fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sparseengine.cache.manager import PagedCache
from sparseengine.cache.memory import pools_of, request_bytes
from sparseengine.cache.plan import geometry
from sparseengine.cache.room import UNBOUNDED_TOKENS
from sparseengine.core.attention import AttentionBackend
from sparseengine.core.method import SparseMethod
from sparseengine.core.specs import ModelSpec
from sparseengine.engine.admission import charge, fitting
from sparseengine.methods.prefill import make_pattern
from sparseengine.resolve import Resolved

DEFAULT_CPU_BYTES = 4 << 30
DEFAULT_CPU_FRACTION = 0.4
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many requests of one shape and method run at once.

    digests: each of them keeps digests of what it evicts, and is charged for them.
    """

    method: str
    budget_tokens: int | None
    peak_tokens: int
    steady_tokens: int
    requests: int
    digests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Bytes by purpose. `activations_measured`: by a profiling run, else an estimate."""

    device: str
    weights: int
    activations: int
    activations_measured: bool
    graphs: int
    kv_pages: int
    side_tensors: int
    tables: int
    total_pages: int
    row_tokens: int
    prompt_tokens: int
    output_tokens: int
    fits: tuple[Fit, ...] = field(default=())

    @property
    def total(self) -> int:
        pages = (self.kv_pages, self.side_tensors, self.tables)
        return self.weights + self.activations + self.graphs + sum(pages)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}

    def render(self) -> str:
        """The table as text."""
        how = "measured" if self.activations_measured else "estimated"
        rows = (
            ("weights", self.weights, ""),
            ("activations", self.activations, how),
            ("graphs", self.graphs, "of captured decode steps"),
            ("KV pages", self.kv_pages, f"{self.total_pages} head pages"),
            ("side tensors", self.side_tensors, ""),
            ("tables", self.tables, "grow with use"),
            ("total", self.total, f"on {self.device}"),
        )
        shown = [row for row in rows if row[1] or row[0] != "graphs"]
        lines = [f"  {n:<13}{b / _MIB:>10,.1f} MiB  {note}".rstrip() for n, b, note in shown]
        lines.append(
            f"  room for rows of {self.row_tokens:,} tokens; requests of {self.prompt_tokens:,} + "
            f"{self.output_tokens:,} tokens that fit at once:"
        )
        for fit in self.fits:
            budget = "" if fit.budget_tokens is None else f", budget {fit.budget_tokens:,}"
            kept = ", with digests" if fit.digests else ""
            lines.append(f"    {fit.requests:>6,}  {fit.method}{budget}{kept}")
        return "\n".join(["memory", *lines])


def cpu_kv_bytes(resolved: Resolved) -> int:
    """KV memory on a CPU when none was asked for: a share of RAM, at most what can be used."""
    share = int(resolved.caps.memory_bytes * DEFAULT_CPU_FRACTION)
    return min(DEFAULT_CPU_BYTES, share, most_usable_bytes(resolved))


def most_usable_bytes(resolved: Resolved) -> int:
    """What max_num_seqs requests of max_model_len tokens take, each with a page to spare.

    Several pools are split as if all rows were equally long, so WINDOW rows count in full then.
    """
    scheduler = resolved.config.scheduler
    size = max((g.page_size for g in resolved.groups), default=1)
    geos = [geometry(resolved.spec, g) for g in resolved.groups]
    tokens = resolved.max_model_len + size
    chunk = scheduler.max_num_batched_tokens if len(pools_of(geos)) == 1 else tokens
    cost = request_bytes(geos, resolved.dtype, tokens, chunk)
    return (cost.payload + cost.aux) * scheduler.max_num_seqs


def estimated_activations(resolved: Resolved) -> int:
    """Rough bytes of one step's largest tensors; a GPU measures instead."""
    spec, scheduler = resolved.spec, resolved.config.scheduler
    tokens = scheduler.max_num_batched_tokens
    widest = max((s.q_heads * s.head_dim for s in spec.layers), default=0)
    per_token = (8 * spec.hidden_size + 3 * widest) * resolved.dtype.itemsize
    logits = 2 * min(scheduler.max_num_seqs, tokens) * spec.vocab_size * 4
    return tokens * per_token + logits


def scratch_bytes(model: Any, tokens: int, chunk: int) -> int:
    """The most that a block takes on top of a step's own tensors for a chunk of a long row."""
    blocks = (m for m in model.modules() if hasattr(m, "scratch_bytes"))
    return max((m.scratch_bytes(tokens, chunk) for m in blocks), default=0)


def attention_scratch_bytes(
    backends: Sequence[AttentionBackend], spec: ModelSpec, tokens: int, length: int
) -> int:
    """The most that any layer's attention of `tokens` takes in a row of up to `length`."""
    pairs = set(zip(backends, spec.layers, strict=True))
    size = spec.dtype.itemsize
    return max(
        (b.scratch_bytes(x, tokens, length, size) for b, x in pairs if hasattr(b, "scratch_bytes")),
        default=0,
    )


def pattern_bytes(resolved: Resolved, tokens: int) -> int:
    """What the default prefill pattern takes on top of that for a prompt of so many tokens."""
    sparse = resolved.sparse
    pattern = make_pattern(sparse.prefill, sparse.prefill_config, resolved.spec)
    queries = min(resolved.config.scheduler.max_num_batched_tokens, tokens)
    return pattern.scratch_bytes(queries, tokens)


def memory_table(
    resolved: Resolved,
    cache: PagedCache,
    methods: Mapping[str, SparseMethod],
    budgets: Mapping[str, int | None],
    *,
    weights: int,
    activations: int,
    measured: bool,
    output_tokens: int,
    graphs: int = 0,
) -> MemoryTable:
    """`methods` by the label they are shown with; `budgets` resolved at the shown prompt length."""
    prompt_tokens = resolved.max_model_len - output_tokens
    used, room = cache.memory(), cache.free_tokens()
    return MemoryTable(
        device=str(resolved.device),
        weights=weights,
        activations=activations,
        activations_measured=measured,
        graphs=graphs,
        kv_pages=used.payload,
        side_tensors=used.aux,
        tables=used.tables,
        total_pages=cache.total_pages(),
        row_tokens=room if room < UNBOUNDED_TOKENS else resolved.spec.max_position,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        fits=tuple(
            _fit(
                cache,
                label,
                method,
                prompt_tokens,
                output_tokens,
                budgets[label],
                digests=resolved.sparse.digests and label == resolved.methods[0],
            )
            for label, method in methods.items()
        ),
    )


def _fit(
    cache: PagedCache,
    label: str,
    method: SparseMethod,
    prompt_tokens: int,
    output_tokens: int,
    budget: int | None,
    *,
    digests: bool = False,
) -> Fit:
    demand = method.demand(prompt_tokens, output_tokens, budget)
    one = charge(cache, method, prompt_tokens, output_tokens, budget, digests=digests)
    return Fit(
        method=label,
        budget_tokens=budget,
        peak_tokens=demand.peak_tokens,
        steady_tokens=demand.steady_tokens,
        requests=fitting(cache, one),
        digests=digests,
    )
