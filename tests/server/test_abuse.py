"""A minute of scripts/abuse_server.py: 64 clients, a process of its own, all of them rude."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "abuse_server.py"


def test_rude_clients_leave_nothing_behind() -> None:
    spec = importlib.util.spec_from_file_location("abuse_server", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules["abuse_server"] = script
    spec.loader.exec_module(script)
    server, base = script.start_server([])
    try:
        pids = [server.pid, *script.children(server.pid)]
        assert len(pids) >= 2  # the engine has a process of its own
        found = asyncio.run(script.abuse(base, clients=64, seconds=60, pids=pids, max_tokens=12))
    finally:
        server.terminate()
        server.wait(60)
    assert found["num_problems"] == 0, found["problems"]
    assert sum(found["requests"].values()) > 300
    assert found["itl_ms_p99"] < 5000, found  # 64 clients on two cores that run other tests, too
    assert not script.has_grown(found), found
    assert script.has_grown({"memory_mb_before": 1, "memory_mb_after": 97})
