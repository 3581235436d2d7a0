"""`sparseengine bench memory`: the start-up memory table against what is really held.

Held bytes are found by walking the objects of a running engine for tensors and arrays, each storage
once, and on a CUDA device from torch's allocator. What is stored must be within 2 % of its own
line, what comes and goes (activations, graphs, tables) within 2 % of the total.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseengine.bench.batch import make_prompts, run_batch
from sparseengine.bench.results import Outcome, Results, add_result_arguments
from sparseengine.console import add_engine_arguments, engine_config

if TYPE_CHECKING:
    from sparseengine.llm import LLM

TOLERANCE = 0.02
STORED = ("weights", "KV pages", "side tensors", "held by torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Bytes of one purpose. actual: None where this device cannot tell. total: of the table."""

    what: str
    predicted: int
    actual: int | None
    total: int

    @property
    def off(self) -> float | None:
        """The difference as a part of what it is measured by."""
        if self.actual is None:
            return None
        base = self.actual if self.what in STORED else self.total
        return (self.predicted - self.actual) / max(base, 1)

    @property
    def ok(self) -> bool:
        return self.off is None or abs(self.off) <= TOLERANCE


class Memory:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_result_arguments(parser)
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.llm import LLM

        results, config = Results(args), engine_config(args)
        before = _allocated()
        with LLM.from_config(config, quiet=True) as llm:
            lines = measure(llm, before)
            name = llm.resolved.source.name
        rows = [_row(line, name) for line in lines]
        wrong = [line.what for line in lines if not line.ok]
        verdict = (
            f"off by more than {TOLERANCE:.0%}: {', '.join(wrong)}"
            if wrong
            else f"every line is within {TOLERANCE:.0%}"
        )
        outcome = Outcome(bench="memory", rows=rows, raw=[], info={"ok": not wrong})
        results.publish(outcome, [_shown(row) for row in rows], verdict)
        return 1 if wrong else 0


def _row(line: Line, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "what": line.what,
        "predicted_bytes": line.predicted,
        "actual_bytes": line.actual,
        "off": line.off,
        "ok": line.ok,
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    actual = row["actual_bytes"]
    return {
        "what": row["what"],
        "predicted MiB": row["predicted_bytes"] / 2**20,
        "actual MiB": None if actual is None else actual / 2**20,
        "off": "-" if row["off"] is None else f"{row['off']:+.2%}",
    }


def measure(llm: LLM, before: int | None) -> list[Line]:
    """Every line of the table. before: bytes that torch held on the device before the start."""
    from sparseengine.cache.manager import PagedCache

    table, cache = llm.memory, llm.engine.scheduler.cache
    assert isinstance(cache, PagedCache)
    payload = held(*(pool.payload for pool in cache.pools))
    sides = held(*((g.slot_aux, g.page_aux) for g in cache.groups))
    rest = {key: size for key, size in held(cache).items() if key not in payload | sides}
    found: list[tuple[str, int, int | None]] = [
        ("weights", table.weights, sum(held(llm.engine.runner.model).values())),
        ("KV pages", table.kv_pages, sum(payload.values())),
        ("side tensors", table.side_tensors, sum(sides.values())),
        ("tables", table.tables, sum(rest.values())),
    ]
    activations = graphs = None
    if before is not None:
        stored = sum(predicted for _, predicted, _ in found)
        graphs, in_graphs = _graph_bytes()
        allocated = (_allocated() or 0) - before - in_graphs
        found.append(("held by torch", stored, allocated))
        activations = _peak(llm)
    found += [("activations", table.activations, activations), ("graphs", table.graphs, graphs)]
    return [
        Line(what=what, predicted=predicted, actual=actual, total=table.total)
        for what, predicted, actual in found
    ]


def held(*roots: object) -> dict[int, int]:
    """Bytes of every tensor storage and array that can be reached, by address or identity."""
    return dict(_walk(roots, {}))


def _walk(thing: object, seen: dict[int, object]) -> Iterator[tuple[int, int]]:
    import numpy as np
    import torch

    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # kept, so that no later object gets its identity
    if isinstance(thing, torch.Tensor):
        if thing.layout is torch.strided:
            storage = thing.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
        else:  # packed for a CPU: no storage to look at
            yield id(thing), thing.numel() * thing.element_size()
    elif isinstance(thing, np.ndarray):
        yield thing.__array_interface__["data"][0], thing.nbytes
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _walk(value, seen)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for value in thing:
            yield from _walk(value, seen)
    elif type(thing).__module__.startswith(("sparseengine", "torch.nn")):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        inside = [getattr(thing, name, None) for name in slots if name != "__weakref__"]
        yield from _walk([*inside, getattr(thing, "__dict__", {})], seen)


def _allocated() -> int | None:
    """Bytes that torch holds on the device; None without one."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def _graph_bytes() -> tuple[int, int]:
    """Segments that captured graphs keep for themselves: whole, and what of them is in use."""
    import torch

    shared = (0, 0)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    own = [s for s in segments if tuple(s.get("segment_pool_id", shared)) != shared]
    return tuple(sum(int(s[key]) for s in own) for key in ("total_size", "allocated_size"))  # type: ignore[return-value]


def _peak(llm: LLM) -> int:
    """Bytes that a step takes at most while the largest prompt chunk runs."""
    import torch

    config = llm.resolved.config.scheduler
    length = min(config.max_num_batched_tokens, llm.resolved.max_model_len - 8)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_batch(llm, make_prompts(llm.resolved.spec.vocab_size, length, 1, seed=0), 4)
    return torch.cuda.max_memory_allocated() - before


COMMAND = Memory()
