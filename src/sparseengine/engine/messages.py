"""What an engine's owner and the engine say to each other. All of it is plain, picklable data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Miss
from sparseengine.engine.outputs import FinishReason, Logprobs, RequestMetrics
from sparseengine.engine.record import SparseOutput

# ── to the engine ─────────────────────────────────────────────────────────────────────────────────


class Add(NamedTuple):
    """Queue a prompt. `key` is the owner's own, unique id."""

    key: int
    tokens: NDArray[np.int64]
    sampling: SamplingParams
    sparse: SparseParams | None
    cache_salt: str = ""


class Abort(NamedTuple):
    key: int


class Call(NamedTuple):
    """Run one of the engine's named actions between two steps; `Reply` brings its result."""

    key: int
    name: str


class Stop(NamedTuple):
    """Leave the loop; what still runs is dropped."""


# ── from the engine ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine serves. memory_text: the start-up table for people."""

    model: str
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    vocab_size: int
    methods: tuple[str, ...]
    prefill: str  # the pattern of requests that name none
    prefill_config: dict[str, Any]
    device: str
    memory: dict[str, Any]
    memory_text: str
    explained: dict[str, Any]


class Ready(NamedTuple):
    info: EngineInfo


class Failed(NamedTuple):
    """The engine did not start, or the device is lost."""

    message: str
    is_config: bool


class Accepted(NamedTuple):
    """A prompt passed the engine's checks and is queued."""

    key: int


class Rejected(NamedTuple):
    """A prompt was not taken; `kind` says whether it can never fit."""

    key: int
    message: str
    kind: Literal["request", "capacity", "error"]
    param: str | None = None


class Delta(NamedTuple):
    """What one completion gained in a step. The last one has a finish reason.

    prompt_logprobs come with the request's first delta, metrics with its last one. sparse: of a
    request that records, with the entries that are new (`SparseOutput.added_to` adds them up).
    """

    key: int
    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    cache_miss: Miss | None = None
    metrics: RequestMetrics | None = None
    sparse: SparseOutput | None = None
    is_last: bool = False  # the request's last delta


class News(NamedTuple):
    """The deltas of one step, and when it ended (monotonic seconds)."""

    at: float
    deltas: list[Delta]


class Beat(NamedTuple):
    """The loop goes round: counters and gauges by name."""

    metrics: dict[str, float]
    methods: dict[str, float]  # bytes freed by requests that ended, by method


class Reply(NamedTuple):
    key: int
    value: Any
    error: str | None
