"""Many clients at once that stream, go away, and send nonsense; then: is the server as before?

`python scripts/abuse_server.py --seconds 600` serves a tiny random model in a process of its own,
unless `--base-url` names a server. It fails when a well-formed request is not answered, when pages
are not given back, when the server's memory grows, or when streams stall (`--max-p99-ms`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

MOST_GROWTH_MB = 96
MOST_P99_MS = 5000.0  # 64 clients on two cores that do other work, too: a stall, not slowness
MODEL = ["--load-format", "dummy", "--hf-config", "smollm2-135m"]
SHAPE = {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 64, "vocab_size": 512}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
BAD: list[bytes] = [
    b"{",
    b"[]",
    b'{"prompt": [99999999]}',
    b'{"prompt": [5], "temperature": NaN}',
    b'{"prompt": [5], "n": 100000}',
    b'{"prompt": [5], "sparse": {"method": "nonsense"}}',
    b'{"prompt": [5], "structured_outputs": {"regex": "("}}',
    b'{"prompt": ' + str([5] * 5000).encode() + b"}",
]


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def client(base: str, seed: int, end: float, tally: Tally, max_tokens: int) -> None:
    """One user: a third streams to the end, a third leaves, a third is wrong."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=base, timeout=120) as http:
        while time.monotonic() < end:
            kind = rng.choice(("stream", "stream", "leave", "whole", "bad", "bad"))
            try:
                if kind == "bad":
                    await send_bad(http, rng, tally)
                elif kind == "whole":
                    await send_whole(http, rng, tally, max_tokens)
                else:
                    await stream(http, rng, tally, max_tokens, leaves=kind == "leave")
            except httpx.HTTPError as error:
                tally.problems.append(f"{kind}: {error!r}")
            tally.counts[kind] += 1


def body(rng: random.Random, max_tokens: int) -> dict[str, object]:
    return {
        "prompt": [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))],
        "max_tokens": rng.randrange(1, max_tokens),
        "n": rng.choice((1, 1, 1, 2)),
        "seed": rng.randrange(1 << 30),
        "ignore_eos": True,
    }


async def send_bad(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    headers = {"content-type": "application/json"}
    found = await http.post("/v1/completions", content=rng.choice(BAD), headers=headers)
    if not 400 <= found.status_code < 500:
        tally.problems.append(f"nonsense was answered with {found.status_code}")


async def send_whole(
    http: httpx.AsyncClient, rng: random.Random, tally: Tally, max_tokens: int
) -> None:
    given = body(rng, max_tokens)
    found = await http.post("/v1/completions", json=given)
    if found.status_code == 429:
        tally.counts["told to wait"] += 1
        await asyncio.sleep(0.2)
    elif found.status_code != 200:
        tally.problems.append(f"{found.status_code}: {found.text[:200]}")


async def stream(
    http: httpx.AsyncClient, rng: random.Random, tally: Tally, max_tokens: int, *, leaves: bool
) -> None:
    given = {**body(rng, max_tokens), "stream": True}
    patience = rng.randrange(0, 12) if leaves else 1 << 30
    last, count, done = None, 0, False
    async with http.stream("POST", "/v1/completions", json=given) as response:
        if response.status_code == 429:
            tally.counts["told to wait"] += 1
            await asyncio.sleep(0.2)
            return
        async for line in response.aiter_lines():
            if not line:
                continue
            if '"error"' in line:
                tally.problems.append(line[:200])
            done = done or line == "data: [DONE]"
            now = time.monotonic()
            if last is not None:
                tally.gaps.append(now - last)
            last, count = now, count + 1
            if count > patience:
                return
    if not done:
        tally.problems.append("a stream ended without [DONE]")


async def idle_metrics(base: str, seconds: float = 60) -> dict[str, float]:
    """The server's gauges once nothing runs any more."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=base, timeout=60) as http:
        while True:
            text = (await http.get("/metrics")).text
            pairs = re.findall(r"^sparseengine:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
            found = {name: float(value) for name, value in pairs}
            busy = found["num_requests_running"] + found["num_requests_waiting"]
            if busy == 0 and found["kv_cache_usage_perc"] == 0:
                return found
            if time.monotonic() > end:
                raise SystemExit(f"pages or requests are left over: {found}")
            await asyncio.sleep(0.3)


def resident(pids: list[int]) -> int:
    """Bytes of memory that processes hold."""
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            total += int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) << 10  # type: ignore[index]
    return total


async def abuse(
    base: str, *, clients: int, seconds: float, pids: list[int], max_tokens: int = 40
) -> dict[str, Any]:
    """Run it; a summary. `pids`: whose memory to watch."""
    tally = Tally()
    await idle_metrics(base)
    await run_clients(base, clients, seconds / 3, tally, max_tokens)  # warm-up: caches fill
    await idle_metrics(base)
    before = resident(pids)
    await run_clients(base, clients, seconds * 2 / 3, tally, max_tokens)
    await idle_metrics(base)
    gaps = sorted(tally.gaps)
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": dict(tally.counts),
        "problems": tally.problems[:20],
        "num_problems": len(tally.problems),
        "itl_ms_p50": round(statistics.median(gaps) * 1e3, 1) if gaps else None,
        "itl_ms_p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1) if gaps else None,
        "memory_mb_before": before >> 20,
        "memory_mb_after": resident(pids) >> 20,
    }


async def run_clients(
    base: str, clients: int, seconds: float, tally: Tally, max_tokens: int
) -> None:
    end = time.monotonic() + seconds
    seeds = [random.randrange(1 << 30) for _ in range(clients)]
    await asyncio.gather(*(client(base, s, end, tally, max_tokens) for s in seeds))


def children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(p) for p in file.read_text().split()] if file.exists() else []


def start_server(extra: list[str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "sparseengine.cli.main", "serve", *MODEL, "--port", "0"]
    command += ["--hf-overrides", json.dumps(SHAPE), "--max-model-len", "512", "--max-queue", "40"]
    command += ["--max-num-seqs", "32", "--no-access-log", *extra]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if line.startswith("serving"):
            return server, line.split()[1]
    raise SystemExit("the server does not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", help="a running server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--max-p99-ms",
        type=float,
        default=MOST_P99_MS,
        help="fail when more than one in a hundred waits between two events of a stream are longer "
        "(default: %(default)g)",
    )
    args = parser.parse_args()
    server, base = (None, args.base_url) if args.base_url else start_server([])
    try:
        pids = [] if server is None else [server.pid, *children(server.pid)]
        found = asyncio.run(abuse(base, clients=args.clients, seconds=args.seconds, pids=pids))
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    wrong = verdict(found, args.max_p99_ms)
    print(json.dumps({**found, "max_p99_ms": args.max_p99_ms, "failures": wrong}, indent=2))
    return 1 if wrong else 0


def verdict(found: dict[str, Any], max_p99_ms: float = MOST_P99_MS) -> list[str]:
    """Why a run has failed; empty when it has not. A warm server's memory is not quite still."""
    wrong = []
    if found["num_problems"]:
        wrong.append(f"{found['num_problems']} requests went wrong, see problems")
    grown = found["memory_mb_after"] - found["memory_mb_before"]
    if grown >= MOST_GROWTH_MB:
        wrong.append(f"memory grew by {grown} MiB, {MOST_GROWTH_MB} are allowed")
    p99 = found["itl_ms_p99"]
    if p99 is None:
        wrong.append("no stream had two events: nothing was measured")
    elif p99 > max_p99_ms:
        wrong.append(f"itl_ms_p99 is {p99:g}, --max-p99-ms allows {max_p99_ms:g}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
