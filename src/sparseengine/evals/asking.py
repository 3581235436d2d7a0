"""Putting questions to a model about a text that a method compresses, in three protocols.

    query_aware     the question is part of the prompt: the method has seen it
    query_agnostic  the prompt is the text alone; when it has been compressed, the question follows
    multi_question  the same with several questions, each on a fork of the one compressed text

In the last two the question's tokens are decode steps with given tokens on the cache that the
method left, so that selections act on them too, and methods that evict while decoding go on with
it. The text and the question are tokenised apart in every protocol, so all see the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError
from sparseengine.evals.tasks import Query

if TYPE_CHECKING:
    from sparseengine.engine.outputs import RequestOutput
    from sparseengine.engine.record import SparseOutput
    from sparseengine.llm import LLM

QUERY_AWARE, QUERY_AGNOSTIC, MULTI_QUESTION = "query_aware", "query_agnostic", "multi_question"
PROTOCOLS = (QUERY_AWARE, QUERY_AGNOSTIC, MULTI_QUESTION)
_MARK = "\ue000question\ue000"  # private characters: no text holds them


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt, the tokens of each question behind it (none: it ends with its only question)."""

    prompt: list[int]
    questions: tuple[list[int], ...]
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answer to each question of a job, and what was recorded of the first one.

    tokens: stored at the end of the first answer by a method that drops nothing.
    """

    texts: list[str]
    tokens: int
    seen: SparseOutput | None


def split_prompt(llm: LLM, context: str, query: Query) -> tuple[list[int], list[int]]:
    """Token ids up to the end of the context, and from there to the beginning of the answer."""
    tokenizer: Any = llm.tokenizer
    if getattr(tokenizer, "chat_template", None):
        content = f"{context}{_MARK}{query.question}"
        text = llm.render_chat([{"role": "user", "content": content}])
        head, tail = text.split(_MARK)
        tail = f"\n\n{tail}{query.cue}"
    else:
        head, tail = context, f"\n\n{query.question}\n{query.cue}"
    before = list(tokenizer.encode(head, add_special_tokens=False, verbose=False))
    bos = tokenizer.bos_token_id
    if bos is not None and before[:1] != [bos] and list(tokenizer.encode(""))[:1] == [bos]:
        before.insert(0, bos)
    return before, list(tokenizer.encode(tail, add_special_tokens=False))


def make_job(llm: LLM, protocol: str, context: str, queries: Sequence[Query]) -> Job:
    """The prompt and what follows it. All questions stand behind the same tokens."""
    parts = [split_prompt(llm, context, query) for query in queries]
    if protocol == QUERY_AWARE:
        head, tail = parts[0]
        return Job(prompt=head + tail, questions=([],), queries=tuple(queries[:1]))
    return Job(
        prompt=parts[0][0], questions=tuple(tail for _, tail in parts), queries=tuple(queries)
    )


def ask(
    llm: LLM, jobs: Sequence[Job], sparse: Sequence[SparseParams], answer_tokens: int
) -> list[Answers]:
    """Greedy answers of at most `answer_tokens`; one that holds all it should ends there."""
    from sparseengine.evals.forced import ForcedSampler, drive

    engine, sampler = llm.engine, ForcedSampler()
    eos = next(iter(engine.intake.eos_ids), None)
    submissions = []
    for job, params in zip(jobs, sparse, strict=True):
        longest = max(map(len, job.questions))
        sampling = SamplingParams(
            n=len(job.questions),
            temperature=0.0,
            max_tokens=longest + answer_tokens,
            min_tokens=longest + 1,  # a question may hold the token that ends an answer
            detokenize=False,
        )
        submission = engine.prepare(job.prompt, sampling, params)
        if submission.requests[0].max_tokens < longest + answer_tokens:
            raise ConfigError(
                f"a prompt of {len(job.prompt)} tokens leaves no room for {longest} of a question "
                f"and {answer_tokens} of an answer in max_model_len={engine.intake.max_model_len}; "
                "lower --lengths"
            )
        for request, tail, query in zip(
            submission.requests, job.questions, job.queries, strict=True
        ):
            sampler.force(request, tail)
            if eos is not None:
                sampler.end_when(request, eos, _is_complete(llm, query))
        submissions.append(submission)
    outputs = drive(llm, sampler, submissions)
    pairs = zip(jobs, outputs, strict=True)
    return [_answers(llm, job, output, answer_tokens) for job, output in pairs]


def _is_complete(llm: LLM, query: Query) -> Callable[[Sequence[int]], bool]:
    def is_complete(tokens: Sequence[int]) -> bool:
        text: str = llm.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return query.score(text) == 1.0

    return is_complete


def _answers(llm: LLM, job: Job, output: RequestOutput, answer_tokens: int) -> Answers:
    texts = []
    for completion, tail in zip(output.outputs, job.questions, strict=True):
        if completion.finish_reason == "error":
            raise ConfigError(f"a run ended early: {completion.stop_reason}")
        own = completion.token_ids[len(tail) : len(tail) + answer_tokens]
        texts.append(llm.tokenizer.decode(own, skip_special_tokens=True))
    first = output.outputs[0]
    # the last token was sampled, but never run
    stored = len(job.prompt) + len(first.token_ids) - 1
    return Answers(texts=texts, tokens=stored, seen=first.sparse)
