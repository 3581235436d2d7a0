"""`sparseengine demo`: one fact in a long text, asked for dense and with four sparse methods."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseengine.config import EngineConfig
from sparseengine.console import (
    add_engine_arguments,
    engine_config,
    note,
    positive,
    print_json,
    table,
)
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError
from sparseengine.longtext import Puzzle, is_right, make_puzzle

if TYPE_CHECKING:
    from sparseengine.llm import LLM

MODEL = "smollm2-135m"
MAX_TOKENS = 24
TEXT_SEED = 1
NOTES = {
    ("wrong", True): "loses the middle of the text, as it must",
    ("wrong", False): "unexpected: this method cannot see the fact",
    ("right", False): "unexpected: this method should find the fact",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCase:
    """One row: a method, its budget, and what must come out ("right", "wrong" or "any").

    `block_size` is the page size of the engine that runs the row; rows with the same share one.
    """

    method: str
    expect: str
    budget: int | None = None
    ratio: float | None = None
    block_size: int | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        if self.ratio is not None:
            return f"{self.method} {self.ratio:.0%}"
        return f"{self.method} {self.budget}" if self.budget is not None else self.method

    @property
    def settings(self) -> str:
        """What differs from the defaults, for the lines under the table."""
        own = dict(self.knobs) if self.block_size is None else {"pages of": self.block_size}
        return ", ".join(f"{name} {value}" for name, value in own.items())

    def params(self, engine: SparseParams, *, record: bool) -> SparseParams:
        """The case's method behind the engine's sparse prefill, if there is one."""
        return SparseParams(
            self.method,
            budget=self.budget,
            ratio=self.ratio,
            record=record,
            prefill=engine.prefill,
            prefill_config=engine.prefill_config,
            **self.knobs,
        )

    def holds(self, right: bool) -> bool:
        return self.expect == "any" or right == (self.expect == "right")


class Demo:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="JSON instead of the table")
        parser.add_argument(
            "--tokens", type=positive, default=4000, help="length of the text [default: 4000]"
        )
        parser.add_argument(
            "--text-seed",
            type=int,
            default=TEXT_SEED,
            help=f"seed of text and fact [default: {TEXT_SEED}]",
        )
        parser.add_argument("--cases", metavar="FILE", help="another list of methods and budgets")
        add_engine_arguments(parser, positional_model=False)

    def run(self, args: argparse.Namespace) -> int:
        cases = read_cases(args.cases)
        flags: dict[str, Any] = {} if args.engine_model else {"model": MODEL}
        rows: list[dict[str, Any]] = []
        for block_size, group in by_block_size(cases).items():
            size = {} if block_size is None else {"block_size": block_size}
            methods = {"enable_methods": [c.method for c in group]}
            config = engine_config(args, **flags, **methods, **size)
            puzzle, found = run_cases(config, group, args)
            rows.extend(found)
        rows.sort(key=lambda row: [c.label for c in cases].index(row["method"]))
        if args.json:
            print_json(rows)
        else:
            print_table(rows, puzzle)
        return 0 if all(row["as expected"] for row in rows) else 1


def by_block_size(cases: list[DemoCase]) -> dict[int | None, list[DemoCase]]:
    """Cases that may share an engine, in order."""
    groups: dict[int | None, list[DemoCase]] = {}
    for case in cases:
        groups.setdefault(case.block_size, []).append(case)
    return groups


def run_cases(
    config: EngineConfig, cases: list[DemoCase], args: argparse.Namespace
) -> tuple[Puzzle, list[dict[str, Any]]]:
    """One engine, all its cases one after another."""
    from sparseengine.llm import LLM

    start = time.perf_counter()
    with LLM.from_config(config) as llm:
        puzzle = puzzle_for(llm, args.tokens, args.text_seed)
        note(f"\nmodel ready after {time.perf_counter() - start:.1f} s; {len(cases)} runs follow")
        rows = []
        for case in cases:
            note(f"running {case.label} ...")
            rows.append(run_case(llm, case, puzzle))
    return puzzle, rows


def read_cases(path: str | None) -> list[DemoCase]:
    """The shipped cases, or those of a JSON file of the same form."""
    shipped = files("sparseengine.cli") / "demo_cases.json"
    try:
        text = shipped.read_text() if path is None else Path(path).read_text(encoding="utf-8")
        return [DemoCase(**case) for case in json.loads(text)]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--cases {path}: not a list of demo cases: {error}") from None


def puzzle_for(llm: LLM, tokens: int, seed: int) -> Puzzle:
    """A puzzle whose chat prompt has about `tokens` tokens of this model's tokenizer."""
    tokenizer = llm.tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return make_puzzle(count, tokens, seed)


def run_case(llm: LLM, case: DemoCase, puzzle: Puzzle) -> dict[str, Any]:
    """Ask twice: once on the clock, once recording what was kept and read.

    Recording copies decisions to the host, so its time would not be the engine's.
    """
    messages = [{"role": "user", "content": puzzle.message}]
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    engine = llm.resolved.sparse
    llm.reset_prefix_cache()  # every case runs its prompt once; recording may begin with its rows
    timed = llm.chat(messages, sampling, case.params(engine, record=False), use_tqdm=False)[0]
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    recorded = llm.chat(messages, short, case.params(engine, record=True), use_tqdm=False)[0]
    seen = recorded.outputs[0].sparse
    completion, metrics = timed.outputs[0], timed.metrics
    assert seen is not None
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    prefill_s = metrics.first_token_time - metrics.arrival_time
    decode_s = metrics.finished_time - metrics.first_token_time
    steps = len(completion.token_ids) - 1
    right = is_right(completion.text, puzzle)
    reads = seen.bytes_read_per_step
    return {
        "method": case.label,
        "answer": " ".join(completion.text.split()),
        "right": right,
        "as expected": case.holds(right),
        "settings": case.settings,
        "note": NOTES.get((case.expect, case.holds(right)), ""),
        "prompt tokens": len(timed.prompt_token_ids),
        "resident KV bytes": seen.resident_bytes,
        "KV bytes read/step": sum(reads) // max(1, len(reads)),
        "prefill tok/s": len(timed.prompt_token_ids) / prefill_s,
        "decode tok/s": steps / decode_s if steps else None,
    }


def print_table(rows: list[dict[str, Any]], puzzle: Puzzle) -> None:
    """The table, and under it what to see in it."""
    shown = [_shown(row) for row in rows]
    tokens = rows[0]["prompt tokens"]
    print(f"\nA text of {tokens:,} tokens hides the number {puzzle.answer} in its middle.\n")
    print(table(shown))
    dense = rows[0]["resident KV bytes"]
    print()
    for row in rows[1:]:
        name = row["method"] + (f" ({row['settings']})" if row["settings"] else "")
        freed = 1 - row["resident KV bytes"] / dense
        if freed > 0.01:
            tail = f"; {row['note']}" if row["note"] else ""
            print(f"{name}: {freed:.0%} of the KV memory is free again{tail}.")
        else:
            part = row["KV bytes read/step"] / rows[0]["KV bytes read/step"]
            print(f"{name}: keeps all KV and reads {part:.0%} of it per step, summaries included.")
    if not all(row["as expected"] for row in rows):
        wrong = ", ".join(r["method"] for r in rows if not r["as expected"])
        print(f"\nNot as expected: {wrong}.")


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = row["answer"] if len(row["answer"]) <= 48 else row["answer"][:47] + "…"
    verdict = ("right" if row["right"] else "wrong") + ("" if row["as expected"] else " (!)")
    hidden = ("answer", "right", "as expected", "settings", "note", "prompt tokens", "method")
    rest = {name: value for name, value in row.items() if name not in hidden}
    return {"method": row["method"], "answer": answer, "": verdict, **rest}


COMMAND = Demo()
