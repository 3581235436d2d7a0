"""`bench serve`: the waiting times of a running server's clients, in vLLM's terms.

Speaks OpenAI's completions endpoint, so it measures any server that has one:

    TTFT   request sent to first token      ITL   between two tokens
    TPOT   (last token - first token) / (tokens - 1), per request
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

from sparseengine.bench.latency import percentiles
from sparseengine.console import note, positive, table
from sparseengine.errors import ConfigError, SparseEngineError


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request; times in seconds of the run."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int = 0
    tokens_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    error: str | None = None


class BenchServe:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--base-url",
            default="http://127.0.0.1:8000",
            metavar="URL",
            help="[default: %(default)s]",
        )
        add("--endpoint", default="/v1/completions", metavar="PATH", help="[default: %(default)s]")
        add("--model", metavar="NAME", help="name to ask for [default: the server's first]")
        add("--api-key", metavar="KEY", help="sent as a bearer token")
        add("--num-prompts", type=positive, default=64, metavar="N", help="[default: 64]")
        add(
            "--request-rate",
            type=float,
            default=math.inf,
            metavar="R",
            help="arrivals per second; inf sends all at once [default: inf]",
        )
        add("--max-concurrency", type=positive, metavar="N", help="most requests at a time")
        add(
            "--random-input-len",
            "--input-len",
            dest="input_len",
            type=positive,
            default=256,
            metavar="N",
            help="[default: 256]",
        )
        add(
            "--random-output-len",
            "--output-len",
            dest="output_len",
            type=positive,
            default=64,
            metavar="N",
            help="[default: 64]",
        )
        add(
            "--vocab-size",
            type=positive,
            default=500,
            metavar="N",
            help="prompts are random token ids below this [default: 500]",
        )
        add("--sparse", metavar="JSON", help='e.g. {"method": "...", "budget": 256}')
        add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")

    def run(self, args: argparse.Namespace) -> int:
        if not args.request_rate > 0:
            raise ConfigError(f"--request-rate {args.request_rate} is not allowed; give R > 0")
        extra = {} if args.sparse is None else {"sparse": _object(args.sparse)}
        samples = asyncio.run(measure(args, extra))
        row = summary(samples)
        shown = {k: _cell(v) for k, v in row.items()}
        print(table([shown]))
        print("\ntimes in ms: median, 90th and 99th percentile")
        print(json.dumps({"bench": "serve", **row}, allow_nan=False), flush=True)
        for sample in [s for s in samples if s.error is not None][:5]:
            note(f"error: {sample.error}")
        return 1 if row["failed"] else 0


def _object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ConfigError(f"--sparse {text!r} is not a JSON object") from None


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " / ".join(f"{v:,.1f}" for v in value)
    return value


async def measure(args: argparse.Namespace, extra: dict[str, Any]) -> list[Sample]:
    """Send the load; one sample per request, failed ones included."""
    import httpx

    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None)
    gate = asyncio.Semaphore(args.max_concurrency or args.num_prompts)
    async with httpx.AsyncClient(
        base_url=args.base_url, headers=headers, timeout=600, limits=limits
    ) as http:
        try:
            model = args.model or (await http.get("/v1/models")).json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise SparseEngineError(f"{args.base_url} does not answer: {error!r}") from None
        start, tasks = time.perf_counter(), []
        for _ in range(args.num_prompts):
            prompt = [rng.randrange(3, args.vocab_size) for _ in range(args.input_len)]
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": args.output_len,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **extra,
            }
            tasks.append(asyncio.create_task(_one(http, args.endpoint, body, start, gate)))
            if math.isfinite(args.request_rate):
                await asyncio.sleep(rng.expovariate(args.request_rate))
        return await asyncio.gather(*tasks)


async def _one(
    http: Any, endpoint: str, body: dict[str, Any], start: float, gate: asyncio.Semaphore
) -> Sample:
    import httpx

    async with gate:
        sample = Sample(sent_s=time.perf_counter() - start, prompt_tokens=len(body["prompt"]))
        try:
            async with http.stream("POST", endpoint, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    sample.error = f"{response.status_code}: {text[:300]}"
                    return sample
                async for line in response.aiter_lines():
                    _read(sample, line, time.perf_counter() - start)
        except httpx.HTTPError as error:
            sample.error = repr(error)
        sample.end_s = time.perf_counter() - start
        if sample.error is None and not sample.tokens_s:
            sample.error = "the stream held no token"
        return sample


def _read(sample: Sample, line: str, at: float) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        sample.error = str(event["error"])
        return
    if event.get("usage"):
        sample.output_tokens = event["usage"]["completion_tokens"]
    if any(c.get("text") for c in event["choices"]):
        sample.tokens_s.append(at)


def summary(samples: list[Sample]) -> dict[str, Any]:
    """One row of figures over the requests that were answered."""
    good = [s for s in samples if s.error is None]
    if not good:
        raise SparseEngineError(f"every request failed; the first one: {samples[0].error}")
    seconds = max(s.end_s for s in good)
    tokens = sum(s.output_tokens for s in good)
    gaps = [b - a for s in good for a, b in zip(s.tokens_s, s.tokens_s[1:], strict=False)]
    each = [
        (s.tokens_s[-1] - s.tokens_s[0]) / (s.output_tokens - 1)
        for s in good
        if s.output_tokens > 1
    ]
    return {
        "completed": len(good),
        "failed": len(samples) - len(good),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tok_s": round(tokens / seconds, 2),
        "input_tok_s": round(sum(s.prompt_tokens for s in good) / seconds, 2),
        "ttft_ms": percentiles([s.tokens_s[0] - s.sent_s for s in good]),
        "tpot_ms": percentiles(each) if each else None,
        "itl_ms": percentiles(gaps) if gaps else None,
        "e2e_ms": percentiles([s.end_s - s.sent_s for s in good]),
    }


COMMAND = BenchServe()
