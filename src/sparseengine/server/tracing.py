"""OpenTelemetry: one span per request, with what its access line says. Needs the extra `otel`."""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import TYPE_CHECKING, Any

from sparseengine import __version__
from sparseengine.errors import ConfigError

if TYPE_CHECKING:  # the flags are parsed without torch
    from sparseengine.server.records import Record

_PREFIX = "sparseengine."
_OTLP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def check_tracing(endpoint: str) -> None:
    """Raise `ConfigError` before a model is loaded when spans could not be sent."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is not allowed; it must be an http(s) address "
            "such as http://localhost:4318/v1/traces"
        )
    try:
        found = importlib.util.find_spec(_OTLP) and importlib.util.find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'sparseengine[otel]'"
        )


class Tracer:
    """Turns finished requests into spans; a batch is sent now and then, beside the event loop."""

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": "sparseengine", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sparseengine.server", __version__)

    @classmethod
    def to(cls, endpoint: str) -> Tracer:
        """Spans go to a collector that takes OTLP over HTTP."""
        check_tracing(endpoint)
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = importlib.import_module(_OTLP).OTLPSpanExporter(endpoint=endpoint)
        return cls(BatchSpanProcessor(exporter))

    def ended(self, record: Record, traceparent: str | None, route: str) -> None:
        """A request is over. traceparent: the client's header, whose trace the span joins."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        fields = record.fields()
        end = time.time_ns()
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        span = self._tracer.start_span(
            f"{record.verb} {route}",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=end - int(fields["seconds"] * 1e9),
            attributes={_PREFIX + k: v for k, v in fields.items() if v is not None},
        )
        if record.status >= 500 or "error" in record.finishes:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
