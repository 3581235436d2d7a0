"""Prometheus metrics: vLLM's suffixes under `sparseengine:`, and ours."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from sparseengine.async_llm import AsyncLLM
from sparseengine.core.plan import MISS_REASONS
from sparseengine.engine.messages import Delta
from sparseengine.engine.record import SparseOutput
from sparseengine.engine.stats import TOKEN_BOUNDS
from sparseengine.methods import METHODS

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAUGES = {
    "num_requests_running": "completions in the engine's steps",
    "num_requests_waiting": "completions that wait for memory or a place",
    "kv_cache_usage_perc": "share of KV pages in use, 0 to 1",
    "kv_tokens_logical": "tokens that running requests stand for",
    "kv_tokens_resident": "tokens that dense rows of the same bytes would hold",
    "kv_bytes_read_per_step": "KV bytes that the decodes of a step read, by lengths and budgets",
}
_COUNTERS = {
    "prompt_tokens": "prompt tokens of requests",
    "generation_tokens": "tokens generated",
    "num_preemptions": "requests that were put back to make room",
    "num_shrinks": "times that a request evicted more to make room",
    "prefix_cache_queries": "prompt tokens that were looked up among stored prefixes",
    "prefix_cache_hits": "prompt tokens that were found there",
}
_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
_REASONS = ("stop", "length", "abort", "error")
_PREFIX = "sparseengine:"


@dataclass(slots=True)
class _Running:
    arrival: float
    first: float | None = None
    last: dict[int, float] = field(default_factory=dict)


class Metrics:
    """Histograms are fed by deltas as they come, gauges and counters are the engine's own."""

    def __init__(self, model: str, llm: AsyncLLM) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineValues(model, llm))
        self._running: dict[int, _Running] = {}

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(
                _PREFIX + name, doc, ["model_name"], registry=self.registry, buckets=buckets
            )
            return made.labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "arrival to first token", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "between two tokens", _SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "arrival to the end", _TTFT)
        self._model = model
        self._dropped = Histogram(
            _PREFIX + "kv_dropped_mass",
            "estimated part of attention that went to evicted tokens, per completion that asked",
            ["model_name", "method"],
            registry=self.registry,
            buckets=_SHARES,
        )
        self._http = Counter(
            _PREFIX + "http_requests",
            "HTTP answers",
            ["path", "status"],
            registry=self.registry,
        )
        llm.on_delta = self.delta

    def answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def started(self, key: int, prompt_tokens: int) -> None:
        self._running[key] = _Running(time.monotonic())

    def delta(self, at: float, delta: Delta) -> None:
        state = self._running.get(delta.key)
        if state is None:
            return
        if delta.token_ids:
            if state.first is None:
                state.first = at
                self._ttft.observe(max(0.0, at - state.arrival))
            before = state.last.get(delta.choice)
            if before is not None:
                self._itl.observe(max(0.0, at - before))
            state.last[delta.choice] = at
        if delta.finish_reason is not None and delta.sparse is not None:
            self._note_dropped(delta.sparse)
        if delta.is_last:
            self._e2e.observe(max(0.0, at - state.arrival))
            del self._running[delta.key]

    def _note_dropped(self, record: SparseOutput) -> None:
        """A completion counts once, with the mean of its decode steps."""
        if record.dropped_mass:
            mean = sum(step.mean for step in record.dropped_mass) / len(record.dropped_mass)
            self._dropped.labels(self._model, METHODS.canonical(record.method)).observe(mean)

    def dropped(self, key: int) -> None:
        """Nobody waits for it any more; does nothing when it has ended."""
        self._running.pop(key, None)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineValues(Collector):
    """The engine's gauges and counters at the time of a scrape."""

    def __init__(self, model: str, llm: AsyncLLM) -> None:
        self._labels = ("model_name",)
        self._model = model
        self._llm = llm

    def collect(self) -> Iterator[Any]:
        values = self._llm.metrics
        for name, doc in _GAUGES.items():
            yield self._gauge(name, doc, values.get(name, 0.0))
        yield self._gauge(
            "engine_step_age_seconds", "since the engine's loop went round", self._llm.beat_age
        )
        for name, doc in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, doc, labels=self._labels)
            counter.add_metric([self._model], values.get(name, 0.0))
            yield counter
        ended = CounterMetricFamily(
            _PREFIX + "request_success",
            "completions by the reason of their end",
            labels=[*self._labels, "finished_reason"],
        )
        for reason in _REASONS:
            ended.add_metric([self._model, reason], values.get(f"request_success_{reason}", 0.0))
        yield ended
        freed = CounterMetricFamily(
            _PREFIX + "kv_bytes_freed",
            "bytes that ended requests held less than dense rows would",
            labels=[*self._labels, "method"],
        )
        for method, count in self._llm.freed_bytes.items():
            freed.add_metric([self._model, method], count)
        yield freed
        yield self._misses(values)
        yield self._fallbacks(values)
        yield self._iterations(values)

    def _misses(self, values: Mapping[str, float]) -> CounterMetricFamily:
        found = CounterMetricFamily(
            _PREFIX + "prefix_miss",
            "requests of which not all that could be was found stored, by the reason",
            labels=[*self._labels, "reason"],
        )
        for reason in MISS_REASONS:
            found.add_metric([self._model, reason], values.get(f"prefix_miss_{reason}", 0.0))
        return found

    def _fallbacks(self, values: Mapping[str, float]) -> CounterMetricFamily:
        """The one site that decides anew at every step; the others are in /server_info."""
        found = CounterMetricFamily(
            _PREFIX + "route_fallback",
            "steps of decodes that ran eagerly although graphs are captured",
            labels=[*self._labels, "site"],
        )
        found.add_metric(
            [self._model, "decode_graph"], values.get("route_fallback_decode_graph", 0.0)
        )
        return found

    def _iterations(self, values: Mapping[str, float]) -> HistogramMetricFamily:
        found = HistogramMetricFamily(
            _PREFIX + "iteration_tokens", "tokens of a step", labels=self._labels
        )
        buckets, total = [], 0.0
        for bound in (*TOKEN_BOUNDS, "inf"):
            total += values.get(f"iteration_tokens_le_{bound}", 0.0)
            buckets.append(("+Inf" if bound == "inf" else str(float(bound)), total))
        found.add_metric([self._model], buckets, values.get("iteration_tokens_sum", 0.0))
        return found

    def _gauge(self, name: str, doc: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(_PREFIX + name, doc, labels=self._labels)
        gauge.add_metric([self._model], value)
        return gauge
