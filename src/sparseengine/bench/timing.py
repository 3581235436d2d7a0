"""Timing of single kernels: graph replay over rotating inputs, bytes against the copy roof."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

REPEATS = 7
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured op. `share` is the part of the copy roof (bytes) that it reaches.

    error: relative, against the plain-torch twin; None where the op is torch's own.
    """

    op: str
    time_us: float
    spread_us: float
    bytes: int
    tb_per_s: float
    share: float
    tflop_per_s: float | None
    error: float | None


def times_us(calls: Calls, inner: int = 4, *, device: str = "cuda") -> list[float]:
    """Microseconds of one call, one figure per repeat; `calls` do the same on different inputs."""
    if device == "cpu":
        return _host_times_us(calls)
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
    return times


def _host_times_us(calls: Calls) -> list[float]:
    """The same on the host's clock, once: for tests, in which kernels are interpreted."""
    start = time.perf_counter()
    for call in calls:
        call()
    return [(time.perf_counter() - start) * 1e6 / len(calls)]


def relative_error(got: Tensor, want: Tensor) -> float:
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


class Bench:
    """Collects results against the measured copy roof.

    small: sizes for tests; a group then runs each of its shapes cut down to a few tokens.
    """

    def __init__(self, device: str = "cuda", *, small: bool = False) -> None:
        self.device, self.small = device, small
        self.dtype = torch.float16 if small else torch.bfloat16  # the interpreter's dot needs it
        self.results: list[Result] = []
        self.raw: list[dict[str, Any]] = []
        self.roof = 0.0

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def size(self, count: int, least: int = 1) -> int:
        """A size as it is measured, or cut down for a test."""
        return max(least, count // 256) if self.small else count

    def some(self, *shapes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """All shapes of a group, or the last one for a test."""
        return shapes[-1:] if self.small else shapes

    def add(
        self, op: str, calls: Calls, num_bytes: int, error: float | None, flop: int | None = None
    ) -> None:
        """Time one op and print its row. num_bytes, flop: of one call."""
        times = times_us(calls, device=self.device)
        median = statistics.median(times)
        rate = num_bytes / median / 1e6
        self.roof = self.roof or rate
        self.raw += [{"op": op, "what": "time_us", "value": t} for t in times]
        self.results.append(
            Result(
                op=op,
                time_us=round(median, 2),
                spread_us=round(max(times) - min(times), 2),
                bytes=num_bytes,
                tb_per_s=round(rate, 3),
                share=round(rate / self.roof, 3),
                tflop_per_s=round(flop / median / 1e6, 1) if flop else None,
                error=error,
            )
        )
        print(row(self.results[-1]), flush=True)

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(result) for result in self.results]


HEADER = (
    f"{'op':<36}{'time us':>11}{'spread':>9}{'MB':>11}{'TB/s':>8}{'share':>7}"
    f"{'TFLOP/s':>9}{'error':>9}"
)


def row(r: Result) -> str:
    """A result under `HEADER`."""
    flop = f"{r.tflop_per_s:9.1f}" if r.tflop_per_s else "        -"
    error = f"{r.error:9.1e}" if r.error is not None else "        -"
    return (
        f"{r.op:<36}{r.time_us:>11.2f}{r.spread_us:>9.2f}{r.bytes / 1e6:>11.1f}"
        f"{r.tb_per_s:>8.3f}{r.share:>7.2f}{flop}{error}"
    )


def bench_copy(bench: Bench) -> None:
    """The roof that shares are of."""
    source = bench.normal(bench.size(1 << 30))
    target = torch.empty_like(source)
    num_bytes = 2 * source.nbytes
    bench.add("device copy (roof)", [lambda: torch.neg(source, out=target)], num_bytes, None)
