"""`eval needle`: a five-digit number hidden in prose, asked for at the end of the same prompt.

Every text is prose made from a seed; the number stands at each of the depths. The question is part
of the prompt that the method sees (the query-aware protocol). Decoding is greedy. An answer is
right if the first number in it is the hidden one.

Bytes are measured, not computed from the budget: of the first prompt of each length, what the cache
holds at the end of the answer and what a decode step reads on average, summaries included.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseengine.console import note
from sparseengine.core.params import SamplingParams
from sparseengine.errors import ConfigError, RequestError
from sparseengine.evals.chart import Point, draw
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
from sparseengine.evals.options import sizes as sizes_of
from sparseengine.longtext import Puzzle, make_puzzle

if TYPE_CHECKING:
    from sparseengine.engine.outputs import RequestOutput
    from sparseengine.llm import LLM

MAX_TOKENS = 24
# What a model without a chat template is asked to go on with.
CUE = "\n\nThe secret number of the lighthouse is"
FOOTNOTE = (
    "right: the first number of the answer is the hidden one; resident and read/step: MiB of KV, "
    "measured on the first prompt of each length"
)
_NUMBER = re.compile(r"\d+(?:,\d{3})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt: its text's number, where the fact stands, and what to find."""

    length: int
    text: int
    depth: float
    puzzle: Puzzle


class Needle:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--lengths",
            default="1024",
            metavar="N,N",
            help="tokens of the texts, about [default: 1024]",
        )
        parser.add_argument(
            "--depths",
            default="0.1,0.5,0.9",
            metavar="D,D",
            help="where the number stands, from 0 to 1 [default: 0.1,0.5,0.9]",
        )
        add_eval_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.report import make_folder

        lengths, places = sizes_of("--lengths", args.lengths), depths(args.depths)
        cases = cases_of(args)
        folder = None if args.output is None else make_folder(args.output)
        facts = {**settings_of(args), "depths": places}
        journal = Journal(folder, facts, resume=args.resume)
        skipped: dict[str, str] = {}
        is_open = [c for c in cases if any(key_of(c, n) not in journal for n in lengths)]
        for llm, group in engines(args, is_open, skipped):
            questions = questions_for(llm, lengths, places, args.num_texts)
            for case in group:
                note(f"running {case.label} ...")
                try:
                    run_case(llm, case, questions, journal)
                except RequestError as error:
                    leave_out(args, case, error, skipped, case.label)
        rows, raw = journal.take([key_of(case, n) for case in cases for n in lengths])
        info = {**facts, "skipped": skipped}
        finish("needle", folder, info, raw, rows, [shown(row) for row in rows], FOOTNOTE)
        if folder is not None:
            draw(folder / "plot.svg", [point(row) for row in rows], quality="right")
        return 0


def key_of(case: Case, length: int) -> dict[str, Any]:
    return {"method": case.name, "budget": case.budget, "length": length}


def point(row: dict[str, Any]) -> Point:
    tokens, read = row["stored_tokens"], row["bytes_read_per_step"]
    return Point(
        panel=f"{row['length']} tokens",
        method=row["method"],
        resident=row["resident_bytes"] / tokens,
        read=None if read is None else read / tokens,
        quality=row["accuracy"],
    )


def depths(text: str) -> tuple[float, ...]:
    """Fractions in [0, 1], joined by commas."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= depth <= 1 for depth in found):
        raise ConfigError(f"--depths {text!r} is not allowed; give numbers from 0 to 1")
    return found


def is_exact(text: str, answer: str) -> bool:
    """The first number of the text is the answer; commas between thousands do not count."""
    found = _NUMBER.search(text)
    return found is not None and found[0].replace(",", "") == answer


def questions_for(
    llm: LLM, lengths: Sequence[int], places: Sequence[float], num_texts: int
) -> list[Question]:
    """All prompts of a run, by length, text and depth."""
    tokenizer = llm.tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return [
        Question(length=n, text=i, depth=d, puzzle=make_puzzle(count, n, seed=i, depth=d))
        for n in lengths
        for i in range(num_texts)
        for d in places
    ]


def run_case(llm: LLM, case: Case, questions: Sequence[Question], journal: Journal) -> None:
    """Each length that is not in the journal yet."""
    for length in dict.fromkeys(q.length for q in questions):
        if key_of(case, length) not in journal:
            asked = [q for q in questions if q.length == length]
            journal.add(key_of(case, length), *run_length(llm, case, asked))


def run_length(
    llm: LLM, case: Case, asked: Sequence[Question]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the row of one length, a sample for each question)."""
    outputs = _ask(llm, case, asked)
    key = key_of(case, asked[0].length)
    samples, right = [], []
    for question, output in zip(asked, outputs, strict=True):
        text = output.outputs[0].text
        right.append(is_exact(text, question.puzzle.answer))
        sample = {
            "text": question.text,
            "depth": question.depth,
            "prompt_tokens": len(output.prompt_token_ids),
            "wanted": question.puzzle.answer,
            "answer": text,
            "right": right[-1],
        }
        samples.append({**key, **sample})
    first = outputs[0].outputs[0]
    seen = first.sparse
    assert seen is not None
    reads = seen.bytes_read_per_step
    row = {
        **key,
        "prompt_tokens": len(outputs[0].prompt_token_ids),
        "budget_tokens": seen.budget,
        "questions": len(asked),
        "right": sum(right),
        "accuracy": sum(right) / len(asked),
        "accuracy_by_depth": _by_depth(asked, right),
        # the last token was sampled, but never run
        "stored_tokens": len(outputs[0].prompt_token_ids) + len(first.token_ids) - 1,
        "resident_bytes": seen.resident_bytes,
        "bytes_read_per_step": sum(reads) / len(reads) if reads else None,
        "prefill_density": seen.prefill_density,
    }
    return row, samples


def _ask(llm: LLM, case: Case, asked: Sequence[Question]) -> list[RequestOutput]:
    """Two tokens at least, so that one decode step is measured. Only the first is recorded."""
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, min_tokens=2)
    sparse = [case.params(record=i == 0) for i in range(len(asked))]
    messages = [q.puzzle.message for q in asked]
    if getattr(llm.tokenizer, "chat_template", None):
        talks = [[{"role": "user", "content": message}] for message in messages]
        outputs = llm.chat(talks, sampling, sparse, use_tqdm=False)
    else:
        outputs = llm.generate([m + CUE for m in messages], sampling, sparse, use_tqdm=False)
    limit = llm.engine.intake.max_model_len
    for output in outputs:
        if len(output.prompt_token_ids) + MAX_TOKENS > limit:
            raise ConfigError(
                f"a prompt of {len(output.prompt_token_ids)} tokens leaves no room for an answer "
                f"of {MAX_TOKENS} in max_model_len={limit}; lower --lengths"
            )
        if output.outputs[0].finish_reason == "error":
            raise RequestError(f"{case.label}: {output.outputs[0].stop_reason}")
    return outputs


def _by_depth(asked: Sequence[Question], right: Sequence[bool]) -> dict[str, float]:
    found: dict[str, list[bool]] = {}
    for question, is_right in zip(asked, right, strict=True):
        found.setdefault(f"{question.depth:g}", []).append(is_right)
    return {depth: sum(values) / len(values) for depth, values in found.items()}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the table has it."""
    return {
        "method": row["method"],
        "budget": None if row["budget"] is None else str(row["budget"]),
        "prompt tokens": row["prompt_tokens"],
        "right": f"{row['right']}/{row['questions']}",
        **{f"at {depth}": value for depth, value in row["accuracy_by_depth"].items()},
        "resident": mib(row["resident_bytes"]),
        "read/step": mib(row["bytes_read_per_step"]),
        "prefill": row["prefill_density"],
    }


COMMAND = Needle()
