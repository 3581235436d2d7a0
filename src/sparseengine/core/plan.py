"""What one engine step does: requests, chunks, plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple, get_args

from sparseengine.core.params import DENSE_PREFILL, SamplingParams, SparseParams

UNKNOWN = -1  # a token that a step under way is about to sample; the device alone knows it


MissReason = Literal[
    "cold",  # nothing like it was stored
    "diverged",  # what is stored goes on differently from position `at`
    "evicted",  # it was stored, up to `at`, and made room for others
    "below_page",  # less than a page is the same, or can be
    "window",  # its window layers or states are those of a later position only
    "fingerprint",  # its rows are not those of a dense prompt: `detail` names what differs
    "bypassed",  # the request asks for what only running the prompt gives: `detail`
]
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)


class Miss(NamedTuple):
    """Why not all of a prompt's reusable tokens were found stored.

    detail: what is meant, or the text around `at`.
    """

    reason: MissReason
    at: int | None = None
    detail: str = ""


class Purpose(Enum):
    """Why a chunk runs. REPLAY chunks are observed and never retained."""

    PREFILL = auto()
    DECODE = auto()
    REPLAY = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One generation job. Owns its tokens and counters; mutated by the scheduler alone.

    `tokens` is prompt + generated; the last one may be UNKNOWN. `computed` counts positions already
    run; after a preemption it restarts at 0 and the tokens are run again. `budget` is the resolved
    tokens per row (None: the method takes none). `method` and `prefill` are the keys under which
    the controller finds the instances. Chunks of the prompt end at multiples of `align` where the
    budget of a step allows. `salt`: rows are shared with requests of the same salt.
    `cached`: tokens of it that were found stored when it was first admitted, and `miss` why not
    more. `saved`: tokens that it began with as an eviction of its method had left them: what
    follows them in the prompt is kept whole, as what is generated is. `parent` is the id of the
    request whose prompt rows an n > 1 sibling forks.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sparse: SparseParams = field(default_factory=SparseParams)
    method: str = "full"
    budget: int | None = None
    computed: int = 0
    arrival: int = 0
    parent: int | None = None
    prefill: str = DENSE_PREFILL
    align: int = 1
    salt: str = ""
    cached: int | None = None
    miss: Miss | None = None
    saved: int = 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def outgrows_budget(self) -> bool:
        """Whether it can have more tokens than its budget."""
        return self.budget is not None and self.prompt_len + self.max_tokens > self.budget

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.prompt_len


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one request that runs in this step; a decode is a chunk of one token.

    `start` is the position of tokens[0], not the row length, which eviction shortens. A chunk never
    straddles the prompt's end. `samples`: the last token's logits are wanted. A DECODE chunk with
    samples=False re-runs an already known token after a preemption. `forks`: n > 1 siblings that
    sample from the same logits and fork the request's rows once the step has ended.
    """

    request: Request
    tokens: tuple[int, ...]
    start: int
    purpose: Purpose
    samples: bool
    forks: tuple[Request, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def ends_prompt(self) -> bool:
        """True for the chunk that holds the prompt's last token: where prefill methods evict."""
        return self.purpose is Purpose.PREFILL and self.stop == self.request.prompt_len


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks of one step, DECODE chunks first, and the ids preempted to make room for them."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def num_decodes(self) -> int:
        return sum(c.purpose is Purpose.DECODE for c in self.chunks)


class Demand(NamedTuple):
    """The only thing the scheduler learns about a method: tokens per row, averaged over rows.

    Rows of WINDOW layers that the method does not act on are left out: the cache knows their bound.
    `peak_tokens`: the worst moment (prefill, before eviction). `steady_tokens`: while decoding,
    including every token generated up to max_tokens.
    """

    peak_tokens: int
    steady_tokens: int
