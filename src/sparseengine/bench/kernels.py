"""Kernel microbenchmark: `sparseengine bench kernels` on a CUDA device.

Each op runs over rotating inputs that exceed the L2 cache, from a captured graph, and is compared
with its plain-torch twin. Bytes are those the op must move. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.attention.triton import TritonBackend
from sparseengine.bench.kernels_prefill import bench_choices, bench_masked
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.core.view import AttentionView, Segment
from sparseengine.errors import ConfigError
from sparseengine.ops import reference

HEADS, GROUP, DIM, PAGE = 4, 8, 128, 16
LAYER = LayerSpec(
    kind=LayerKind.FULL, q_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM, value_dim=DIM
)
REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured op. `share` is the part of the copy roof (bytes) that it reaches."""

    op: str
    time_us: float
    spread_us: float
    bytes: int
    tb_per_s: float
    share: float
    tflop_per_s: float | None
    error: float | None


def time_us(calls: Sequence[Callable[[], object]], inner: int = 4) -> tuple[float, float]:
    """(median, spread) of one call; `calls` do the same work on different inputs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:  # compile and warm up
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inner):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (inner * len(calls)))
    return statistics.median(times), max(times) - min(times)


def relative_error(got: Tensor, want: Tensor) -> float:
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


def head_view(lens: Sequence[int], queries: Sequence[int]) -> AttentionView:
    """Random bf16 K and V in pages of one head each, in random order; per-head tables."""
    width = -(-max(lens) // PAGE)
    used = len(lens) * HEADS * width
    pages = torch.randperm(used, device="cuda", dtype=torch.int64).int()
    pools = [torch.randn(used, 1, PAGE, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    rows = torch.tensor(lens, dtype=torch.int32, device="cuda")[:, None].expand(-1, HEADS)
    segment = Segment(
        payload=((pools[0],), (pools[1],)),
        codec=(),
        values_in_keys=False,
        table=pages.reshape(len(lens), HEADS, width),
        lens=rows.contiguous(),
        page_size=PAGE,
    )
    cu_q = torch.tensor([0, *queries], device="cuda").cumsum(0, dtype=torch.int32)
    singles = len(queries) if max(queries) == 1 else 0
    return AttentionView((segment,), cu_q, None, singles, max(queries), max(lens))


def _queries(count: int) -> Tensor:
    return torch.randn(count, HEADS * GROUP, DIM, device="cuda", dtype=torch.bfloat16)


def _first_spans(view: AttentionView, count: int) -> AttentionView:
    part = view.segments[0]
    segment = Segment(
        part.payload, (), False, part.table[:count], part.lens[:count], part.page_size
    )
    single = min(view.num_single, count)
    return AttentionView((segment,), view.cu_q[: count + 1], None, single, view.max_q, view.max_len)


class Bench:
    """Collects results against the measured copy roof."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.roof = 0.0

    def add(
        self,
        op: str,
        calls: Sequence[Callable[[], object]],
        num_bytes: int,
        error: float | None,
        flop: int | None = None,
    ) -> None:
        median, spread = time_us(calls)
        rate = num_bytes / median / 1e6
        self.roof = self.roof or rate
        self.results.append(
            Result(
                op=op,
                time_us=round(median, 2),
                spread_us=round(spread, 2),
                bytes=num_bytes,
                tb_per_s=round(rate, 3),
                share=round(rate / self.roof, 3),
                tflop_per_s=round(flop / median / 1e6, 1) if flop else None,
                error=error,
            )
        )
        print(_row(self.results[-1]), flush=True)


def _row(r: Result) -> str:
    flop = f"{r.tflop_per_s:8.1f}" if r.tflop_per_s else "       -"
    error = f"{r.error:9.1e}" if r.error is not None else "        -"
    return (
        f"{r.op:<34}{r.time_us:>11.2f}{r.spread_us:>9.2f}{r.bytes / 1e6:>11.1f}"
        f"{r.tb_per_s:>8.3f}{r.share:>7.2f}{flop}{error}"
    )


def bench_copy(bench: Bench) -> None:
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    bench.add("device copy (roof)", [lambda: torch.neg(source, out=target)], 4 << 30, None)


def bench_decode(bench: Bench, spans: int, length: int) -> None:
    backend, sets = TritonBackend(), 2
    views = [head_view([length] * spans, [1] * spans) for _ in range(sets)]
    qs = [_queries(spans) for _ in range(sets)]
    few = _first_spans(views[0], min(spans, 3))
    want = ReferenceBackend().run(qs[0][:3].float(), few, LAYER, None)
    error = relative_error(backend.run(qs[0], views[0], LAYER, None)[:3], want)
    calls = [
        lambda q=q, view=view: backend.run(q, view, LAYER, None)
        for q, view in zip(qs, views, strict=True)
    ]
    num_bytes = 2 * 2 * spans * length * HEADS * DIM
    bench.add(f"decode {spans} x {length}", calls, num_bytes, error)


def bench_uneven_decode(bench: Bench) -> None:
    """One long row among short ones must not set the pace."""
    lens = [32768] + [2048] * 127
    view, q, backend = head_view(lens, [1] * len(lens)), _queries(len(lens)), TritonBackend()
    want = ReferenceBackend().run(q[:2].float(), _first_spans(view, 2), LAYER, None)
    error = relative_error(backend.run(q, view, LAYER, None)[:2], want)
    num_bytes = 2 * 2 * sum(lens) * HEADS * DIM
    call = lambda: backend.run(q, view, LAYER, None)  # noqa: E731
    bench.add("decode 127 x 2048 + 1 x 32768", [call], num_bytes, error)


def bench_prefill(bench: Bench, context: int, chunk: int) -> None:
    view, q, backend = head_view([context], [chunk]), _queries(chunk), TritonBackend()
    got = backend.run(q, view, LAYER, None)
    last = AttentionView(view.segments, torch.tensor([0, 64], device="cuda"), None, 0, 64, context)
    want = ReferenceBackend().run(q[-64:].float(), last, LAYER, None)
    pairs = chunk * context - chunk * (chunk - 1) // 2
    flop, num_bytes = 4 * pairs * HEADS * GROUP * DIM, 2 * 2 * context * HEADS * DIM
    call = lambda: backend.run(q, view, LAYER, None)  # noqa: E731
    error = relative_error(got[-64:], want)
    bench.add(f"prefill {chunk} of {context}", [call], num_bytes, error, flop)


def bench_sdpa(bench: Bench, context: int) -> None:
    """torch's own causal attention on contiguous keys, for comparison."""
    shape = (1, HEADS * GROUP, context, DIM)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(1, HEADS, context, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    flop = 4 * context * (context + 1) // 2 * HEADS * GROUP * DIM
    attend = torch.nn.functional.scaled_dot_product_attention
    for backend in (
        torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
        torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    ):
        with torch.nn.attention.sdpa_kernel(backend):
            call = lambda: attend(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            name = f"torch SDPA {backend.name[:5].lower()} {context}"
            bench.add(name, [call], 4 * context * HEADS * DIM, None, flop)


def bench_storage(bench: Bench, tokens: int) -> None:
    sets, num_pages = 4, max(4096, tokens // PAGE) * HEADS
    runs = []
    for _ in range(sets):
        pools = [
            torch.empty(num_pages, 1, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        ]
        values = [
            torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        ]
        slots = torch.randperm(num_pages * PAGE, device="cuda")[: HEADS * tokens]
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


def bench_compact(bench: Bench, rows: int, length: int, keep: int) -> None:
    width = length // PAGE
    table = torch.randperm(rows * width, device="cuda").reshape(rows, width).int()
    pools = [
        torch.randn(rows * width, 1, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    mask = torch.zeros(rows, length, dtype=torch.bool, device="cuda")
    for row in mask:
        row[torch.randperm(length, device="cuda")[:keep]] = True
    twins = [p.clone() for p in pools]
    ops.compact(pools, table, mask)
    reference.compact(twins, table, mask)
    pages = table[:, : keep // PAGE].long().flatten()
    error = max(relative_error(p[pages], t[pages]) for p, t in zip(pools, twins, strict=True))
    num_bytes = 2 * 2 * 2 * rows * keep * DIM + 2 * rows * length
    name = f"compact {rows} x {length} to {keep}"
    bench.add(name, [lambda: ops.compact(pools, table, mask)], num_bytes, error)


def bench_scores(bench: Bench, length: int, window: int) -> None:
    views, q = [head_view([length], [1]) for _ in range(3)], _queries(window)
    args = [
        (q, v.segments[0].payload[0][0], v.segments[0].table[0], v.segments[0].lens[0], length,
         DIM**-0.5, "sum")
        for v in views
    ]  # fmt: skip
    error = relative_error(ops.window_scores(*args[0]), reference.window_scores(*args[0]))
    calls = [lambda a=a: ops.window_scores(*a) for a in args]
    num_bytes = 2 * 2 * length * HEADS * DIM + 4 * HEADS * GROUP * length
    bench.add(f"window_scores {window} on {length}", calls, num_bytes, error)


def bench_pages(bench: Bench, spans: int, length: int) -> None:
    view, q = head_view([length] * spans, [1] * spans), _queries(spans)
    pool, table = view.segments[0].payload[0][0], view.segments[0].table
    pages = table.flatten().long()
    low = torch.empty(pool.shape[0], 1, DIM, device="cuda", dtype=torch.bfloat16)
    high = torch.empty_like(low)
    call = partial(ops.page_bounds, pool, pages, low, high)
    call()
    error = max(relative_error(low, pool.amin(2)), relative_error(high, pool.amax(2)))
    num_bytes = 2 * spans * length * HEADS * DIM
    bench.add(f"page_bounds {spans} x {length}", [call], num_bytes, error)
    got, want = (op(q, low, high, table, GROUP) for op in (ops.page_scores, reference.page_scores))
    score = lambda: ops.page_scores(q, low, high, table, GROUP)  # noqa: E731
    num_bytes = num_bytes * 2 // PAGE + 4 * table.numel()
    bench.add(f"page_scores {spans} x {length}", [score], num_bytes, relative_error(got, want))


def bench_copy_pages(bench: Bench) -> None:
    pool = torch.randn(1 << 17, 1, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.randperm(1 << 17, device="cuda")
    src, dst = ids[: 1 << 16], ids[1 << 16 :]
    ops.copy_pages((pool,), src, dst)
    error = relative_error(pool[dst], pool[src])
    num_bytes = 2 * 2 * (1 << 16) * PAGE * DIM
    bench.add("copy_pages 65536", [lambda: ops.copy_pages((pool,), src, dst)], num_bytes, error)


def run(quick: bool) -> list[Result]:
    """All benchmarks in order; the first measures the roof."""
    bench = Bench()
    bench_copy(bench)
    for spans, length in ((320, 2176), (21, 32768), (16, 2176)):
        bench_decode(bench, spans, length)
    bench_uneven_decode(bench)
    for context, chunk in ((8192, 8192), (32768, 8192), (32768, 2048)):
        bench_prefill(bench, context, chunk)
    if not quick:
        bench_sdpa(bench, 8192)
        bench_sdpa(bench, 32768)
    view, q = head_view([131072], [8192]), _queries(8192)
    for keep in (0.1, 0.25):
        bench_masked(bench, LAYER, view, q, keep)
    bench_choices(bench, LAYER, view, q)
    bench_storage(bench, 320)
    bench_storage(bench, 8192)
    bench_compact(bench, HEADS, 32768, 2048)
    bench_compact(bench, 36 * 8, 32768, 2048)
    bench_scores(bench, 32768, 32)
    bench_pages(bench, 21, 32768)
    bench_copy_pages(bench)
    return bench.results


def report(quick: bool) -> None:
    """Run everything and print the table, then one JSON line. Needs a CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench kernels needs a CUDA device: on a CPU the kernels are only interpreted"
        )
    torch.manual_seed(0)
    print(
        f"{'op':<34}{'time us':>11}{'spread':>9}{'MB':>11}{'TB/s':>8}{'share':>7}"
        f"{'TFLOP/s':>8}{'error':>9}"
    )
    results = run(quick)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({**facts, "results": [asdict(r) for r in results]}))
