"""Putting questions to a model about a text that a method compresses, in three protocols.

    query_aware     the question is part of the prompt: the method has seen it
    query_agnostic  the prompt is the text alone; when it has been compressed, the question follows
    multi_question  the same with several questions, each on a fork of the one compressed text

In the last two the question's tokens are decode steps with given tokens on the cache that the
method left, so that selections act on them too, and methods that evict while decoding go on with
it. The text and the question are tokenised apart in every protocol, so all see the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError
from sparseengine.evals.tasks import Query

if TYPE_CHECKING:
    from sparseengine.engine.intake import Submission
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
class Asked:
    """A job and a method for its prompt, checked and ready to run."""

    job: Job
    answer_tokens: int
    submission: Submission

    @property
    def budget(self) -> int | None:
        """In tokens."""
        return self.submission.requests[0].budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answer to each question of a job, unless there was an `error`: then there are none.

    kv_bytes: held at the end of an answer; tokens: what a method that drops nothing would hold
    there; both are means over the answers. seen: the first answer's record, where one was asked
    for.
    """

    texts: list[str]
    tokens: float = 0.0
    kv_bytes: float = 0.0
    seen: SparseOutput | None = None
    error: str | None = None


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


def prepare(llm: LLM, job: Job, params: SparseParams, answer_tokens: int) -> Asked:
    """Raises `RequestError` if the method or its budget is refused, `ConfigError` for a length."""
    longest = max(map(len, job.questions))
    sampling = SamplingParams(
        n=len(job.questions),
        temperature=0.0,
        max_tokens=longest + answer_tokens,
        min_tokens=longest + 1,  # a question may hold the token that ends an answer
        detokenize=False,
    )
    submission = llm.engine.prepare(job.prompt, sampling, params)
    if submission.requests[0].max_tokens < longest + answer_tokens:
        raise ConfigError(
            f"a prompt of {len(job.prompt)} tokens leaves no room for {longest} of a question "
            f"and {answer_tokens} of an answer in max_model_len={llm.engine.intake.max_model_len}; "
            "lower --lengths"
        )
    return Asked(job=job, answer_tokens=answer_tokens, submission=submission)


def ask(llm: LLM, asked: Sequence[Asked]) -> Iterator[tuple[int, Answers]]:
    """(index, its answers), all asked at once, in the order in which they end.

    Greedy, of at most `answer_tokens`; an answer that holds all it should ends there.
    """
    from sparseengine.evals.forced import ForcedSampler, drive

    sampler = ForcedSampler()
    eos = next(iter(llm.engine.intake.eos_ids), None)
    for one in asked:
        job = one.job
        for request, tail, query in zip(
            one.submission.requests, job.questions, job.queries, strict=True
        ):
            sampler.force(request, tail)
            if eos is not None:
                sampler.end_when(request, eos, _is_complete(llm, query))
    places = {one.submission.request_id: i for i, one in enumerate(asked)}
    for output in drive(llm, sampler, [one.submission for one in asked]):
        i = places[output.request_id]
        yield i, _answers(llm, asked[i], output)


def _is_complete(llm: LLM, query: Query) -> Callable[[Sequence[int]], bool]:
    def is_complete(tokens: Sequence[int]) -> bool:
        text: str = llm.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return query.score(text) == 1.0

    return is_complete


def _answers(llm: LLM, asked: Asked, output: RequestOutput) -> Answers:
    from sparseengine.engine.record import token_bytes

    failed = [c for c in output.outputs if c.finish_reason == "error"]
    if failed:
        return Answers(texts=[], error=str(failed[0].stop_reason))
    texts = []
    for completion, tail in zip(output.outputs, asked.job.questions, strict=True):
        own = completion.token_ids[len(tail) : len(tail) + asked.answer_tokens]
        texts.append(llm.tokenizer.decode(own, skip_special_tokens=True))
    metrics, number = output.metrics, len(output.outputs)
    assert metrics is not None, "the engine measures every request"
    return Answers(
        texts=texts,
        tokens=metrics.dense_kv_bytes / token_bytes(llm.resolved.spec) / number,
        kv_bytes=metrics.kv_bytes / number,
        seen=output.outputs[0].sparse,
    )
