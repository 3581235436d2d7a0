"""Sparse prefill, groups of `bench kernels`: the masked kernel, and choosing blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.attention.triton import TritonBackend
from sparseengine.bench.timing import Bench, relative_error
from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec
from sparseengine.core.view import AttentionView, BlockMask, Segment
from sparseengine.methods.prefill import PATTERNS, make_pattern

HEADS, GROUP, DIM, PAGE = 8, 4, 128, 16
LAYER = LayerSpec(
    kind=LayerKind.FULL, q_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM, value_dim=DIM
)
CONTEXT, CHUNK = 131072, 8192


@dataclass
class _Step:
    """What patterns look at of a step of one chunk."""

    spec: LayerSpec
    plan: StepPlan
    q: Tensor
    view: AttentionView
    layer: int = 0

    def span(self, chunk: int) -> tuple[int, int]:
        return 0, len(self.q)

    def lens(self, chunk: int) -> tuple[int, ...]:
        return (self.view.max_len,)

    def gather(self, name: str, chunk: int) -> Tensor:
        part = self.view.segments[0]
        table, pool = part.dense_table()[0], part.payload[0][0]
        return ops.gather_rows(pool, table, part.lens[0], self.spec.kv_heads, self.view.max_len)


def _problem(bench: Bench) -> tuple[Tensor, AttentionView, int]:
    """Queries of the newest chunk of a long row, its view, and queries per block."""
    block = 16 if bench.small else 128
    context, chunk = bench.size(CONTEXT), bench.size(CHUNK)
    width = context // PAGE
    pages = torch.randperm(width, device=bench.device, dtype=torch.int64).int()
    pools = [bench.normal(width, HEADS, PAGE, DIM) for _ in range(2)]
    segment = Segment(
        payload=((pools[0],), (pools[1],)),
        codec=(),
        values_in_keys=False,
        table=pages.reshape(1, 1, width),
        lens=torch.full((1, 1), context, dtype=torch.int32, device=bench.device),
        page_size=PAGE,
    )
    cu_q = torch.tensor([0, chunk], device=bench.device, dtype=torch.int32)
    view = AttentionView((segment,), cu_q, None, 0, chunk, context)
    return bench.normal(chunk, HEADS * GROUP, DIM), view, block


def _random_mask(view: AttentionView, block: int, keep: float) -> BlockMask:
    """The first block, the queries' own and `keep` of the others."""
    device, rows, columns = view.cu_q.device, view.max_q // block, view.max_len // block
    own = torch.arange(columns - rows, columns, device=device)[:, None]
    column = torch.arange(columns, device=device)
    mask = torch.rand(HEADS * GROUP, rows, columns, device=device) < keep
    mask = (mask | (column == own) | (column == 0)) & (column <= own)
    return BlockMask(mask, block)


def bench_masked(bench: Bench) -> None:
    """FLOP are those of the blocks read, diagonal ones in full."""
    q, view, block = _problem(bench)
    for keep in bench.some((1.0,), (0.25,), (0.1,)):
        mask = _random_mask(view, block, *keep)
        masked = view.masked({0: mask})
        got = TritonBackend().run(q, masked, LAYER, None)[-block:]
        cu_q = torch.tensor([0, block], device=q.device, dtype=torch.int32)
        last = AttentionView(view.segments, cu_q, None, 0, block, view.max_len)
        last = last.masked({0: BlockMask(mask.mask[:, -1:], block)})
        want = ReferenceBackend().run(q[-block:].float(), last, LAYER, None)
        flop = 4 * int(mask.mask.sum()) * block * block * DIM
        call = partial(TritonBackend().run, q, masked, LAYER, None)
        name = f"masked {len(q)} of {view.max_len}, {keep[0]:.0%}"
        num_bytes = 4 * view.max_len * HEADS * DIM
        bench.add(name, [call], num_bytes, relative_error(got, want), flop)


def bench_choices(bench: Bench) -> None:
    """What each pattern's choice of blocks takes, at its defaults, on top of the attention."""
    q, view, block = _problem(bench)
    context = view.max_len
    model = ModelSpec(
        layers=(LAYER,), vocab_size=1, hidden_size=1, max_position=context, dtype=q.dtype
    )
    request = Request(0, [0] * (2 * context), 2 * context, 1)
    start = context - len(q)
    plan = StepPlan((Chunk(request, (0,) * len(q), start, Purpose.PREFILL, False),))
    step = cast(LayerStep, _Step(LAYER, plan, q, view))
    knobs: dict[str, Any] = {"min_tokens": 0, "block": block} if bench.small else {}
    for name in PATTERNS:
        if PATTERNS.get(name).pattern is not PrefillPattern.pattern:
            call = partial(make_pattern(name, knobs, model).pattern, step, 0)
            bench.add(f"choose {name}", [call], 2 * context * HEADS * DIM, None)
