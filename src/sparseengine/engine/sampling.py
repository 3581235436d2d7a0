"""From logits to tokens, with vLLM's semantics.

Order: allowed tokens, grammar, bad words, min_tokens, logit bias, penalties; then argmax for greedy
rows, and temperature, min_p, top_k, top_p, one draw for the others. Log-probabilities are those of
the model's raw distribution. A draw is the inverse CDF at one Philox number keyed by (seed, output
index), so it depends on nothing else in the batch; ties go to the larger logit, then to the smaller
token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseengine.cache.tensors import upload
from sparseengine.core.params import SamplingParams
from sparseengine.core.plan import Request
from sparseengine.engine.draw import NEG_INF, draw, knobs_of, truncates
from sparseengine.engine.faults import blame
from sparseengine.engine.outputs import Logprob, Logprobs, Sample
from sparseengine.engine.structured import Constraint

_WORD = 1 << 64
_NOT_FINITE = (
    "the model's logits are not finite (NaN or infinite). With dtype float16 the usual cause is an "
    "overflow beyond 65,504: run with bfloat16 or float32 (--dtype, dtype=). With other dtypes the "
    "weights are damaged or do not belong to the config"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingExtras:
    """What the tokenizer and the engine add to a request's params.

    Ids that end it, bad words, the way through a grammar (its own: siblings share none).
    """

    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None


Draws = Literal["greedy", "whole", "truncated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Tokens int64 [N] on the device, and what the host gets of them.

    flags: int64 [3, N] on the host once `ready`: tokens, whether a row was not finite, whether
    nothing was allowed. logits: kept when log-probabilities are wanted.
    """

    tokens: Tensor
    flags: Tensor
    ready: torch.cuda.Event | None
    logits: Tensor | None


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the output index alone."""
    bits = np.random.Philox(key=seed % _WORD, counter=[index, 0, 0, 0])
    return float(np.random.Generator(bits).random())


class Sampler:
    """Holds the extras of live requests, and the distinct prompt tokens that penalties need."""

    def __init__(self) -> None:
        self._extras: dict[int, SamplingExtras] = {}
        self._prompt_ids: dict[int, NDArray[np.int64]] = {}

    def add(self, request: Request, extras: SamplingExtras) -> None:
        self._extras[request.id] = extras

    def forget(self, request_id: int) -> None:
        self._extras.pop(request_id, None)
        self._prompt_ids.pop(request_id, None)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[Sample]:
        """One sample per row of `logits` [N, V] fp32, which is left unchanged."""
        return self.collect(self.draw(logits, requests), requests)

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Drawn:
        """Tokens of rows of logits, without waiting for the device."""
        top = logits.amax(-1)
        work = logits
        touched = [i for i, r in enumerate(requests) if self._changes_logits(r)]
        if touched:
            work = logits.clone()
            for i in touched:
                try:
                    self._process(work[i], requests[i])
                except Exception as error:
                    blame(error, (requests[i].id,))
                    raise
        params = [r.sampling for r in requests]
        if all(p.greedy for p in params):
            tokens = work.argmax(-1)
        else:
            knobs = upload(self.knobs(requests), logits.device)
            tokens = draw(work, knobs, truncate=any(map(truncates, params)))
        best = work.amax(-1) if touched else top
        wanted = any(p.logprobs is not None for p in params)
        return _drawn(tokens, top, best, logits if wanted else None)

    def take(self, tokens: Tensor, logits: Tensor, rows: Sequence[int]) -> Drawn:
        """The same from tokens int64 [S] that a captured step has found and the largest logits
        fp32 [S]."""
        if list(rows) != list(range(tokens.shape[0])):
            at = upload(np.array(rows, np.int64), tokens.device)
            tokens, logits = tokens[at], logits[at]
        return _drawn(tokens.clone(), logits, logits, None)

    def collect(self, drawn: Drawn, requests: Sequence[Request]) -> list[Sample]:
        """Samples of what was drawn; waits for the device.

        A row that held NaN or +inf, or in which nothing was allowed, yields an error.
        """
        if drawn.ready is not None:
            drawn.ready.synchronize()
        host, errors, empty = drawn.flags.tolist()
        logprobs: list[Logprobs | None] = [None] * len(requests)
        if drawn.logits is not None:
            logprobs = self._logprobs(drawn.logits, host, requests, errors)
        found = [_result(host[i], logprobs[i], errors[i], empty[i]) for i in range(len(requests))]
        for i, request in enumerate(requests):
            extras = self._extras.get(request.id)
            if extras is not None and extras.constraint is not None and extras.constraint.error:
                found[i] = Sample(error=extras.constraint.error)
        return found

    def knobs(self, requests: Sequence[Request]) -> NDArray[np.float64]:
        """`knobs_of` for one token of each request."""
        numbers = [
            0.0
            if r.sampling.greedy
            else uniform(self._extras.get(r.id, SamplingExtras()).seed, r.num_generated)
            for r in requests
        ]
        return knobs_of([r.sampling for r in requests], numbers)

    def draws(self, requests: Sequence[Request]) -> Draws | None:
        """What a captured step has to do to sample these; None when it cannot."""
        if any(r.sampling.logprobs is not None or self._changes_logits(r) for r in requests):
            return None
        if any(truncates(r.sampling) for r in requests):
            return "truncated"
        return "greedy" if all(r.sampling.greedy for r in requests) else "whole"

    def needs_last(self, request: Request) -> bool:
        """Whether sampling a token, or reporting it, needs the one before it on the host."""
        p = request.sampling
        return bool(
            p.logprobs is not None
            or p.structured_outputs is not None
            or p.repetition_penalty != 1.0
            or p.presence_penalty
            or p.frequency_penalty
            or p.bad_words
        )

    # ── logits processors ─────────────────────────────────────────────────────────────────────────

    def _changes_logits(self, request: Request) -> bool:
        p = request.sampling
        return bool(
            p.allowed_token_ids is not None
            or p.structured_outputs is not None
            or p.logit_bias
            or p.repetition_penalty != 1.0
            or p.presence_penalty
            or p.frequency_penalty
            or p.bad_words
            or request.num_generated < p.min_tokens
        )

    def _process(self, row: Tensor, request: Request) -> None:
        """Change one row [V] in place."""
        p = request.sampling
        extras = self._extras.get(request.id, SamplingExtras())
        if p.allowed_token_ids is not None:
            allowed = _ids(p.allowed_token_ids, row)
            kept = row[allowed].clone()
            row.fill_(NEG_INF)
            row[allowed] = kept
        is_over = extras.constraint is not None and extras.constraint.mask(row, request)
        banned = _banned(request, extras.bad_words)
        if request.num_generated < p.min_tokens and not is_over:
            banned |= extras.stop_ids
        if banned:
            row[_ids(sorted(banned), row)] = NEG_INF
        if p.logit_bias:
            bias = torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
            row[_ids(tuple(p.logit_bias), row)] += bias
        self._penalise(row, request, p)

    def _penalise(self, row: Tensor, request: Request, p: SamplingParams) -> None:
        if p.repetition_penalty == 1.0 and not p.presence_penalty and not p.frequency_penalty:
            return
        output = np.asarray(request.tokens[request.prompt_len :], dtype=np.int64)
        ids, counts = np.unique(output, return_counts=True)
        if p.repetition_penalty != 1.0:
            both = torch.from_numpy(np.union1d(self._prompt(request), ids)).to(row.device)
            value = row[both]
            r = p.repetition_penalty
            row[both] = torch.where(value > 0, value / r, value * r)
        if len(ids):
            seen = torch.from_numpy(ids).to(row.device)
            times = torch.from_numpy(counts).to(row.device, row.dtype)
            row[seen] -= p.frequency_penalty * times + p.presence_penalty

    def _prompt(self, request: Request) -> NDArray[np.int64]:
        if request.id not in self._prompt_ids:
            prompt = np.asarray(request.tokens[: request.prompt_len], dtype=np.int64)
            self._prompt_ids[request.id] = np.unique(prompt)
        return self._prompt_ids[request.id]

    # ── log-probabilities ─────────────────────────────────────────────────────────────────────────

    @staticmethod
    def _logprobs(
        logits: Tensor, tokens: list[int], requests: Sequence[Request], errors: list[int]
    ) -> list[Logprobs | None]:
        found: list[Logprobs | None] = [None] * len(requests)
        rows = [
            i for i, r in enumerate(requests) if r.sampling.logprobs is not None and not errors[i]
        ]
        if rows:
            counts = [requests[i].sampling.logprobs or 0 for i in rows]
            ids = [tokens[i] for i in rows]
            for i, value in zip(rows, top_logprobs(logits[rows], ids, counts), strict=True):
                found[i] = value
        return found


def top_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Per row of `logits` [N, V]: the given token first, then the `counts[i]` likeliest.

    Ranks count from 1: how many tokens are at least as likely, as vLLM counts them.
    """
    logprobs = torch.log_softmax(logits.float(), -1)
    given = torch.tensor(tokens, device=logits.device)[:, None]
    value = logprobs.gather(1, given)
    ranks = (logprobs >= value).sum(-1).tolist()
    found = []
    for i, (token, own) in enumerate(zip(tokens, value.squeeze(1).tolist(), strict=True)):
        row: Logprobs = {token: Logprob(own, ranks[i])}
        if counts[i]:
            ids = _largest(logprobs[i], counts[i])
            best = logprobs[i][ids].tolist()
            for rank, (other, value_) in enumerate(zip(ids.tolist(), best, strict=True), 1):
                row.setdefault(other, Logprob(value_, rank))
        found.append(row)
    return found


def _drawn(tokens: Tensor, top: Tensor, best: Tensor, logits: Tensor | None) -> Drawn:
    """Start copying tokens [N] and errors to the host. top, best: largest raw and allowed logit."""
    flags = torch.stack((tokens, (~torch.isfinite(top)).long(), (best == NEG_INF).long()))
    ready = None
    if flags.is_cuda:
        flags = flags.to("cpu", non_blocking=True)  # into pinned memory
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return Drawn(tokens=tokens, flags=flags, ready=ready, logits=logits)


def _result(token: int, logprobs: Logprobs | None, is_bad: int, is_empty: int) -> Sample:
    if is_bad:
        return Sample(error=_NOT_FINITE)
    if is_empty:
        return Sample(
            error="no token is allowed: structured_outputs, allowed_token_ids, bad_words, "
            "logit_bias and min_tokens leave nothing"
        )
    return Sample(token=token, logprobs=logprobs)


def _ids(ids: Sequence[int], row: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=row.device)


def _banned(request: Request, words: Sequence[tuple[int, ...]]) -> set[int]:
    """Last tokens of bad words whose other tokens end the generated text."""
    output = request.tokens[request.prompt_len :] if words else []
    banned = set()
    for word in words:
        head = word[:-1]
        if len(head) <= len(output) and tuple(output[len(output) - len(head) :]) == head:
            banned.add(word[-1])
    return banned


def _largest(row: Tensor, k: int) -> Tensor:
    """Indices of the k largest entries of a row [V]: larger first, then smaller index.

    `torch.topk` is quick but breaks ties anyhow, so it only finds the threshold.
    """
    if k >= row.shape[0]:
        return torch.sort(row, descending=True, stable=True).indices
    threshold = torch.topk(row, k).values[-1]
    near = (row >= threshold).nonzero().squeeze(-1)
    return near[torch.sort(row[near], descending=True, stable=True).indices[:k]]
