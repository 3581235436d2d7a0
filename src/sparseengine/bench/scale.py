"""`sparseengine bench scale`: decode step time against batch and against context, two plots.

Requests are filled in (see synthetic.py), so that a sweep to 1,024 requests and to 128k tokens
takes no prefill. What does not fit into the KV memory is left out, method by method.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from sparseengine.bench.options import MIN_STEPS, Plan, engines_of, numbers
from sparseengine.bench.results import Outcome, Results, add_result_arguments
from sparseengine.bench.throughput import measure, notes_of, shown, steps_plot
from sparseengine.console import add_engine_arguments, positive
from sparseengine.errors import ConfigError

_BATCHES = "1,2,4,8,16,32,64,128,256,512,1024"
_CONTEXTS = "1K,2K,4K,8K,16K,32K,64K,128K"


class Scale:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for flag, default, text in (
            ("--batches", _BATCHES, "batch sizes of the first sweep"),
            ("--contexts", _CONTEXTS, "prompt lengths of the second sweep"),
            ("--at-context", "2K", "prompt length of the first sweep"),
        ):
            parser.add_argument(
                flag, default=default, metavar="N", help=f"{text} [default: {default}]"
            )
        parser.add_argument(
            "--at-batch",
            type=positive,
            default=16,
            metavar="N",
            help="batch size of the second sweep [default: 16]",
        )
        parser.add_argument(
            "--steps",
            type=positive,
            default=24,
            metavar="N",
            help="decode steps of each batch [default: 24]",
        )
        parser.add_argument("--methods", metavar="A,B", help="several methods (dense is added)")
        parser.add_argument(
            "--hyper-params", metavar="JSON", help='knobs per method: {"method": {"knob": 1}}'
        )
        add_result_arguments(parser, plot="both sweeps, as FILE-batch.svg and FILE-context.svg")
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        plan, results = plan_of(args), Results(args)
        measured = measure(plan)
        rows = measured.rows
        if not rows:
            raise ConfigError("no batch fits; lower --at-context, --at-batch or --contexts")
        (context,) = numbers("--at-context", args.at_context)
        outcome = Outcome(
            bench="scale",
            rows=rows,
            raw=measured.raw,
            info={"settings": plan.settings()},
            details={"engines": measured.engines},
            plots=plots_of(rows, context, args.at_batch),
        )
        results.publish(outcome, [shown(row) for row in rows], notes_of(plan))
        return 0


def plan_of(args: argparse.Namespace) -> Plan:
    """Both sweeps as (prompt length, batch) pairs. Raises `ConfigError` for impossible flags."""
    batches = numbers("--batches", args.batches)
    contexts = numbers("--contexts", args.contexts)
    at_context = numbers("--at-context", args.at_context)
    if len(at_context) > 1:
        raise ConfigError(f"--at-context {args.at_context} is not allowed; give one length")
    if args.steps < MIN_STEPS:
        raise ConfigError(f"--steps {args.steps} is not allowed; it must be {MIN_STEPS} or more")
    output_len = args.steps + 3
    pairs = [(at_context[0], b) for b in batches] + [(c, args.at_batch) for c in contexts]
    extra: dict[str, Any] = {}
    if args.engine_max_num_seqs is None:
        extra["max_num_seqs"] = max(*batches, args.at_batch)
    shortest = min(length for length, _ in pairs) + output_len
    return Plan(
        engines=tuple(engines_of(args, shortest, **extra)),
        lengths=contexts,
        batches=batches,
        output_len=output_len,
        repeats=1,
        compare_transformers=False,
        synthetic=True,
        pairs=tuple(dict.fromkeys(pairs)),
    )


def plots_of(rows: Sequence[Mapping[str, Any]], context: int, batch: int) -> dict[str, str]:
    """Either sweep's plot, unless nothing of it fitted."""
    sweeps = {
        "batch": [row for row in rows if row["input_len"] == context],
        "input_len": [row for row in rows if row["batch"] == batch],
    }
    names = {"batch": "-batch", "input_len": "-context"}
    return {names[x]: steps_plot(some, x) for x, some in sweeps.items() if some}


COMMAND = Scale()
