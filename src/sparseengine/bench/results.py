"""What every `bench` command leaves behind: table, artefacts, ratios, plot, one JSON line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparseengine.bench.compare import HIGHER_IS_BETTER, Earlier
from sparseengine.console import table

Rows = Sequence[Mapping[str, Any]]


def add_result_arguments(parser: argparse.ArgumentParser, *, plot: str | None = None) -> None:
    """--output, --compare and, where `plot` says what is drawn, --plot."""
    parser.add_argument(
        "--output", metavar="DIR", help="write run_info.json, raw.jsonl and aggregate.json there"
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="PATH",
        help="print ratios to an earlier run: its --output folder, or a file of JSON rows "
        "(may be given several times)",
    )
    if plot is not None:
        parser.add_argument("--plot", metavar="FILE.svg", help=f"draw {plot}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The rows of one run, every sample behind them, and what else to know about it.

    details: for run_info.json alone, as the resolved config of each engine. plots: by the end of
    their file's name, "" when there is only one.
    """

    bench: str
    rows: list[dict[str, Any]]
    raw: list[dict[str, Any]]
    info: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    plots: dict[str, str] = field(default_factory=dict)


class Results:
    """Where results go. Made before anything is measured, so that wrong paths fail at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        from sparseengine.plots import check_plot
        from sparseengine.report import make_folder

        self.folder: Path | None = None if args.output is None else make_folder(args.output)
        self.earlier = [Earlier(path) for path in args.compare]
        self.plot: Path | None = None
        if getattr(args, "plot", None) is not None:
            self.plot = check_plot(args.plot)

    def publish(self, outcome: Outcome, shown: Rows, notes: str = "") -> None:
        """shown: the rows as people read them."""
        from sparseengine.plots import write_plot
        from sparseengine.report import machine, write_artefacts

        compared = [entry for each in self.earlier for entry in each.ratios(outcome.rows)]
        info = {**machine(), **outcome.info}
        if self.folder is not None:
            write_artefacts(self.folder, {**info, **outcome.details}, outcome.raw, outcome.rows)
        for name, svg in outcome.plots.items():
            if self.plot is not None:
                write_plot(self.plot.with_stem(self.plot.stem + name), svg)
            if self.folder is not None:
                write_plot(self.folder / f"plot{name}.svg", svg)
        if shown:
            print(table(shown))
        if notes:
            print(f"\n{notes}")
        for each in self.earlier:
            mine = [entry for entry in compared if entry["with"] == each.path]
            print(f"\nagainst {each.path}, above 1 is better:")
            print(_compared(mine) if mine else "no row matches")
        line = {"bench": outcome.bench, **info, "rows": outcome.rows}
        if self.earlier:
            line["compared"] = compared
        print(json.dumps(line), flush=True)


def _compared(entries: Rows) -> str:
    cells = [_shown(entry) for entry in entries]
    names = ("method", "budget", "prompt", "batch", "its batch", "load", "op")
    shown = [n for n in (*names, *HIGHER_IS_BETTER.keys()) if any(n in c for c in cells)]
    return table(cells, shown)


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"input_len": "prompt", "with_batch": "its batch"}
    cells = {renamed.get(name, name): value for name, value in entry.items()}
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in cells.items()}
