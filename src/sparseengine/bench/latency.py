"""`bench latency` and `bench replay`: requests that arrive over time, and how long each waits.

Arrivals are either drawn at a rate (Poisson) or read from a trace. A request is submitted at the
first step after its arrival, and its times count from the arrival, whatever the engine was doing:

    TTFT   arrival to first token        ITL   between one token and the next of a request
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseengine.bench.batch import make_prompts, now, run_batch
from sparseengine.bench.options import budget_text, engines_of
from sparseengine.bench.results import Outcome, Results, add_result_arguments
from sparseengine.config import EngineConfig
from sparseengine.console import add_engine_arguments, note, positive
from sparseengine.errors import ConfigError

if TYPE_CHECKING:
    from sparseengine.llm import LLM

_PERCENTILES = (50, 90, 99)
FOOTNOTE = (
    "times in ms: median, 90th and 99th percentile; TTFT counts from the arrival; "
    "one warm-up per engine dropped"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace: seconds after its start, prompt and tokens to generate."""

    at_s: float
    prompt: tuple[int, ...]
    output_len: int


@dataclass(slots=True, kw_only=True)
class Served:
    """When a request arrived and when each of its tokens came, in seconds of the run."""

    arrival_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


class Latency:
    """Random prompts at given rates."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--request-rate",
            default="inf",
            metavar="R,R",
            help="arrivals per second; inf sends all at once [default: inf]",
        )
        parser.add_argument(
            "--num-requests", type=positive, default=16, metavar="N", help="[default: 16]"
        )
        parser.add_argument(
            "--input-len", type=positive, default=1024, metavar="N", help="[default: 1024]"
        )
        parser.add_argument(
            "--output-len", type=positive, default=128, metavar="N", help="[default: 128]"
        )
        _add_common(parser)

    def run(self, args: argparse.Namespace) -> int:
        rates = _rates(args.request_rate)
        longest = args.input_len + args.output_len

        def traces(vocab: int) -> dict[str, list[Arrival]]:
            prompts = make_prompts(vocab, args.input_len, args.num_requests, seed=0)
            return {f"{r:g}/s": poisson(prompts, args.output_len, r) for r in rates}

        return _measure(args, "latency", traces, longest)


class Replay:
    """A trace from a JSONL file."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--trace",
            required=True,
            metavar="FILE",
            help='JSONL: {"at_s": 0.5, "prompt_len": 900, "output_len": 40} a line, or "prompt" '
            "with token ids",
        )
        _add_common(parser)

    def run(self, args: argparse.Namespace) -> int:
        lines = read_trace(args.trace)
        longest = max(len(r["prompt"]) + r["output_len"] for r in lines)

        def traces(vocab: int) -> dict[str, list[Arrival]]:
            return {"trace": [_arrival(i, line, vocab) for i, line in enumerate(lines)]}

        return _measure(args, "replay", traces, longest)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods", metavar="A,B", help="several methods, as --sparse-method a,b (dense is added)"
    )
    parser.add_argument(
        "--hyper-params", metavar="JSON", help='knobs per method: {"method": {"knob": 1}}'
    )
    add_result_arguments(parser, plot="time to the first token against tokens per second")
    add_engine_arguments(parser)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (math.nan,)
    if not all(rate > 0 for rate in rates):
        raise ConfigError(f"--request-rate {text!r} is not allowed; give numbers above 0, or inf")
    return rates


def poisson(prompts: Sequence[Sequence[int]], output_len: int, rate: float) -> list[Arrival]:
    """Arrivals with exponential gaps of mean 1 / rate seconds, seeded; the first one at 0."""
    rng, at, arrivals = random.Random(f"arrivals/{rate}"), 0.0, []
    for prompt in prompts:
        arrivals.append(Arrival(at_s=at, prompt=tuple(prompt), output_len=output_len))
        at += rng.expovariate(rate) if math.isfinite(rate) else 0.0
    return arrivals


def read_trace(path: str) -> list[dict[str, Any]]:
    """The lines of a trace, checked; "prompt" holds ids, or Nones where only a length is given."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = list(row["prompt"]) if "prompt" in row else [None] * int(row["prompt_len"])
            entry = {
                "at_s": float(row.get("at_s", 0.0)),
                "prompt": prompt,
                "output_len": int(row["output_len"]),
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--trace {path}, line {number}: {error!r}; wanted at_s, output_len and prompt "
                "(token ids) or prompt_len"
            ) from None
        if not (entry["at_s"] >= 0 and prompt and entry["output_len"] >= 1):
            raise ConfigError(
                f"--trace {path}, line {number}: at_s must not be negative, prompt and output must "
                "have tokens"
            )
        found.append(entry)
    if not found:
        raise ConfigError(f"--trace {path} holds no request")
    return sorted(found, key=lambda entry: entry["at_s"])


def _arrival(index: int, line: dict[str, Any], vocab: int) -> Arrival:
    prompt = line["prompt"]
    if None in prompt:
        (prompt,) = make_prompts(vocab, len(prompt), 1, seed=index)
    return Arrival(at_s=line["at_s"], prompt=tuple(prompt), output_len=line["output_len"])


def serve(llm: LLM, arrivals: Sequence[Arrival]) -> list[Served]:
    """Run a trace in real time: submit what has arrived, step, note when tokens came."""
    from sparseengine.core.params import SamplingParams

    engine, served = llm.engine, {}
    waiting = list(arrivals)
    start = now()
    while waiting or engine.has_work:
        clock = now() - start
        while waiting and waiting[0].at_s <= clock:
            arrival = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0.0, max_tokens=arrival.output_len, ignore_eos=True, detokenize=False
            )
            key = engine.add_request(arrival.prompt, sampling, stream=True)
            served[key] = Served(arrival_s=arrival.at_s)
        if not engine.has_work:
            time.sleep(min(waiting[0].at_s - clock, 0.05))
            continue
        outputs = engine.step()
        clock = now() - start
        for output in outputs:
            mine = served[output.request_id].tokens_s
            mine += [clock] * (len(output.outputs[0].token_ids) - len(mine))
    return list(served.values())


def summary(method: str, load: str, served: Sequence[Served]) -> dict[str, Any]:
    """Percentiles of one run."""
    tokens = sum(len(s.tokens_s) for s in served)
    end = max(s.tokens_s[-1] for s in served)
    gaps = [gap for s in served for gap in s.gaps_s]
    return {
        "method": method,
        "load": load,
        "requests": len(served),
        "output_tok_s": tokens / end,
        "ttft_ms": percentiles([s.ttft_s for s in served]),
        "itl_ms": percentiles(gaps) if gaps else None,
        "e2e_ms": percentiles([s.tokens_s[-1] - s.arrival_s for s in served]),
    }


def percentiles(seconds: Sequence[float]) -> list[float]:
    """The 50th, 90th and 99th percentile in milliseconds."""
    if len(seconds) == 1:
        return [seconds[0] * 1e3] * len(_PERCENTILES)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return [cuts[p - 1] * 1e3 for p in _PERCENTILES]


def _measure(args: argparse.Namespace, name: str, traces: Any, longest: int) -> int:
    from sparseengine.llm import LLM

    results = Results(args)
    settings: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    engines: list[tuple[str, EngineConfig]] = list(engines_of(args, longest))
    for label, config in engines:
        with LLM.from_config(config, quiet=True) as llm:
            vocab, settings[label] = llm.resolved.spec.vocab_size, llm.explain()
            note(f"{label}: warm-up")
            run_batch(llm, make_prompts(vocab, 16, 1, seed=99), 4)
            for load, arrivals in traces(vocab).items():
                note(f"{label}: {load}")
                served = serve(llm, arrivals)
                row = summary(label, load, served)
                row["model"] = llm.resolved.source.name
                row["budget"] = budget_text(config)
                rows.append(row)
                raw += [
                    {
                        "method": label,
                        "load": load,
                        "arrival_s": s.arrival_s,
                        "tokens_s": s.tokens_s,
                    }
                    for s in served
                ]
    outcome = Outcome(
        bench=name,
        rows=rows,
        raw=raw,
        details={"engines": settings},
        plots={"": waits_plot(name, rows)},
    )
    results.publish(outcome, [_shown(row, rows) for row in rows], FOOTNOTE)
    return 0


def waits_plot(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Median time to the first token at the rate of output tokens that each load came to."""
    from sparseengine.plots import Axis, line_plot

    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row["method"], []).append((row["output_tok_s"], row["ttft_ms"][0]))
    x, y = Axis(label="output, tokens/s"), Axis(label="time to first token, ms", base=10)
    return line_plot(f"{rows[0]['model']}: {name}", x, y, series)


def _shown(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    dense = next(r for r in rows if r["load"] == row["load"])

    def cell(values: list[float] | None) -> str:
        return "-" if values is None else " / ".join(f"{v:,.1f}" for v in values)

    return {
        "method": row["method"],
        "load": row["load"],
        "requests": row["requests"],
        "output tok/s": row["output_tok_s"],
        "TTFT": cell(row["ttft_ms"]),
        "ITL": cell(row["itl_ms"]),
        "end to end": cell(row["e2e_ms"]),
        "tok/s vs dense": row["output_tok_s"] / dense["output_tok_s"],
    }


COMMAND = Latency()
REPLAY = Replay()
