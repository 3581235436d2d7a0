"""A minute of scripts/abuse_server.py: 64 clients, a process of its own, all of them rude."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "abuse_server.py"


def loaded() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("abuse_server", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["abuse_server"] = script
    spec.loader.exec_module(script)
    return script


def test_rude_clients_leave_nothing_behind() -> None:
    script = loaded()
    server, base = script.start_server([])
    try:
        pids = [server.pid, *script.children(server.pid)]
        assert len(pids) >= 2  # the engine has a process of its own
        found = asyncio.run(script.abuse(base, clients=64, seconds=60, pids=pids, max_tokens=12))
    finally:
        server.terminate()
        server.wait(60)
    assert script.verdict(found) == [], found
    assert sum(found["requests"].values()) > 300


GOOD = {"num_problems": 0, "itl_ms_p99": 80.0, "memory_mb_before": 1, "memory_mb_after": 96}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"num_problems": 2}, "2 requests went wrong"),
        ({"memory_mb_after": 97}, "memory grew by 96 MiB"),
        ({"itl_ms_p99": 5000.1}, "--max-p99-ms allows 5000"),
        ({"itl_ms_p99": None}, "nothing was measured"),
    ],
)
def test_what_a_run_fails_for(
    change: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = loaded()

    async def abuse(base: str, **options: Any) -> dict[str, Any]:
        return {**GOOD, **change}

    monkeypatch.setattr(script, "abuse", abuse)
    monkeypatch.setattr(sys, "argv", ["abuse_server.py", "--base-url", "http://127.0.0.1:1"])
    assert script.main() == (0 if reason is None else 1)
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert len(failures) == (0 if reason is None else 1)
    assert reason is None or reason in failures[0]
    if not change:
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--max-p99-ms", "79.9"])
        assert script.main() == 1
        assert "itl_ms_p99 is 80, --max-p99-ms allows 79.9" in capsys.readouterr().out
