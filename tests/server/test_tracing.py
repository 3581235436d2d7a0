"""One span per request: the client's trace, the access line's fields, and nothing of the texts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fixtures.servers import serving
from sparseengine.cli.main import main
from sparseengine.server import tracing
from sparseengine.server.tracing import Tracer

ENDPOINT = "http://127.0.0.1:4318/v1/traces"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_span_per_request(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    made: list[str] = []

    def to(cls: Any, endpoint: str) -> Tracer:
        made.append(endpoint)
        return Tracer(SimpleSpanProcessor(exporter))

    monkeypatch.setattr(Tracer, "to", classmethod(to))
    begin = time.time_ns()
    with serving(checkpoint, otlp_traces_endpoint=ENDPOINT, api_keys=("hush",)) as served:
        body = {"prompt": "a secret", "max_tokens": 3, "ignore_eos": True}
        headers = {"Authorization": "Bearer hush", "traceparent": f"00-{TRACE}-{SPAN}-01"}
        assert served.post("/v1/completions", body, headers=headers).status_code == 200
        assert served.post("/v1/completions", body).status_code == 401
        served.get("/health")
        served.get("/no/such/secret", headers=headers)
    assert made == [ENDPOINT]
    first, second, third = exporter.get_finished_spans()
    assert first.name == "POST /v1/completions"
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == SPAN
    assert begin <= first.start_time < first.end_time <= time.time_ns()
    assert first.attributes["sparseengine.output_tokens"] == 3
    assert first.attributes["sparseengine.method"] == "full"
    assert first.attributes["sparseengine.resident_bytes"] > 0
    assert first.attributes["sparseengine.end"] == "length"
    assert second.attributes["sparseengine.status"] == 401
    assert second.parent is None
    assert third.name == "GET other"  # names of spans are few, whatever clients send
    assert "a secret" not in str([dict(s.attributes) for s in (first, second, third)])
    assert "hush" not in str([dict(s.attributes) for s in (first, second, third)])


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [("localhost:4318", "http(s) address"), (ENDPOINT, "sparseengine[otel]")],
)
def test_what_cannot_be_traced_is_said_before_a_model_is_loaded(
    endpoint: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_OTLP", "opentelemetry.exporter.is.missing")
    assert main(["serve", "/no/such/model", "--otlp-traces-endpoint", endpoint]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_imported_unless_asked_for() -> None:
    code = (
        "import sys; from sparseengine.server import tracing; print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
