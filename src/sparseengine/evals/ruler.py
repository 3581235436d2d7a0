"""`eval ruler`: long texts made from a seed, questions about them, by method, budget and protocol.

Tasks are those of `evals.tasks`, protocols those of `evals.asking`. A score is the mean over the
answers of the part of the wanted strings that an answer holds. `low` and `high` bound it with 95 %
confidence (Wilson), as if every answer were drawn alone: questions on one text are not, so that the
true interval of multi_question is wider.

Every cell that is missing is given to the engine at once, and is kept as soon as its last answer
is there. A request that fails costs its own cell, which is listed under `skipped`.

Bytes held are a mean over all answers of a cell, each at its end. What a decode step reads needs a
record, which makes steps slow: it is measured once for each method, budget, protocol and length,
beside the answers, on the first question about the first text of the first task, over the steps of
the question and `READ_TOKENS` of an answer at most. Both are divided by the tokens that dense
attention would hold. The end of the prefill gives the first token of an answer in query_aware; most
methods have dropped nothing by then.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

from sparseengine.console import positive
from sparseengine.errors import ConfigError, nearest
from sparseengine.evals.asking import MULTI_QUESTION, PROTOCOLS
from sparseengine.evals.chart import Point, draw
from sparseengine.evals.journal import Journal
from sparseengine.evals.options import (
    add_eval_arguments,
    cases_of,
    engines,
    finish,
    settings_of,
)
from sparseengine.evals.options import sizes as sizes_of
from sparseengine.evals.tasks import TASKS
from sparseengine.evals.waves import Answered, Cell, Texts, Waves

FOOTNOTE = (
    "scores from 0 to 1; n: answers per task, on so many texts; B/token: bytes of KV held at the "
    "end of an answer per token of the text, mean of all; read/token: bytes read by a decode step, "
    "measured on the first text of the first task"
)
_Z = 1.96


class Ruler:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--tasks",
            default="all",
            metavar="A,B",
            help=f"all, or some of {', '.join(TASKS)} [default: all]",
        )
        add(
            "--protocol",
            default="all",
            metavar="A,B",
            help=f"all, or some of {', '.join(PROTOCOLS)} [default: all]",
        )
        add(
            "--lengths",
            default="4096",
            metavar="N,N",
            help="tokens of text, question and answer, at most [default: 4096]",
        )
        add(
            "--questions",
            type=positive,
            default=5,
            metavar="N",
            help="on each text of multi_question [default: 5]",
        )
        add(
            "--answer-tokens",
            type=positive,
            metavar="N",
            help="most tokens of an answer [default: the task's, 30 to 128]",
        )
        add("--text-seed", type=int, default=0, metavar="N", help="of the texts [default: 0]")
        add_eval_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.report import make_folder

        skipped: dict[str, str] = {}
        cells = cells_of(args, skipped)
        cases = cases_of(args)
        folder = None if args.output is None else make_folder(args.output)
        facts = {
            **settings_of(args),
            "questions": args.questions,
            "answer_tokens": args.answer_tokens,
            "text_seed": args.text_seed,
        }
        journal = Journal(folder, facts, resume=args.resume)
        texts = Texts(
            num_texts=args.num_texts,
            num_questions=args.questions,
            seed=args.text_seed,
            answer_tokens=args.answer_tokens,
        )
        open_cases = [c for c in cases if any(cell.key(c) not in journal for cell in cells)]
        waves = Waves(args=args, cells=cells, texts=texts, journal=journal, skipped=skipped)
        for llm, group in engines(args, open_cases, skipped):
            for answered in waves.run(llm, group):
                row, samples = row_of(answered)
                journal.add(answered.key, row, samples)
                answered.tell(f"{row['score']:.2f}")
        rows, raw = journal.take([cell.key(case) for case in cases for cell in cells])
        if not rows:
            raise ConfigError(f"nothing could be measured; {'; '.join(skipped.values())}")
        info = {**facts, "skipped": skipped}
        finish("ruler", folder, info, raw, rows, list(shown(rows)), FOOTNOTE)
        if folder is not None:
            draw(folder / "plot.svg", points(rows), quality="score")
        return 0


def cells_of(args: argparse.Namespace, skipped: dict[str, str]) -> list[Cell]:
    """All asked for, by protocol, length and task. Raises `ConfigError` for unknown names."""
    tasks, protocols = args.tasks.strip(), args.protocol.strip()
    names = names_of("--tasks", tasks, tuple(TASKS))
    found = []
    for protocol in names_of("--protocol", protocols, PROTOCOLS):
        for length in sizes_of("--lengths", args.lengths):
            for task in names:
                if protocol == MULTI_QUESTION and not TASKS[task].asks_many:
                    skipped[f"{protocol} {task}"] = "there is only one question to ask"
                else:
                    found.append(Cell(protocol=protocol, length=length, task=task))
    if not found:
        raise ConfigError(f"--tasks {tasks}: none of them has several questions; see --protocol")
    return found


def names_of(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Names joined by commas, or all."""
    if text == "all":
        return list(known)
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} {name!r} is unknown; {nearest(name, known)}")
    return names


def row_of(answered: Answered) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the row, a sample for each answer)."""
    samples = []
    for i, (asked, answers) in enumerate(zip(answered.asked, answered.answers, strict=True)):
        for query, text in zip(asked.job.queries, answers.texts, strict=True):
            sample = {"text": i, "question": query.question, "wanted": query.wanted}
            sample |= {"answer": text, "score": query.score(text)}
            samples.append({**answered.key, **sample})
    scores = [sample["score"] for sample in samples]
    low, high = wilson(sum(scores), len(scores))
    number, first = len(answered.asked), answered.asked[0]
    tokens = sum(answers.tokens for answers in answered.answers) / number
    held = sum(answers.kv_bytes for answers in answered.answers) / number
    row = {
        **answered.key,
        "texts": number,
        "answers": len(scores),
        "score": sum(scores) / len(scores),
        "low": low,
        "high": high,
        "prompt_tokens": len(first.job.prompt),
        "budget_tokens": first.budget,
        "stored_tokens": tokens,
        "resident_bytes": held,
        "resident_bytes_per_token": held / tokens,
        "read_bytes_per_token": answered.read,
    }
    return row, samples


def wilson(right: float, number: int) -> tuple[float, float]:
    """The 95 % interval of a part; scores between 0 and 1 vary less than this assumes."""
    p, z2 = right / number, _Z * _Z
    middle = p + z2 / (2 * number)
    half = _Z * sqrt(p * (1 - p) / number + z2 / (4 * number * number))
    scale = 1 + z2 / number
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def _groups(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Rows of one protocol, length, method and budget."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["protocol"], row["length"], row["method"], row["budget"])
        found.setdefault(key, []).append(row)
    order = sorted({k[:2] for k in found}, key=lambda k: (PROTOCOLS.index(k[0]), k[1]))
    for protocol_length in order:
        yield from ((k, v) for k, v in found.items() if k[:2] == protocol_length)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return sum(values) / len(values) if values else None


def shown(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line of the table for each protocol, length, method and budget; tasks are columns."""
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    for (protocol, length, method, budget), group in _groups(rows):
        scores = {row["task"]: row["score"] for row in group}
        yield {
            "protocol": protocol,
            "length": length,
            "method": method,
            "budget": None if budget is None else str(budget),
            **{task.removeprefix("niah_"): scores.get(task) for task in tasks},
            "mean": _mean(group, "score"),
            "n": f"{group[0]['answers']} on {group[0]['texts']}",
            "B/token": _mean(group, "resident_bytes_per_token"),
            "read/token": _mean(group, "read_bytes_per_token"),
        }


def points(rows: Sequence[dict[str, Any]]) -> list[Point]:
    """The mean over the tasks, one panel per protocol and length."""
    return [
        Point(
            panel=f"{protocol}, {length} tokens",
            method=method,
            resident=_mean(group, "resident_bytes_per_token"),
            read=_mean(group, "read_bytes_per_token"),
            quality=_mean(group, "score") or 0.0,
        )
        for (protocol, length, method, _), group in _groups(rows)
    ]


COMMAND = Ruler()
