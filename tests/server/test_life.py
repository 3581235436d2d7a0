"""Queues, keys, health, disconnects, shutdown: the server as its operator meets it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.servers import Served, serving
from sparseengine.engine import host
from sparseengine.engine.scheduler import Scheduler
from sparseengine.methods.snapkv import SnapKV

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "fox", "max_tokens": 200, "ignore_eos": True}


def open_stream(served: Served, body: dict[str, Any]) -> socket.socket:
    """A request sent by hand, its first bytes read; the caller closes it."""
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=30)
    text = json.dumps({**body, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(head.encode() + f"Content-Length: {len(text)}\r\n\r\n".encode() + text)
    return sock


# ── going away ────────────────────────────────────────────────────────────────────────────────────


def test_disconnects_free_all_pages(served: Served) -> None:
    """Case 35: 32 streams at once, all cut midway, some before their first token."""
    socks = [open_stream(served, {**LONG, "n": 1 + i % 3}) for i in range(32)]
    for sock in socks[::2]:
        assert sock.recv(200).startswith(b"HTTP/1.1 200")
    for sock in socks:
        sock.close()
    served.wait_idle()
    assert served.post(COMPLETIONS, {"prompt": "fox", "max_tokens": 2}).status_code == 200


def test_a_client_that_waits_for_the_whole_answer_may_go_too(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            served.url + COMPLETIONS, json={**LONG, "n": 8}, timeout=httpx.Timeout(30, read=0.2)
        )
    served.wait_idle()


def test_slow_and_half_open_clients_are_cut_off(checkpoint: Path) -> None:
    with serving(checkpoint, client_timeout=0.5) as served:
        host, port = served.url.removeprefix("http://").split(":")
        address = (host, int(port))
        silent = socket.create_connection(address, timeout=20)
        half = socket.create_connection(address, timeout=20)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        body = socket.create_connection(address, timeout=20)
        body.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt"'
        )
        assert silent.recv(10) == b""
        assert half.recv(10) == b""
        assert b"408" in body.recv(4000)
        assert served.get("/health").status_code == 200


# ── queues, ids, keys ─────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_says_when_to_come_back(checkpoint: Path) -> None:
    engine = {"max_num_seqs": 2}
    with serving(checkpoint, engine=engine, max_queue=2) as served:
        too_many = served.post(COMPLETIONS, {**LONG, "n": 5})
        assert too_many.status_code == 400
        socks = [open_stream(served, LONG) for _ in range(4)]
        served.wait(lambda: served.server.service.in_flight == 4)
        found = served.post(COMPLETIONS, LONG)
        assert found.status_code == 429
        assert int(found.headers["retry-after"]) >= 1
        assert found.json()["error"]["type"] == "rate_limit_error"
        for sock in socks:
            sock.close()
        served.wait_idle()
        assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_equal_request_ids_do_not_meet(served: Served) -> None:
    """Case 8: a client's id is echoed and logged, never used as a key."""
    headers = {"X-Request-Id": "same"}
    body = {"prompt": "fox", "max_tokens": 8, "seed": 1, "request_id": "same"}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: served.post(COMPLETIONS, body, headers=headers), range(8)))
    assert [f.status_code for f in found] == [200] * 8
    assert {f.headers["x-request-id"] for f in found} == {"same"}
    assert len({f.json()["id"] for f in found}) == 8
    served.wait_idle()
    assert all(v >= 0 for v in served.llm.metrics.values())


def test_keys(checkpoint: Path) -> None:
    with serving(checkpoint, api_keys=("first", "second")) as served:
        assert served.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
            found = served.get("/v1/models", headers=headers)
            assert found.status_code == 401
            assert found.json()["error"]["code"] == "invalid_api_key"
            assert "first" not in found.text
        for headers in (
            {"Authorization": "Bearer first"},
            {"authorization": "bearer second"},
            {"x-api-key": "second"},
        ):
            assert served.get("/v1/models", headers=headers).status_code == 200


def test_pages_of_other_origins_need_permission(checkpoint: Path, served: Served) -> None:
    origin = {"Origin": "http://page.example"}
    assert "access-control-allow-origin" not in served.get("/v1/models", headers=origin).headers
    with serving(checkpoint, allowed_origins=("http://page.example",)) as open_:
        found = open_.get("/v1/models", headers=origin)
        assert found.headers["access-control-allow-origin"] == "http://page.example"


def test_a_prompt_that_can_never_fit(checkpoint: Path) -> None:
    """Case 49: an error for each, not a queue that never moves."""
    with serving(checkpoint, engine={"num_gpu_blocks_override": 8}) as served:
        for _ in range(5):
            found = served.post(COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 4})
            assert found.status_code == 400
            assert found.json()["error"]["code"] == "kv_capacity_exceeded"
        served.wait_idle()
        assert served.post(COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 4}).status_code == 200


def test_reset_while_a_stream_runs(served: Served) -> None:
    """Case 51."""
    sock = open_stream(served, LONG)
    sock.recv(100)
    found = served.post("/reset_prefix_cache", {})
    assert found.status_code == 200
    assert isinstance(found.json()["reset"], bool)
    sock.close()
    served.wait_idle()


# ── the engine in trouble ─────────────────────────────────────────────────────────────────────────


def test_a_fault_in_a_method_is_one_requests_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SnapKV.evict

    def evict(self: SnapKV, plan: Any) -> Any:
        if any(c.request.sampling.seed == 13 for c in plan.chunks):
            raise KeyError("boom")
        return original(self, plan)

    monkeypatch.setattr(SnapKV, "evict", evict)
    body = {"prompt": "fox", "max_tokens": 6, "sparse": {"method": "snapkv", "budget": 32}}
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda i: served.post(COMPLETIONS, {**body, "seed": 10 + i}), range(8))
        )
    assert [f.status_code for f in found] == [200, 200, 200, 500, 200, 200, 200, 200]
    assert found[3].json()["error"]["type"] == "server_error"
    assert "Traceback" not in found[3].text
    assert served.post(COMPLETIONS, {**body, "seed": 13, "stream": True}).status_code == 500
    chat = {**body, "seed": 13, "stream": True, "messages": [{"role": "user", "content": "fox"}]}
    del chat["prompt"]
    streamed = served.post("/v1/chat/completions", chat)
    assert streamed.status_code == 200  # the role was sent before the engine failed
    assert '"server_error"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    served.wait_idle()


def test_health_fails_while_the_loop_stands_still(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Scheduler.schedule
    block: list[float] = []

    def schedule(self: Scheduler) -> Any:
        while block and time.monotonic() < block[0]:
            time.sleep(0.02)
        return original(self)

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    with serving(checkpoint, health_timeout=1.0) as served:
        assert served.get("/health").status_code == 200
        block.append(time.monotonic() + 60)
        sock = open_stream(served, LONG)
        served.wait(lambda: served.get("/health").status_code == 503)
        found = served.get("/ping")
        assert "no progress" in found.json()["error"]["message"]
        assert found.headers["retry-after"]
        age = [
            line
            for line in served.get("/metrics").text.splitlines()
            if line.startswith("sparseengine:engine_step_age_seconds")
        ]
        assert float(age[0].split()[-1]) > 1
        block.clear()
        served.wait(lambda: served.get("/health").status_code == 200)
        sock.close()
        served.wait_idle()


# ── metrics and logs ──────────────────────────────────────────────────────────────────────────────


def test_metrics_count_what_happened(checkpoint: Path) -> None:
    with serving(checkpoint, engine={"enable_methods": ["full", "snapkv"]}) as served:
        body = {"prompt": [5] * 100, "max_tokens": 6, "ignore_eos": True}
        served.post(COMPLETIONS, {**body, "sparse": {"method": "snapkv", "budget": 32}})
        served.wait_idle()
        values = {}
        for line in served.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name.split("{")[0], "stop" in name or "length" in name] = float(value)
        by_name = {k: v for (k, _), v in values.items()}
        assert by_name["sparseengine:prompt_tokens_total"] == 100
        assert by_name["sparseengine:generation_tokens_total"] == 6
        assert by_name["sparseengine:time_to_first_token_seconds_count"] == 1
        assert by_name["sparseengine:inter_token_latency_seconds_count"] == 5
        assert by_name["sparseengine:e2e_request_latency_seconds_count"] == 1
        assert by_name["sparseengine:kv_bytes_freed_total"] > 0
        assert by_name["sparseengine:kv_cache_usage_perc"] == 0
        assert by_name["sparseengine:iteration_tokens_sum"] == 105  # the last one is not run
        assert by_name["sparseengine:iteration_tokens_count"] == 6
        assert by_name["sparseengine:route_fallback_total"] == 0


def test_metrics_tell_the_attention_that_evicted_tokens_would_have_had(checkpoint: Path) -> None:
    with serving(checkpoint, engine={"enable_methods": ["full", "snapkv", "tova"]}) as served:
        body = {"prompt": [5, 6, 7, 8] * 25, "max_tokens": 6, "ignore_eos": True}
        asked = {"method": "snapkv", "budget": 40, "dropped_mass": True}
        answer = served.post(COMPLETIONS, {**body, "n": 2, "seed": 1, "sparse": asked}).json()
        served.post(COMPLETIONS, {**body, "sparse": {"method": "tova", "budget": 40}})
        served.post(COMPLETIONS, {**body, "max_tokens": 1, "sparse": asked})  # no decode step
        served.wait_idle()
        found = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in served.get("/metrics").text.splitlines()
            if line.startswith("sparseengine:kv_dropped_mass_")
        }
        labels = f'{{method="snapkv",model_name="{served.model}"}}'
        means = [
            sum(step["mean"] for step in c["sparse"]["dropped_mass"]) / 5 for c in answer["choices"]
        ]
        assert found[f"sparseengine:kv_dropped_mass_count{labels}"] == 2, "completions, not steps"
        assert found[f"sparseengine:kv_dropped_mass_sum{labels}"] == pytest.approx(sum(means))
        assert 0 < sum(means) < 2
        assert not any("tova" in name for name in found), "which did not ask"


def test_what_running_rows_hold_and_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt densely, with a budget of what is kept, and with one of what is read."""
    monkeypatch.setattr(host, "BEAT_S", 0.02)
    monkeypatch.setattr(host, "_USAGE_S", 0.02)
    names = ["kv_tokens_logical", "kv_tokens_resident", "kv_bytes_read_per_step"]
    seen: dict[str, dict[str, float]] = {}
    knobs = {"dense_layers": 0}
    engine = {"sparse_method": "quest", "sparse_config": knobs}
    engine["enable_methods"] = ["quest", "full", "snapkv"]
    body = {"prompt": [5] * 200, "max_tokens": 50, "ignore_eos": True}
    with serving(checkpoint, engine=engine) as served:
        for method in ("full", "snapkv", "quest"):
            found = seen[method] = {}
            sparse = {"method": method, **({"budget": 64} if method != "full" else {})}
            sparse |= knobs if method == "quest" else {}

            def noted(found: dict[str, float] = found) -> bool:
                values = served.llm.metrics
                found.update({n: values.get(n, 0.0) for n in names})
                return found["kv_bytes_read_per_step"] > 0

            body["sparse"] = sparse
            stop = threading.Event()
            ask = threading.Thread(target=keep_asking, args=(served, body, stop))
            ask.start()
            try:
                served.wait(noted)
            finally:
                stop.set()
                ask.join(60)
            served.wait_idle()
            served.wait(lambda: served.llm.metrics["kv_tokens_logical"] == 0)
    dense, kept, read = (seen[m] for m in ("full", "snapkv", "quest"))
    assert dense["kv_tokens_logical"] >= 200
    assert dense["kv_tokens_resident"] >= dense["kv_tokens_logical"] * 0.9
    assert kept["kv_tokens_resident"] < 0.75 * kept["kv_tokens_logical"]
    assert read["kv_tokens_resident"] >= read["kv_tokens_logical"] * 0.9
    for sparse in (kept, read):
        assert sparse["kv_bytes_read_per_step"] < 0.75 * dense["kv_bytes_read_per_step"]


def keep_asking(served: Served, body: dict[str, Any], stop: threading.Event) -> None:
    while not stop.is_set():
        assert served.post(COMPLETIONS, body).status_code == 200


def test_one_access_line_per_request(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sparseengine")
    with serving(checkpoint, access_log=True, log_requests=True) as served:
        body = {"prompt": "a secret", "max_tokens": 3, "ignore_eos": True}
        served.post(COMPLETIONS, body, headers={"X-Request-Id": "mine"})
        served.post(COMPLETIONS, {"prompt": ""})
        served.get("/health")
    lines = [json.loads(r.message) for r in caplog.records if r.name == "sparseengine.access"]
    assert [line["status"] for line in lines] == [200, 400]
    first = lines[0]
    assert first["client_id"] == "mine"
    assert first["output_tokens"] == 3
    assert first["end"] == "length"
    assert first["method"] == "full"
    assert first["resident_bytes"] > 0
    assert first["ttft"] > 0
    assert "secret" not in caplog.text
    asked = [r.message for r in caplog.records if r.name == "sparseengine.requests"]
    assert '"max_tokens": 3' in asked[0]


def test_server_info_holds_no_key(checkpoint: Path) -> None:
    with serving(checkpoint, api_keys=("hush",)) as served:
        found = served.get("/server_info", headers={"Authorization": "Bearer hush"})
        assert found.json()["default_method"] == "full"
        assert found.json()["memory"]["total_pages"] > 0
        assert "hush" not in found.text


# ── a process of its own ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def process(checkpoint: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`sparseengine serve` as a user runs it, and its address."""
    command = [sys.executable, "-m", "sparseengine.cli.main", "serve", str(checkpoint)]
    command += ["--port", "0", "--max-model-len", "256", "--served-model-name", "tiny"]
    command += ["--attention-backend", "reference", "--drain-timeout", "20"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    url, seen = "", []
    assert running.stderr is not None
    for line in running.stderr:
        seen.append(line)
        if line.startswith("serving"):
            url = line.split()[1]
            break
    assert url, "".join(seen)
    text = "".join(seen)
    for word in ("memory", "method     full", "/v1/chat/completions", "that fit at once", "tiny"):
        assert word in text
    yield running, url
    running.kill()
    running.wait(20)
    running.stderr.close()


def read_lines(url: str, body: dict[str, Any]) -> Iterator[str]:
    with httpx.stream("POST", url + COMPLETIONS, json={**body, "stream": True}, timeout=60) as r:
        assert r.status_code == 200
        yield from filter(None, r.iter_lines())


def await_drain(url: str) -> None:
    """The signal has been seen: /health says so."""
    end = time.monotonic() + 20
    while httpx.get(url + "/health", timeout=30).status_code != 503:
        assert time.monotonic() < end, "the signal was not heard"
        time.sleep(0.02)


def test_sigterm_lets_streams_end(process: tuple[subprocess.Popen[str], str]) -> None:
    running, url = process
    lines = read_lines(url, {**LONG, "max_tokens": 60})
    first = next(lines)
    running.send_signal(signal.SIGTERM)
    await_drain(url)
    refused = httpx.post(url + COMPLETIONS, json=LONG, timeout=30)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert httpx.get(url + "/health", timeout=30).status_code == 503
    rest = [first, *lines]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert running.wait(30) == 0


def test_a_second_signal_stops_at_once(process: tuple[subprocess.Popen[str], str]) -> None:
    running, url = process
    lines = read_lines(url, LONG)
    next(lines)
    running.send_signal(signal.SIGTERM)
    await_drain(url)
    start = time.monotonic()
    running.send_signal(signal.SIGTERM)
    running.wait(20)
    assert time.monotonic() - start < 15


def test_an_engine_that_dies_ends_the_server(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    running, url = process
    found = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    commands = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in found}
    (engine,) = [int(p) for p, text in commands.items() if b"spawn_main" in text]
    lines = read_lines(url, LONG)
    next(lines)
    os.kill(engine, signal.SIGKILL)
    text = "\n".join(lines)
    assert "the engine does not run" in text
    assert running.wait(30) == 1
