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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseengine.core.params import SamplingParams
from sparseengine.core.plan import Request
from sparseengine.engine.faults import blame
from sparseengine.engine.outputs import Logprob, Logprobs, Sample
from sparseengine.engine.structured import Constraint

_WORD = 1 << 64
NEG_INF = float("-inf")
_NUCLEUS = 512  # tokens ranked at first for top_p
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
        """One sample per row of `logits` [N, V] fp32, which is left unchanged.

        A row that holds NaN or +inf, or in which nothing is allowed, yields an error.
        """
        top = logits.amax(-1)
        bad = ~torch.isfinite(top)
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
        tokens = work.argmax(-1)
        drawn = [i for i, r in enumerate(requests) if not r.sampling.greedy]
        if drawn:
            tokens[drawn] = self._draw(work[drawn], [requests[i] for i in drawn])
        best = work.amax(-1) if touched else top
        flags = torch.stack((tokens, bad.long(), (best == NEG_INF).long()))
        host, errors, empty = flags.tolist()  # the step's only wait for the device
        logprobs = self._logprobs(logits, host, requests, errors)
        return [_result(host[i], logprobs[i], errors[i], empty[i]) for i in range(len(requests))]

    def needs_logits(self, requests: Sequence[Request]) -> bool:
        """Whether greedy tokens alone would not do."""
        return any(
            not r.sampling.greedy or r.sampling.logprobs is not None or self._changes_logits(r)
            for r in requests
        )

    def take(self, tokens: Tensor, logits: Tensor, rows: Sequence[int]) -> list[Sample]:
        """Samples of some rows from greedy tokens int64 [S] and their logits fp32 [S]."""
        flags = torch.stack((tokens, (~torch.isfinite(logits)).long()))
        host, errors = flags.tolist()  # the step's only wait for the device
        return [_result(host[i], None, errors[i], 0) for i in rows]

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

    # ── drawing ───────────────────────────────────────────────────────────────────────────────────

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Tokens [N] drawn from rows [N, V]."""
        params = [r.sampling for r in requests]
        device = logits.device
        heat = torch.tensor([p.temperature for p in params], device=device)
        scaled = logits / heat[:, None]
        scaled -= scaled.amax(-1, keepdim=True)  # tiny temperatures must not overflow
        min_p = [i for i, p in enumerate(params) if p.min_p > 0]
        for i in min_p:
            scaled[i][scaled[i].exp() < params[i].min_p] = NEG_INF
        for i, p in enumerate(params):
            k = p.top_k if 0 < p.top_k < logits.shape[-1] else 0
            if k or p.top_p < 1.0:
                scaled[i] = _truncate(scaled[i], k, p.top_p)
        numbers = [
            uniform(self._extras.get(r.id, SamplingExtras()).seed, r.num_generated)
            for r in requests
        ]
        cdf = scaled.double().exp().cumsum(-1)  # [N, V]
        u = torch.tensor(numbers, dtype=torch.float64, device=device)
        total = cdf[:, -1]
        target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)
        return token.clamp_(max=logits.shape[-1] - 1)  # only a row of NaN gets there

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


def _truncate(row: Tensor, top_k: int, top_p: float) -> Tensor:
    """Mask a row [V], whose maximum is 0, to its `top_k` largest, then to their nucleus `top_p`."""
    order = _largest(row, top_k or min(_NUCLEUS, row.shape[0]))
    if top_p < 1.0:
        weight = row[order].double().exp()
        total = weight.sum() if top_k else row.double().exp().sum()
        if not top_k and weight.sum() < top_p * total:  # a flat distribution: rank all of it
            order = _largest(row, row.shape[0])
            weight = row[order].double().exp()
        before = weight.cumsum(0) - weight
        order = order[before < top_p * total]
    kept = torch.full_like(row, NEG_INF)
    kept[order] = row[order]
    return kept
