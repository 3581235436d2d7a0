"""Microbenchmarks of sparse prefill: the masked kernel at given densities, and choosing blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.attention.triton import TritonBackend
from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import LayerSpec, ModelSpec
from sparseengine.core.view import AttentionView, BlockMask
from sparseengine.methods.prefill import PATTERNS, make_pattern

if TYPE_CHECKING:
    from sparseengine.bench.kernels import Bench

BLOCK = 128


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


def _random_mask(heads: int, context: int, chunk: int, keep: float) -> BlockMask:
    """The first block, the queries' own and `keep` of the others."""
    rows, columns = chunk // BLOCK, context // BLOCK
    own = torch.arange(columns - rows, columns, device="cuda")[:, None]
    column = torch.arange(columns, device="cuda")
    mask = torch.rand(heads, rows, columns, device="cuda") < keep
    mask = (mask | (column == own) | (column == 0)) & (column <= own)
    return BlockMask(mask, BLOCK)


def bench_masked(
    bench: Bench, layer: LayerSpec, view: AttentionView, q: Tensor, keep: float
) -> None:
    """FLOP are those of the blocks read, diagonal ones in full."""
    context, chunk = view.max_len, len(q)
    mask = _random_mask(layer.q_heads, context, chunk, keep)
    masked = view.masked({0: mask})
    got = TritonBackend().run(q, masked, layer, None)[-BLOCK:]
    cu_q = torch.tensor([0, BLOCK], device="cuda", dtype=torch.int32)
    last = AttentionView(view.segments, cu_q, None, 0, BLOCK, context)
    last = last.masked({0: BlockMask(mask.mask[:, -1:], BLOCK)})
    want = ReferenceBackend().run(q[-BLOCK:].float(), last, layer, None)
    error = float((got.double() - want).norm() / want.norm())
    flop = 4 * int(mask.mask.sum()) * BLOCK * BLOCK * layer.head_dim
    num_bytes = 2 * 2 * context * layer.kv_heads * layer.head_dim
    call = lambda: TritonBackend().run(q, masked, layer, None)  # noqa: E731
    bench.add(f"masked {chunk} of {context}, {keep:.0%}", [call], num_bytes, error, flop)


def bench_choices(bench: Bench, layer: LayerSpec, view: AttentionView, q: Tensor) -> None:
    """What every pattern's choice of blocks takes, at its defaults, beside the attention itself."""
    context, chunk = view.max_len, len(q)
    model = ModelSpec(
        layers=(layer,), vocab_size=1, hidden_size=1, max_position=context, dtype=q.dtype
    )
    request = Request(0, [0] * (2 * context), 2 * context, 1)
    plan = StepPlan((Chunk(request, (0,) * chunk, context - chunk, Purpose.PREFILL, False),))
    step = cast(LayerStep, _Step(layer, plan, q, view))
    num_bytes = 2 * context * layer.kv_heads * layer.head_dim
    for name in PATTERNS:
        pattern = make_pattern(name, {}, model)
        if type(pattern).pattern is not PrefillPattern.pattern:
            call = lambda chosen=pattern: chosen.pattern(step, 0)  # noqa: E731
            bench.add(f"choose {name}", [call], num_bytes, None)
