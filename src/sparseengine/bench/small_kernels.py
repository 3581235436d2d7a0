"""What stands between matrix products and around a selection, groups of `bench kernels`."""

from __future__ import annotations

from functools import partial

import torch

from sparseengine import ops
from sparseengine.bench.timing import Bench, relative_error
from sparseengine.core.view import PackedTable
from sparseengine.ops import reference

HIDDEN, INNER, Q_HEADS, KV_HEADS, DIM = 2048, 6144, 32, 4, 128
PAGE, BUDGET = 16, 2048
SETS = 4


def bench_fused(bench: Bench) -> None:
    """Residual + norm, gate, and norm + rotation of heads, at decode and prefill sizes."""
    for tokens in (16, 320, 8192):
        tokens = bench.size(tokens)
        weight = bench.normal(HIDDEN)
        pairs = [(bench.normal(tokens, HIDDEN), bench.normal(tokens, HIDDEN)) for _ in range(SETS)]
        norm, twin = (partial(m.add_rms_norm, *pairs[0], weight, 1e-6) for m in (ops, reference))
        error = max(relative_error(a, b) for a, b in zip(norm(), twin(), strict=True))
        calls = [partial(ops.add_rms_norm, *pair, weight, 1e-6) for pair in pairs]
        num_bytes = 4 * pairs[0][0].nbytes + weight.nbytes
        bench.add(f"add_rms_norm {tokens}", calls, num_bytes, error)

        gates = [bench.normal(tokens, 2 * INNER) for _ in range(SETS)]
        error = relative_error(ops.gated(gates[0], "silu"), reference.gated(gates[0], "silu"))
        calls = [partial(ops.gated, gate, "silu") for gate in gates]
        bench.add(f"gated {tokens}", calls, gates[0].nbytes * 3 // 2, error)

        heads = [bench.normal(tokens, Q_HEADS + KV_HEADS, DIM) for _ in range(SETS)]
        cos, sin = bench.normal(tokens, 1, DIM // 2), bench.normal(tokens, 1, DIM // 2)
        rest = (cos, sin, Q_HEADS, bench.normal(DIM), bench.normal(DIM), 1e-6)
        error = relative_error(
            ops.norm_rotate(heads[0], *rest), reference.norm_rotate(heads[0], *rest)
        )
        calls = [partial(ops.norm_rotate, each, *rest) for each in heads]
        num_bytes = 2 * heads[0].nbytes + cos.nbytes + sin.nbytes
        bench.add(f"norm_rotate {tokens}", calls, num_bytes, error)


def bench_select(bench: Bench) -> None:
    """From page scores to the chosen pages: both errors are shares of wrong entries."""
    for spans, length in ((21, 32768), (16, 131072)):
        spans, length = bench.size(spans, 2), bench.size(length, 256)
        width, device = length // PAGE, bench.device
        lens = torch.full((spans, 1), length - 5, dtype=torch.int32, device=device)
        budget = bench.size(BUDGET, 64)
        budgets = torch.full((spans,), budget, dtype=torch.int32, device=device)
        scores = [torch.randn(spans, KV_HEADS, width, device=device) for _ in range(SETS)]
        knobs = {"sinks": 1, "least": 3, "width": budget // PAGE}
        calls = [partial(ops.top_pages, s, lens, budgets, PAGE, **knobs) for s in scores]
        index, want = calls[0](), reference.top_pages(scores[0], lens, budgets, PAGE, **knobs)
        error = float((index != want).float().mean())
        bench.add(f"top_pages {spans} x {width}", calls, scores[0].nbytes + index.nbytes, error)

        arena = torch.randperm(spans * width, device=device).int()
        base = torch.arange(spans, device=device) * width
        table = PackedTable(arena, base, torch.full_like(base, width), 0, 1, width)
        take = partial(ops.take_pages, table, index, lens, PAGE)
        pairs = zip(take(), reference.take_pages(table, index, lens, PAGE), strict=True)
        error = max(float((a != b).float().mean()) for a, b in pairs)
        bench.add(f"take_pages {spans} x {index.shape[2]}", [take], 3 * index.nbytes, error)
