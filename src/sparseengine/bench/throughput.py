"""`sparseengine bench throughput`: prefill and decode of whole batches, one method after another.

Every run includes our own dense attention. A decode figure is the median over the steps in which
all requests of the batch decode and none prefills; prefill is timed apart, to the last first token.
One short warm-up per engine is run and thrown away.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparseengine.bench.options import Plan, add_bench_arguments, plan_of
from sparseengine.config import EngineConfig
from sparseengine.console import note, table

if TYPE_CHECKING:
    from sparseengine.llm import LLM


FOOTNOTE = (
    "decode: median of the steps in which the whole batch decodes, 10th to 90th percentile in "
    "brackets; prefill: to the last first token, median of the runs; one warm-up per engine dropped"
)


@dataclass(slots=True, kw_only=True)
class Timing:
    """Seconds of one batch: until the last first token, and of each full decode step."""

    prefill_s: float
    steps_s: list[float] = field(default_factory=list)
    resident_bytes: int = 0


class Throughput:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_bench_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        plan = plan_of(args)
        from sparseengine.report import machine, make_folder, write_artefacts

        folder = None if args.output is None else make_folder(args.output)
        rows: list[dict[str, Any]] = []
        raw: list[dict[str, Any]] = []
        for label, config in plan.engines:
            rows += measure_engine(label, config, plan, raw)
        if plan.compare_transformers:
            rows += measure_transformers(plan, raw)
        add_ratios(rows)
        info = {**machine(), "settings": plan.settings()}
        if folder is not None:
            write_artefacts(folder, info, raw, rows)
        print(table([shown(row) for row in rows]))
        print(f"\n{FOOTNOTE}; runs of each batch: {plan.repeats}")
        print(json.dumps({"bench": "throughput", **info, "rows": rows}), flush=True)
        return 0


def measure_engine(
    label: str, config: EngineConfig, plan: Plan, raw: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One engine, all its shapes."""
    from sparseengine.llm import LLM

    rows = []
    with LLM.from_config(config, quiet=True) as llm:
        vocab = llm.resolved.spec.vocab_size
        note(f"{label}: warm-up")
        run_batch(llm, make_prompts(vocab, min(plan.lengths), 1, seed=99), 4)
        for input_len, batch in plan.shapes(llm):
            note(f"{label}: {input_len} x {batch}")
            timings = []
            for repeat in range(plan.repeats):
                prompts = make_prompts(vocab, input_len, batch, seed=repeat)
                timing = run_batch(llm, prompts, plan.output_len)
                timings.append(timing)
                raw += samples(label, input_len, batch, repeat, timing)
            row = summary(label, input_len, batch, timings)
            row["budget"] = plan.budget_text(config)
            row["route"] = ",".join(dict.fromkeys(r.selected for r in llm.resolved.routes))
            rows.append(row)
    return rows


def make_prompts(vocab: int, length: int, batch: int, seed: int) -> list[list[int]]:
    """Random token ids, seeded, the same for every method; the lowest (specials) are left out."""
    rng = random.Random(f"{seed}/{length}/{batch}")
    low = min(1000, vocab // 4)
    return [[rng.randrange(low, vocab) for _ in range(length)] for _ in range(batch)]


def run_batch(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int) -> Timing:
    """Run one batch to its end, step by step."""
    from sparseengine.core.params import SamplingParams

    engine = llm.engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    ids = [engine.add_request(p, sampling, stream=True) for p in prompts]
    tokens = dict.fromkeys(ids, 0)
    timing = Timing(prefill_s=0.0)
    start = before = now()
    while engine.has_work:
        all_decode = all(0 < n < output_len for n in tokens.values())
        outputs = engine.step()
        after = now()
        for output in outputs:
            tokens[output.request_id] = len(output.outputs[0].token_ids)
        if all_decode:
            timing.steps_s.append(after - before)
        elif not timing.prefill_s and all(tokens.values()):
            timing.prefill_s = after - start
        if all(0 < n < output_len for n in tokens.values()):
            usage = [engine.scheduler.cache.usage(int(i)).bytes for i in ids]
            timing.resident_bytes = sum(usage) // len(usage)
        before = now()
    return timing


def now() -> float:
    """Wall clock, after the device is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_transformers(plan: Plan, raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same shapes through transformers' generate."""
    from sparseengine.bench.peers import load_transformers, time_generate
    from sparseengine.resolve import resolve

    resolved = resolve(plan.engines[0][1])
    model = load_transformers(resolved.source, resolved.dtype, resolved.device)
    vocab = resolved.spec.vocab_size
    note("transformers: warm-up")
    time_generate(model, make_prompts(vocab, min(plan.lengths), 1, seed=99), 4)
    rows = []
    for input_len in plan.lengths:
        for batch in plan.fixed_batches():
            note(f"transformers: {input_len} x {batch}")
            timings = []
            for repeat in range(plan.repeats):
                prompts = make_prompts(vocab, input_len, batch, seed=repeat)
                prefill_s, steps_s = time_generate(model, prompts, plan.output_len)
                timings.append(Timing(prefill_s=prefill_s, steps_s=steps_s))
                raw += samples("transformers", input_len, batch, repeat, timings[-1])
            rows.append(summary("transformers", input_len, batch, timings))
    return rows


def samples(
    label: str, input_len: int, batch: int, repeat: int, timing: Timing
) -> list[dict[str, Any]]:
    """Raw samples, one line each."""
    base = {"method": label, "input_len": input_len, "batch": batch, "repeat": repeat}
    steps = [{**base, "what": "decode_step_s", "value": s} for s in timing.steps_s]
    return [{**base, "what": "prefill_s", "value": timing.prefill_s}, *steps]


def summary(label: str, input_len: int, batch: int, timings: Sequence[Timing]) -> dict[str, Any]:
    """One row of results. Throughputs are aggregates over the batch."""
    from sparseengine.report import Spread

    steps = [s for timing in timings for s in timing.steps_s]
    step = Spread.of(steps) if steps else None
    prefill = Spread.of([timing.prefill_s for timing in timings])
    return {
        "method": label,
        "budget": None,
        "input_len": input_len,
        "batch": batch,
        "prefill_tok_s": input_len * batch / prefill.median,
        "prefill_s": list(prefill),
        "decode_tok_s": batch / step.median if step else None,
        "step_ms": [s * 1e3 for s in step] if step else None,
        "full_steps": len(steps),
        "kv_bytes_per_request": timings[-1].resident_bytes or None,
        "route": None,
    }


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Ratios to our dense run and to transformers at the same shape."""
    for row in rows:
        same = [r for r in rows if (r["input_len"], r["batch"]) == (row["input_len"], row["batch"])]
        ours = same[0]
        theirs = next((r for r in same if r["method"] == "transformers"), None)
        for name, other in (("dense", ours), ("transformers", theirs)):
            if other is None:
                continue
            for what in ("decode", "prefill"):
                mine, base = row[f"{what}_tok_s"], other[f"{what}_tok_s"]
                row[f"{what}_vs_{name}"] = mine / base if mine and base else None


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as people read it."""
    step = row["step_ms"]
    cells = {
        "method": row["method"],
        "budget": row["budget"] or "-",
        "prompt x batch": f"{row['input_len']} x {row['batch']}",
        "prefill tok/s": row["prefill_tok_s"],
        "prefill vs dense": row["prefill_vs_dense"],
        "step ms": f"{step[0]:.1f} [{step[1]:.1f}, {step[2]:.1f}]" if step else "-",
        "decode tok/s": row["decode_tok_s"],
        "steps": row["full_steps"],
        "KV MiB/request": (row["kv_bytes_per_request"] or 0) / 2**20 or None,
        "decode vs dense": row["decode_vs_dense"],
    }
    if "decode_vs_transformers" in row:
        cells["vs transformers: decode"] = row["decode_vs_transformers"]
        cells["prefill"] = row["prefill_vs_transformers"]
    return cells


COMMAND = Throughput()
