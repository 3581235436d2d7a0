"""One query per row against single tokens, and the best of them; a group of `bench kernels`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.bench.timing import Bench, relative_error
from sparseengine.ops import reference

Q_HEADS, KV_HEADS, DIM, LABELS = 32, 4, 128, 32
PAGE, BUDGET = 16, 2048
SETS = 2


def bench_slots(bench: Bench) -> None:
    """Scores of tokens by keys and by labels, and attention that is gathered beside them."""
    spans, length = bench.size(21, 2), bench.size(32768, 64)
    width = length // PAGE
    ids = torch.randperm(spans * KV_HEADS * width, device=bench.device).int()
    table = ids.view(spans, KV_HEADS, width)
    lens = torch.full((spans, KV_HEADS), length, dtype=torch.int32, device=bench.device)
    for name, dim, knobs in (
        ("slot_scores", DIM, {}),
        ("slot_scores, softmax", LABELS, {"normalise": True}),
    ):
        pools = [bench.normal(ids.numel(), 1, PAGE, dim) for _ in range(SETS)]
        q = bench.normal(spans, Q_HEADS, dim)
        args = [(q, pool, table, lens, dim**-0.5) for pool in pools]
        calls = [partial(ops.slot_scores, *each, **knobs) for each in args]
        got, want = calls[0](), reference.slot_scores(*args[0], **knobs)
        num_bytes = pools[0].nbytes * (1 + bool(knobs)) + got.nbytes
        bench.add(f"{name} {spans} x {length}", calls, num_bytes, relative_error(got, want))
    bench_mass(bench, table, lens)
    bench_tokens(bench)


def bench_mass(bench: Bench, table: Tensor, lens: Tensor) -> None:
    """Two reads of the keys."""
    spans, length = table.shape[0], int(lens[0, 0])
    pool, q = bench.normal(table.numel(), 1, PAGE, DIM), bench.normal(spans, Q_HEADS, DIM)
    mass = torch.rand(pool.shape[:3], device=bench.device)
    found, want = mass.clone(), mass.clone()
    how: dict[str, Any] = {"scale": DIM**-0.5, "left": 0.5}  # a half: sums stay finite
    ops.add_mass(q, pool, table, lens, found, **how)
    reference.add_mass(q, pool, table, lens, want, **how)
    call = partial(ops.add_mass, q, pool, table, lens, mass, **how)
    num_bytes = 2 * (pool.nbytes + mass.nbytes)
    bench.add(f"add_mass {spans} x {length}", [call], num_bytes, relative_error(found, want))


def bench_tokens(bench: Bench) -> None:
    """The best tokens of long rows; the error is the share of wrong entries."""
    for spans, heads, length in bench.some((21, 1, 32768), (21, 4, 32768), (16, 1, 131072)):
        spans, length = bench.size(spans, 2), bench.size(length, 256)
        lens = torch.full((spans, 1), length - 5, dtype=torch.int32, device=bench.device)
        budget = bench.size(BUDGET, 64)
        budgets = torch.full((spans,), budget, dtype=torch.int32, device=bench.device)
        scores = [torch.randn(spans, heads, length, device=bench.device) for _ in range(SETS)]
        knobs = {"sinks": 0, "least": 1, "width": budget}
        calls = [partial(ops.top_pages, s, lens, budgets, 1, **knobs) for s in scores]
        index, want = calls[0](), reference.top_pages(scores[0], lens, budgets, 1, **knobs)
        error = float((index != want).float().mean())
        num_bytes = scores[0].nbytes + index.nbytes
        bench.add(f"top_pages {spans * heads} x {length} tokens", calls, num_bytes, error)
