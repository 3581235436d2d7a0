"""What a request returns, with vLLM's attribute names, and the small records it is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sparseengine.core.plan import Miss
from sparseengine.engine.record import SparseOutput

FinishReason = Literal["stop", "length", "abort", "error"]


class Finish(NamedTuple):
    """Why a request ended. `stop_reason`: the stop string or token id, or an error's message."""

    reason: FinishReason
    stop_reason: int | str | None = None


class Logprob(NamedTuple):
    """Log-probability under the model's raw distribution; `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the runner found for one request in one step; `error` ends the request.

    prompt_logprobs: of all prompt tokens, with the first sample of a request that wants them.
    """

    token: int = -1
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Monotonic seconds, and what happened to the request.

    kv_bytes: what the rows of its completions held when they ended; dense_kv_bytes: what dense
    storage of the same tokens would have held.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    kv_bytes: int = 0
    dense_kv_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the n completions of a request.

    `token_ids` holds every token that was sampled, also those of which a stop string cut off text.
    `sparse` is filled with `SparseParams(record=True)` or `dropped_mass=True`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    sparse: SparseOutput | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's state so far: cumulative, as vLLM's.

    num_cached_tokens: of the prompt, found stored. cache_miss: why not more of them; None when all
    that could be were found, or nothing is looked up in this engine.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    cache_miss: Miss | None = None
    metrics: RequestMetrics | None = None
