"""`eval perplexity`: how well a model goes on with a long text while a method forgets parts of it.

A real text is read as one prompt, and the log-probability of each of its tokens is that given all
that is still held of the tokens before it: perplexity, exp of the mean negative log-probability, by
ranges of the text. Only methods that evict while they read (`block_tokens`) and patterns of sparse
prefill change it; others are refused, `eval agree` measures them. Dense stands beside them.

Attention within a block is to the whole block and to what was kept before it, so that a token sees
between `budget` and `budget + block_tokens` others.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sparseengine.console import note, positive
from sparseengine.core.params import DENSE_PREFILL, SamplingParams
from sparseengine.errors import ConfigError, RequestError
from sparseengine.evals.agree import key_of, pieces_of, read_text
from sparseengine.evals.journal import Journal
from sparseengine.evals.options import (
    Case,
    add_eval_arguments,
    cases_of,
    engines,
    finish,
    leave_out,
    mib,
    settings_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from sparseengine.engine.outputs import RequestOutput
    from sparseengine.llm import LLM

_LEAST = 2
FOOTNOTE = (
    "perplexity of the tokens from the range before up to there, and of all; resident: MiB of KV "
    "at the end of a text"
)


class Perplexity:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--input-len",
            type=positive,
            default=4096,
            metavar="N",
            help="tokens of a text [default: 4096]",
        )
        parser.add_argument(
            "--every",
            type=positive,
            metavar="N",
            help="tokens of a range [default: a quarter of the text]",
        )
        parser.add_argument(
            "--text", metavar="FILE", help="a long text [default: Python's own documentation]"
        )
        add_eval_arguments(parser, controls=False)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.report import make_folder

        text, every = read_text(args.text), args.every or args.input_len // 4
        if min(every, args.input_len) < _LEAST:
            raise ConfigError(
                f"--input-len {args.input_len} in ranges of {every} is not allowed (--every); both "
                f"must be {_LEAST} or more, as nothing predicts the first token"
            )
        cases = cases_of(args, controls=False)
        folder = None if args.output is None else make_folder(args.output)
        facts = {
            **settings_of(args),
            "input_len": args.input_len,
            "every": every,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        journal = Journal(folder, facts, resume=args.resume)
        skipped: dict[str, str] = {}
        is_open = [case for case in cases if key_of(case) not in journal]
        for llm, group in engines(args, is_open, skipped):
            pieces = pieces_of(llm, text, args.num_texts, args.input_len)
            for case in group:
                note(f"running {case.label} ...")
                try:
                    journal.add(key_of(case), *run_case(llm, case, pieces, every))
                except RequestError as error:
                    leave_out(args, case, error, skipped, case.label)
        rows, raw = journal.take([key_of(case) for case in cases])
        info = {**facts, "skipped": skipped}
        finish("perplexity", folder, info, raw, rows, [shown(row) for row in rows], FOOTNOTE)
        if folder is not None:
            _draw(folder / "plot.svg", rows)
        return 0


def run_case(
    llm: LLM, case: Case, pieces: Sequence[list[int]], every: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(row, a sample for each piece). Raises `RequestError` for methods that change nothing."""
    params = case.params()
    method = llm.engine.prepare(pieces[0], None, params).method
    if case.budget is not None and case.prefill == DENSE_PREFILL and method.prefill_block() is None:
        raise RequestError(
            f"{case.label} drops nothing while it reads a prompt, so that the perplexity would be "
            "that of dense; give it block_tokens if it has that knob, or use eval agree"
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(pieces, sampling, params, use_tqdm=False)
    stops = [min(n + every, len(pieces[0])) for n in range(0, len(pieces[0]), every)]
    samples = []
    for i, output in enumerate(outputs):
        losses = losses_of(output)
        cuts = [losses[start:stop] for start, stop in pairwise([0, *stops])]
        parts = [[loss for loss in cut if loss is not None] for cut in cuts]
        nll = [
            {"stop": stop, "tokens": len(p), "sum": sum(p)}
            for stop, p in zip(stops, parts, strict=True)
        ]
        samples.append({**key_of(case), "text": i, "nll": nll})
    held = [0 if output.metrics is None else output.metrics.kv_bytes for output in outputs]
    row = {
        **key_of(case),
        "texts": len(pieces),
        "prompt_tokens": len(pieces[0]),
        "perplexity": _perplexity([part for sample in samples for part in sample["nll"]]),
        "ranges": [
            {"stop": stop, "perplexity": _perplexity([sample["nll"][k] for sample in samples])}
            for k, stop in enumerate(stops)
        ],
        "resident_bytes": sum(held) / len(held),
    }
    return row, samples


def _perplexity(parts: Sequence[Mapping[str, Any]]) -> float:
    return math.exp(sum(p["sum"] for p in parts) / sum(p["tokens"] for p in parts))


def losses_of(output: RequestOutput) -> list[float | None]:
    """-log p of each token of the prompt; None for the first, which nothing predicts."""
    done, rows = output.outputs[0], output.prompt_logprobs
    if done.finish_reason == "error" or rows is None:
        raise RequestError(f"a run ended early: {done.stop_reason}")
    pairs = zip(output.prompt_token_ids, rows, strict=True)
    return [None if row is None else -row[token].logprob for token, row in pairs]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the table has it."""
    return {
        "method": row["method"],
        "budget": None if row["budget"] is None else str(row["budget"]),
        **{f"to {part['stop']:,}": part["perplexity"] for part in row["ranges"]},
        "all": row["perplexity"],
        "resident": mib(row["resident_bytes"]),
    }


def _draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from sparseengine.plots import Axis, line_plot, write_plot

    series = {
        f"{row['method']} {row['budget'] or ''}".strip(): [
            (float(part["stop"]), part["perplexity"]) for part in row["ranges"]
        ]
        for row in rows
    }
    title = f"{rows[0]['prompt_tokens']} tokens"
    axes = Axis(label="tokens read"), Axis(label="perplexity of a range", base=10)
    write_plot(path, line_plot(title, *axes, series))


COMMAND = Perplexity()
