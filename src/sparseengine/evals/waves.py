"""Many cells of `eval ruler` through one engine: all at once, each finished as it ends.

What is given to the engine together is a wave. The scheduler queues what does not fit, so a wave is
bounded only for the host's memory; cells end about in the order in which they were given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparseengine.console import note
from sparseengine.errors import RequestError
from sparseengine.evals.asking import (
    MULTI_QUESTION,
    Answers,
    Asked,
    Job,
    ask,
    make_job,
    prepare,
    split_prompt,
)
from sparseengine.evals.journal import Journal
from sparseengine.evals.options import Case, leave_out
from sparseengine.evals.tasks import TASKS, Text, fit

if TYPE_CHECKING:
    from sparseengine.llm import LLM

READ_TOKENS = 32  # of an answer: bytes read are a mean over the steps up to there
WAVE_TOKENS = 1 << 20  # of prompts in a wave, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one row measures, apart from the method and its budget."""

    protocol: str
    length: int
    task: str

    def key(self, case: Case) -> dict[str, Any]:
        return {
            "method": case.name,
            "budget": case.budget,
            "protocol": self.protocol,
            "length": self.length,
            "task": self.task,
        }

    @property
    def label(self) -> str:
        return f"{self.protocol} {self.task} {self.length}"


@dataclass(slots=True, kw_only=True)
class Texts:
    """The jobs of a cell, made once: every method gets the same tokens."""

    num_texts: int
    num_questions: int
    seed: int
    answer_tokens: int | None
    made: dict[Cell, list[Job]] = field(default_factory=dict)
    _texts: dict[str, Text] = field(default_factory=dict)

    def answer(self, cell: Cell) -> int:
        return self.answer_tokens or TASKS[cell.task].answer_tokens

    def jobs(self, llm: LLM, cell: Cell) -> list[Job]:
        if cell not in self.made:
            self.made[cell] = [self._job(llm, cell, i) for i in range(self.num_texts)]
        return self.made[cell]

    def _job(self, llm: LLM, cell: Cell, index: int) -> Job:
        questions = self.num_questions if cell.protocol == MULTI_QUESTION else 1

        def count(text: Text) -> int:
            longest = max(text.queries, key=lambda query: len(query.question) + len(query.cue))
            before, behind = split_prompt(llm, text.context, longest)
            return len(before) + len(behind) + self.answer(cell)

        seed = f"{cell.task}, {cell.length} tokens, seed {self.seed}, text {index}"
        name = f"{seed}, {questions}"  # protocols with one question have the same texts
        if name not in self._texts:
            self._texts[name] = fit(TASKS[cell.task], count, cell.length, seed, questions)
        text = self._texts[name]
        return make_job(llm, cell.protocol, text.context, text.queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """All answers of a cell. read: bytes that a decode step reads per token of the text, if known.

    seconds: since the run began.
    """

    case: Case
    cell: Cell
    asked: tuple[Asked, ...]
    answers: tuple[Answers, ...]
    read: float | None
    seconds: float

    @property
    def key(self) -> dict[str, Any]:
        return self.cell.key(self.case)

    def tell(self, result: str) -> None:
        note(f"{self.case.label}: {self.cell.label}: {result} (after {self.seconds:.0f} s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a cell asks. With `reads` it is there for its record alone."""

    case: Case
    cell: Cell
    asked: tuple[Asked, ...]
    reads: bool = False


@dataclass(slots=True, kw_only=True)
class Waves:
    """Runs what the journal lacks. Bytes read are put into the journal, too, by `reads_key`."""

    args: argparse.Namespace
    cells: Sequence[Cell]
    texts: Texts
    journal: Journal
    skipped: dict[str, str]
    begin: float = field(default_factory=time.monotonic)
    _left_out: set[str] = field(default_factory=set)

    def run(self, llm: LLM, cases: Sequence[Case]) -> Iterator[Answered]:
        """Cells as they are answered; those that fail are noted in `skipped`."""
        for wave in self._waves(llm, self._reads(cases)):
            for part, answers in self._answered(llm, wave):
                read = {"read_bytes_per_token": _read(answers[0])}
                self.journal.add(reads_key(part.case, part.cell), read, [])
        cells = ((case, cell, False) for case in cases for cell in self._open(case))
        for wave in self._waves(llm, cells):
            for part, answers in self._answered(llm, wave):
                rows, _ = self.journal.take([reads_key(part.case, part.cell)])
                yield Answered(
                    case=part.case,
                    cell=part.cell,
                    asked=part.asked,
                    answers=tuple(answers),
                    read=rows[0]["read_bytes_per_token"] if rows else None,
                    seconds=time.monotonic() - self.begin,
                )

    def _open(self, case: Case) -> list[Cell]:
        return [cell for cell in self.cells if cell.key(case) not in self.journal]

    def _reads(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Cell, bool]]:
        """The first cell of every protocol and length of which there is a cell to run."""
        for case in cases:
            wanted = {(cell.protocol, cell.length) for cell in self._open(case)}
            for protocol, length in sorted(wanted):
                alike = (c for c in self.cells if (c.protocol, c.length) == (protocol, length))
                cell = next(alike)
                if reads_key(case, cell) not in self.journal:
                    yield case, cell, True

    def _waves(self, llm: LLM, wanted: Iterator[tuple[Case, Cell, bool]]) -> Iterator[list[_Part]]:
        """Prepared parts, up to `WAVE_TOKENS` together. A case that is refused is left out."""
        wave: list[_Part] = []
        tokens = 0
        for case, cell, reads in wanted:
            if case.label in self._left_out:
                continue
            try:
                part = self._part(llm, case, cell, reads=reads)
            except RequestError as error:
                self._left_out.add(case.label)
                leave_out(self.args, case, error, self.skipped, case.label)
                continue
            size = sum(len(one.job.prompt) for one in part.asked)
            if wave and tokens + size > WAVE_TOKENS:
                yield wave
                wave, tokens = [], 0
            wave.append(part)
            tokens += size
        if wave:
            yield wave

    def _part(self, llm: LLM, case: Case, cell: Cell, *, reads: bool) -> _Part:
        jobs, most = self.texts.jobs(llm, cell), self.texts.answer(cell)
        if reads:
            first = replace(jobs[0], questions=jobs[0].questions[:1], queries=jobs[0].queries[:1])
            jobs, most = [first], min(most, READ_TOKENS)
        params = case.params(record=reads)
        asked = tuple(prepare(llm, job, params, most) for job in jobs)
        return _Part(case=case, cell=cell, asked=asked, reads=reads)

    def _answered(self, llm: LLM, wave: Sequence[_Part]) -> Iterator[tuple[_Part, list[Answers]]]:
        """Parts of which every answer is there, as they end."""
        owners = [part for part in wave for _ in part.asked]
        found: dict[int, dict[int, Answers]] = {id(part): {} for part in wave}
        asked = [one for part in wave for one in part.asked]
        for i, answers in ask(llm, asked):
            part, own = owners[i], found[id(owners[i])]
            own[i] = answers
            if len(own) < len(part.asked):
                continue
            errors = [a.error for a in own.values() if a.error is not None]
            if errors:
                what = f"{part.case.label}: {part.cell.label}{': bytes read' * part.reads}"
                self.skipped[what] = errors[0]
                note(f"{what}: left out: {errors[0]}")
            else:
                yield part, [own[k] for k in sorted(own)]


def reads_key(case: Case, cell: Cell) -> dict[str, Any]:
    """Where the journal has what a decode step reads: it is not a cell's key."""
    key = cell.key(case)
    del key["task"]
    return key


def _read(answers: Answers) -> float | None:
    """Bytes read by a decode step per token of the text, of an answer that was recorded."""
    reads = [] if answers.seen is None else answers.seen.bytes_read_per_step
    return sum(reads) / len(reads) / answers.tokens if reads else None
