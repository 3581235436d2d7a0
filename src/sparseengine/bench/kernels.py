"""`sparseengine bench kernels`: every op against what it must move and against its twin.

Each op runs over rotating inputs that exceed the L2 cache, from a captured graph, and is compared
with its plain-torch twin. Bytes are those the op must move.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.attention.caps import device_caps
from sparseengine.attention.gathered import CudnnBackend, FlashBackend
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.attention.triton import TritonBackend
from sparseengine.bench import moe, prefill_kernels, slot_kernels, small_kernels
from sparseengine.bench.results import Outcome, Results
from sparseengine.bench.timing import HEADER, Bench, bench_copy, relative_error
from sparseengine.core.attention import AttentionNeed
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView, HostRows, Segment
from sparseengine.errors import ConfigError, nearest
from sparseengine.ops import reference

HEADS, GROUP, DIM, PAGE = 4, 8, 128, 16
LAYER = LayerSpec(
    kind=LayerKind.FULL, q_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM, value_dim=DIM
)
LATENT_HEADS, LATENT_DIM, LATENT_VALUES = 20, 576, 512
LATENT = LayerSpec(
    kind=LayerKind.LATENT,
    q_heads=LATENT_HEADS,
    kv_heads=1,
    head_dim=LATENT_DIM,
    value_dim=LATENT_VALUES,
)


def head_view(
    bench: Bench, lens: Sequence[int], queries: Sequence[int], dim: int = DIM
) -> AttentionView:
    """Random K and V in pages of one head each, in random order; per-head tables."""
    width = -(-max(lens) // PAGE)
    used = len(lens) * HEADS * width
    pages = torch.randperm(used, device=bench.device, dtype=torch.int64).int()
    pools = [bench.normal(used, 1, PAGE, dim) for _ in range(2)]
    rows = torch.tensor(lens, dtype=torch.int32, device=bench.device)[:, None].expand(-1, HEADS)
    segment = Segment(
        payload=((pools[0],), (pools[1],)),
        codec=(),
        values_in_keys=False,
        table=pages.reshape(len(lens), HEADS, width),
        lens=rows.contiguous(),
        page_size=PAGE,
    )
    return _viewed(bench, segment, queries, max(lens))


def latent_view(bench: Bench, lens: Sequence[int]) -> AttentionView:
    """Random latent rows of one query each, one table for all heads."""
    width = -(-max(lens) // PAGE)
    pages = torch.randperm(len(lens) * width, device=bench.device, dtype=torch.int64).int()
    pool = bench.normal(len(lens) * width, 1, PAGE, LATENT_DIM)
    segment = Segment(
        payload=((pool,),),
        codec=(),
        values_in_keys=True,
        table=pages.reshape(len(lens), 1, width),
        lens=torch.tensor(lens, dtype=torch.int32, device=bench.device)[:, None],
        page_size=PAGE,
    )
    return _viewed(bench, segment, [1] * len(lens), max(lens))


def _viewed(bench: Bench, segment: Segment, queries: Sequence[int], longest: int) -> AttentionView:
    cu_q = torch.tensor([0, *queries], device=bench.device).cumsum(0, dtype=torch.int32)
    singles = len(queries) if max(queries) == 1 else 0
    starts = tuple(accumulate(queries, initial=0))
    lens = segment.lens.cpu().numpy().astype(np.int32)
    host = HostRows(starts, lens)
    return AttentionView((segment,), cu_q, None, singles, max(queries), longest, host)


def _queries(bench: Bench, count: int) -> Tensor:
    return bench.normal(count, HEADS * GROUP, DIM)


def _first_spans(view: AttentionView, count: int) -> AttentionView:
    part = view.segments[0]
    assert isinstance(part.table, Tensor)
    segment = replace(part, table=part.table[:count], lens=part.lens[:count])
    single = min(view.num_single, count)
    return AttentionView((segment,), view.cu_q[: count + 1], None, single, view.max_q, view.max_len)


def bench_decode(bench: Bench) -> None:
    """One query per row; at last one long row among short ones, which must not set the pace."""
    backend = TritonBackend()
    for spans, length in bench.some((320, 2176), (21, 32768), (16, 2176)):
        spans, length = bench.size(spans, 2), bench.size(length, PAGE)
        views = [head_view(bench, [length] * spans, [1] * spans) for _ in range(2)]
        name, num_bytes = f"decode {spans} x {length}", 4 * spans * length * HEADS * DIM
        _add_decode(bench, name, backend, LAYER, views, num_bytes)
    lens = [bench.size(32768, 96), *[bench.size(2048, 8)] * bench.size(127, 2)]
    view = head_view(bench, lens, [1] * len(lens))
    name = f"decode {len(lens) - 1} x {lens[1]} + 1 x {lens[0]}"
    _add_decode(bench, name, backend, LAYER, [view], 4 * sum(lens) * HEADS * DIM)


def bench_latent(bench: Bench) -> None:
    """Decode of multi-head latent attention: one row for keys and values of all heads."""
    for spans, length in bench.some((78, 16384), (512, 2176), (16, 2176)):
        spans, length = bench.size(spans, 2), bench.size(length, PAGE)
        views = [latent_view(bench, [length] * spans) for _ in range(2)]
        name, num_bytes = f"latent decode {spans} x {length}", 2 * spans * length * LATENT_DIM
        _add_decode(bench, name, TritonBackend(), LATENT, views, num_bytes)


def _add_decode(
    bench: Bench,
    name: str,
    backend: TritonBackend,
    layer: LayerSpec,
    views: Sequence[AttentionView],
    num_bytes: int,
) -> None:
    spans = views[0].cu_q.shape[0] - 1
    qs = [bench.normal(spans, layer.q_heads, layer.head_dim) for _ in views]
    few = _first_spans(views[0], min(spans, 3))
    want = ReferenceBackend().run(qs[0][:3].float(), few, layer, None)
    error = relative_error(backend.run(qs[0], views[0], layer, None)[:3], want)
    calls = [partial(backend.run, q, v, layer, None) for q, v in zip(qs, views, strict=True)]
    bench.add(name, calls, num_bytes, error)


def bench_prefill(bench: Bench) -> None:
    """The newest `chunk` tokens of a row attend to all of it."""
    tail = bench.size(64, 4)
    need = AttentionNeed(layer=LAYER, dtype=torch.bfloat16, page_size=PAGE, per_head=True)
    others = [
        b
        for b in (CudnnBackend(), FlashBackend())
        if b.supports(need, device_caps(bench.device)).ok
    ]
    for context, chunk in bench.some((8192, 8192), (32768, 8192), (32768, 2048)):
        context, chunk = bench.size(context, 8), bench.size(chunk, 8)
        view, q = head_view(bench, [context], [chunk]), _queries(bench, chunk)
        cu_q = torch.tensor([0, tail], device=bench.device)
        last = AttentionView(view.segments, cu_q, None, 0, tail, context)
        want = ReferenceBackend().run(q[-tail:].float(), last, LAYER, None)
        pairs = chunk * context - chunk * (chunk - 1) // 2
        flop, num_bytes = 4 * pairs * HEADS * GROUP * DIM, 2 * 2 * context * HEADS * DIM
        for backend in (TritonBackend(), *others):
            error = relative_error(backend.run(q, view, LAYER, None)[-tail:], want)
            call = partial(backend.run, q, view, LAYER, None)
            name = f"prefill {chunk} of {context}, {backend.name}"
            bench.add(name, [call], num_bytes, error, flop)


def bench_sdpa(bench: Bench) -> None:
    """torch's own causal attention on contiguous keys, for comparison."""
    attend = torch.nn.functional.scaled_dot_product_attention
    kinds = torch.nn.attention.SDPBackend
    for context in (8192, 32768):
        context = bench.size(context, 8)
        q = bench.normal(1, HEADS * GROUP, context, DIM)
        k, v = (bench.normal(1, HEADS, context, DIM) for _ in range(2))
        flop = 4 * context * (context + 1) // 2 * HEADS * GROUP * DIM
        which = (kinds.MATH,) if bench.small else (kinds.CUDNN_ATTENTION, kinds.FLASH_ATTENTION)
        for backend in which:
            with torch.nn.attention.sdpa_kernel(backend):
                call = partial(attend, q, k, v, is_causal=True, enable_gqa=True)
                name = f"torch SDPA {backend.name[:5].lower()} {context}"
                bench.add(name, [call], 4 * context * HEADS * DIM, None, flop)


def bench_store(bench: Bench) -> None:
    for tokens in (320, 8192):
        tokens = bench.size(tokens)
        num_pages, runs = max(bench.size(4096), -(-tokens // PAGE)) * HEADS, []
        for _ in range(4):
            pools = [torch.empty_like(bench.normal(num_pages, 1, PAGE, DIM)) for _ in range(2)]
            values = [bench.normal(tokens, HEADS, DIM) for _ in range(2)]
            slots = torch.randperm(num_pages * PAGE, device=bench.device)[: HEADS * tokens]
            runs.append((pools, values, slots.reshape(HEADS, tokens)))
        pools, values, slots = runs[0]
        twins = [torch.zeros_like(p) for p in pools]
        for pool in pools:
            pool.zero_()
        ops.store(pools, values, slots)
        reference.store(twins, values, slots)
        error = max(relative_error(p, t) for p, t in zip(pools, twins, strict=True))
        calls = [partial(ops.store, *r) for r in runs]
        bench.add(f"store {tokens} tokens", calls, 2 * 2 * 2 * tokens * HEADS * DIM, error)


def bench_compact(bench: Bench) -> None:
    """The newest rows of one layer, and of a whole model's layers in one call."""
    for rows in (HEADS, 36 * 8):
        rows, length, keep = bench.size(rows, 2), bench.size(32768, 64), bench.size(2048, 16)
        width = length // PAGE
        table = torch.randperm(rows * width, device=bench.device).reshape(rows, width).int()
        pools = [bench.normal(rows * width, 1, PAGE, DIM) for _ in range(2)]
        mask = torch.zeros(rows, length, dtype=torch.bool, device=bench.device)
        for row in mask:
            row[torch.randperm(length, device=bench.device)[:keep]] = True
        twins = [p.clone() for p in pools]
        ops.compact(pools, table, mask)
        reference.compact(twins, table, mask)
        pages = table[:, : keep // PAGE].long().flatten()
        error = max(relative_error(p[pages], t[pages]) for p, t in zip(pools, twins, strict=True))
        num_bytes = 2 * 2 * 2 * rows * keep * DIM + 2 * rows * length
        name = f"compact {rows} x {length} to {keep}"
        bench.add(name, [partial(ops.compact, pools, table, mask)], num_bytes, error)


def bench_scores(bench: Bench) -> None:
    length, window = bench.size(32768, 96), bench.size(32, 4)
    views, q = [head_view(bench, [length], [1]) for _ in range(3)], _queries(bench, window)
    args = [
        (q, part.payload[0][0], part.table[0], part.lens[0], length, DIM**-0.5, "sum")
        for part in (v.segments[0] for v in views)
        if isinstance(part.table, Tensor)
    ]
    error = relative_error(ops.window_scores(*args[0]), reference.window_scores(*args[0]))
    calls = [partial(ops.window_scores, *a) for a in args]
    num_bytes = 2 * 2 * length * HEADS * DIM + 4 * HEADS * GROUP * length
    bench.add(f"window_scores {window} on {length}", calls, num_bytes, error)


def bench_pages(bench: Bench) -> None:
    spans, length = bench.size(21, 2), bench.size(32768, 64)
    view, q = head_view(bench, [length] * spans, [1] * spans), _queries(bench, spans)
    pool, table = view.segments[0].payload[0][0], view.segments[0].table
    assert isinstance(table, Tensor)
    low = torch.empty(pool.shape[0], 1, DIM, device=bench.device, dtype=bench.dtype)
    high = torch.empty_like(low)
    call = partial(ops.page_bounds, pool, table.flatten().long(), low, high)
    call()
    error = max(relative_error(low, pool.amin(2)), relative_error(high, pool.amax(2)))
    num_bytes = 2 * spans * length * HEADS * DIM
    bench.add(f"page_bounds {spans} x {length}", [call], num_bytes, error)
    got, want = (op(q, low, high, table, GROUP) for op in (ops.page_scores, reference.page_scores))
    score = partial(ops.page_scores, q, low, high, table, GROUP)
    num_bytes = num_bytes * 2 // PAGE + 4 * table.numel()
    bench.add(f"page_scores {spans} x {length}", [score], num_bytes, relative_error(got, want))


def bench_copy_pages(bench: Bench) -> None:
    count = bench.size(1 << 16)
    pool = bench.normal(2 * count, 1, PAGE, DIM)
    ids = torch.randperm(2 * count, device=bench.device)
    src, dst = ids[:count], ids[count:]
    ops.copy_pages((pool,), src, dst)
    error = relative_error(pool[dst], pool[src])
    call = partial(ops.copy_pages, (pool,), src, dst)
    bench.add(f"copy_pages {count}", [call], 2 * 2 * count * PAGE * DIM, error)


GROUPS: dict[str, Callable[[Bench], None]] = {
    "decode": bench_decode,
    "latent": bench_latent,
    "prefill": bench_prefill,
    "masked": prefill_kernels.bench_masked,
    "choose": prefill_kernels.bench_choices,
    "sdpa": bench_sdpa,
    "store": bench_store,
    "compact": bench_compact,
    "scores": bench_scores,
    "pages": bench_pages,
    "slots": slot_kernels.bench_slots,
    "select": small_kernels.bench_select,
    "fused": small_kernels.bench_fused,
    "copy_pages": bench_copy_pages,
    "moe": moe.bench_moe,
}


def chosen(only: str | None) -> list[str]:
    """Names of groups. Raises `ConfigError` for an unknown one."""
    names = [n.strip() for n in only.split(",")] if only else list(GROUPS)
    for name in names:
        if name not in GROUPS:
            raise ConfigError(f"--only {name!r}: {nearest(name, GROUPS)}")
    return names


def run(args: argparse.Namespace) -> int:
    """The command. Raises `ConfigError` without a CUDA device."""
    names, results = chosen(args.only), Results(args)
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench kernels needs a CUDA device: on a CPU the kernels are only interpreted"
        )
    torch.manual_seed(0)
    bench = Bench()
    print(HEADER)
    bench_copy(bench)
    for name in names:
        GROUPS[name](bench)
    outcome = Outcome(bench="kernels", rows=bench.rows(), raw=bench.raw)
    results.publish(outcome, [])
    return 0
