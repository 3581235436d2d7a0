"""`sparseengine bench throughput`: prefill and decode of whole batches, one method after another.

Every run includes our own dense attention. A decode figure is the median over the steps in which
all requests of the batch decode and none prefills; prefill is timed apart, to the last first token.
One short warm-up per engine is run and thrown away.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparseengine.bench.batch import Timing, make_prompts, run_batch
from sparseengine.bench.options import Plan, add_bench_arguments, budget_text, plan_of
from sparseengine.bench.results import Outcome, Results
from sparseengine.bench.synthetic import TAIL_TOKENS, Probe, probe, randomise
from sparseengine.config import EngineConfig
from sparseengine.console import note

if TYPE_CHECKING:
    from sparseengine.llm import LLM


LABELS = {"batch": "batch, requests", "input_len": "prompt, tokens"}
DECODE_NOTE = (
    "decode: median of the steps in which the whole batch decodes, 10th to 90th percentile in "
    "brackets; steps that capture a graph are left out"
)
PREFILL_NOTE = (
    "prefill: to the last first token, median of the runs; one warm-up per engine dropped"
)
SYNTHETIC_NOTE = (
    "synthetic KV: the cache holds random numbers, row lengths are those of one request whose last "
    f"{TAIL_TOKENS} prompt tokens were computed; no prefill was measured"
)


class Throughput:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_bench_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        plan, results = plan_of(args), Results(args)
        measured = measure(plan)
        rows = measured.rows
        outcome = Outcome(
            bench="throughput",
            rows=rows,
            raw=measured.raw,
            info={"settings": plan.settings()},
            details={"engines": measured.engines},
            plots={"": steps_plot(rows)},
        )
        results.publish(outcome, [shown(row) for row in rows], notes_of(plan))
        return 0


def measure(plan: Plan) -> Measured:
    """Every engine of the plan at every shape, and the ratios between them."""
    measured = Measured()
    for label, config in plan.engines:
        measure_engine(label, config, plan, measured)
    if plan.compare_transformers:
        measure_transformers(plan, measured)
    add_ratios(measured.rows, dense=plan.engines[0][0])
    return measured


def notes_of(plan: Plan) -> str:
    """What the figures are, for below the table."""
    how = SYNTHETIC_NOTE if plan.synthetic else PREFILL_NOTE
    return f"{DECODE_NOTE}; {how}; runs of each batch: {plan.repeats}"


@dataclass(slots=True, kw_only=True)
class Measured:
    """What several engines have measured so far. engines: the resolved config of each."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[str, Any] = field(default_factory=dict)


def steps_plot(rows: Sequence[Mapping[str, Any]], x: str | None = None) -> str:
    """Median step times against `x`, "batch" or "input_len" (default: what varies).

    A line per method, and per value of the other one when that varies, too.
    """
    from sparseengine.plots import Axis, line_plot

    if x is None:
        x = "batch" if len({row["batch"] for row in rows}) > 1 else "input_len"
    other = "input_len" if x == "batch" else "batch"
    several = len({row[other] for row in rows}) > 1
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["step_ms"]:
            name = " ".join(str(p) for p in (row["method"], row["budget"]) if p)
            name += f", {other} {row[other]}" if several else ""
            series.setdefault(name, []).append((row[x], row["step_ms"][0]))
    fixed = "" if several else f", {LABELS[other]} {rows[0][other]:,}"
    title = f"{rows[0]['model']}: decode step{fixed}"
    x_axis, y_axis = Axis(label=LABELS[x], base=2), Axis(label="step, ms", base=10)
    return line_plot(title, x_axis, y_axis, series)


def measure_engine(label: str, config: EngineConfig, plan: Plan, measured: Measured) -> None:
    """One engine, all its shapes."""
    from sparseengine.llm import LLM

    with LLM.from_config(config, quiet=True) as llm:
        vocab, measured.engines[label] = llm.resolved.spec.vocab_size, llm.explain()
        if plan.synthetic:
            randomise(llm.engine)
        else:
            note(f"{label}: warm-up")
            run_batch(llm, make_prompts(vocab, min(plan.lengths), 1, seed=99), 4)
        for input_len, batch, is_most in plan.shapes(llm):
            note(f"{label}: {input_len} x {batch}")
            like = _probe_of(llm, input_len, plan.synthetic)
            timings = []
            for repeat in range(plan.repeats):
                prompts = prompts_of(plan, vocab, input_len, batch, repeat)
                timings.append(
                    run_batch(llm, prompts, plan.output_len, like if plan.synthetic else None)
                )
                measured.raw += samples(label, input_len, batch, repeat, timings[-1])
            row = summary(llm.resolved.source.name, label, input_len, batch, timings)
            row["budget"] = budget_text(config)
            row["route"] = ",".join(dict.fromkeys(r.selected for r in llm.resolved.routes))
            each = row["kv_bytes_per_request"] if like is None else like.read_bytes
            row["kv_bytes_read_per_step"] = batch * each if each else None
            row["synthetic_kv"], row["max_batch"] = plan.synthetic, is_most
            measured.rows.append(row)


def prompts_of(
    plan: Plan, vocab: int, input_len: int, batch: int, repeat: int
) -> Sequence[Sequence[int]]:
    """Every request its own prompt; where prompts are not computed, one serves all."""
    if plan.synthetic:
        return make_prompts(vocab, input_len, 1, seed=repeat) * batch
    return make_prompts(vocab, input_len, batch, seed=repeat)


def _probe_of(llm: LLM, input_len: int, synthetic: bool) -> Probe | None:
    """One recorded request, where more is read or written than its rows tell."""
    from sparseengine.methods import METHODS

    if not synthetic and METHODS.get(llm.resolved.methods[0]).traits.takes != "read":
        return None
    (prompt,) = make_prompts(llm.resolved.spec.vocab_size, input_len, 1, seed=98)
    return probe(llm, prompt, compute=not synthetic)


def measure_transformers(plan: Plan, measured: Measured) -> None:
    """The same shapes through transformers' generate."""
    from sparseengine.bench.peers import load_transformers, time_generate
    from sparseengine.resolve import resolve

    resolved = resolve(plan.engines[0][1])
    model = load_transformers(resolved.source, resolved.dtype, resolved.device)
    vocab = resolved.spec.vocab_size
    note("transformers: warm-up")
    time_generate(model, make_prompts(vocab, min(plan.lengths), 1, seed=99), 4)
    for input_len in plan.lengths:
        for batch in plan.fixed_batches():
            note(f"transformers: {input_len} x {batch}")
            timings = []
            for repeat in range(plan.repeats):
                prompts = make_prompts(vocab, input_len, batch, seed=repeat)
                prefill_s, steps_s = time_generate(model, prompts, plan.output_len)
                timings.append(Timing(prefill_s=prefill_s, steps_s=steps_s))
                measured.raw += samples("transformers", input_len, batch, repeat, timings[-1])
            name = resolved.source.name
            measured.rows.append(summary(name, "transformers", input_len, batch, timings))


def samples(
    label: str, input_len: int, batch: int, repeat: int, timing: Timing
) -> list[dict[str, Any]]:
    """Raw samples, one line each."""
    base = {"method": label, "input_len": input_len, "batch": batch, "repeat": repeat}
    steps = [{**base, "what": "decode_step_s", "value": s} for s in timing.steps_s]
    if timing.prefill_s is None:
        return steps
    return [{**base, "what": "prefill_s", "value": timing.prefill_s}, *steps]


def summary(
    model: str, label: str, input_len: int, batch: int, timings: Sequence[Timing]
) -> dict[str, Any]:
    """One row of results. Throughputs are aggregates over the batch."""
    from sparseengine.report import Spread

    steps = [s for timing in timings for s in timing.steps_s]
    step = Spread.of(steps) if steps else None
    prefills = [timing.prefill_s for timing in timings if timing.prefill_s is not None]
    prefill = Spread.of(prefills) if prefills else None
    return {
        "model": model,
        "method": label,
        "budget": None,
        "input_len": input_len,
        "batch": batch,
        "prefill_tok_s": input_len * batch / prefill.median if prefill else None,
        "prefill_s": list(prefill) if prefill else None,
        "decode_tok_s": batch / step.median if step else None,
        "step_ms": [s * 1e3 for s in step] if step else None,
        "full_steps": len(steps),
        "kv_bytes_per_request": timings[-1].resident_bytes or None,
        "kv_bytes_read_per_step": None,
        "route": None,
        "synthetic_kv": False,
        "max_batch": False,
    }


def add_ratios(rows: list[dict[str, Any]], dense: str) -> None:
    """Ratios to our dense run and to transformers, at the same prompt length and batch.

    Where dense did not run at that batch, it is compared at its own `max`: at equal memory.
    """
    for row in rows:
        for name, method in (("dense", dense), ("transformers", "transformers")):
            other = _peer(row, [r for r in rows if r["method"] == method])
            if other is None:
                continue
            row[f"batch_of_{name}"] = other["batch"]
            for what in ("decode", "prefill"):
                mine, base = row[f"{what}_tok_s"], other[f"{what}_tok_s"]
                row[f"{what}_vs_{name}"] = mine / base if mine and base else None


def _peer(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    alike = [r for r in others if r["input_len"] == row["input_len"]]
    same = [r for r in alike if r["batch"] == row["batch"]]
    most = [r for r in alike if r["max_batch"] and row["max_batch"]]
    return (same or most or [None])[0]


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
        "KV MiB read/step": (row["kv_bytes_read_per_step"] or 0) / 2**20 or None,
        "decode vs dense": _ratio(row, "dense"),
    }
    if "decode_vs_transformers" in row:
        cells["vs transformers: decode"] = _ratio(row, "transformers")
        cells["prefill"] = row["prefill_vs_transformers"]
    return cells


def _ratio(row: dict[str, Any], name: str) -> str | None:
    """A ratio of decode rates, with the other's batch where it is another one."""
    ratio, batch = row.get(f"decode_vs_{name}"), row.get(f"batch_of_{name}")
    if ratio is None:
        return None
    return f"{ratio:.2f}" if batch == row["batch"] else f"{ratio:.2f} (batch {batch})"


COMMAND = Throughput()
