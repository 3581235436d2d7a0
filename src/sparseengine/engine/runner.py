"""Runs one planned step on the device: forward, logits of the rows that need them, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sparseengine.cache.tensors import upload
from sparseengine.core.attention import AttentionBackend
from sparseengine.core.cache import CacheManager
from sparseengine.core.context import StepContext
from sparseengine.core.method import SparseController
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import ModelSpec
from sparseengine.core.view import Wanted
from sparseengine.engine.graphs import Best, DecodeGraphs
from sparseengine.engine.model import Model
from sparseengine.engine.outputs import Logprobs, Sample
from sparseengine.engine.pending import Pending, fill_unknown
from sparseengine.engine.sampling import Drawn, Sampler, top_logprobs

_LOGIT_ROWS = 256  # rows of prompt log-probabilities computed at a time: bounds [rows, vocab]


class Runner:
    """Turns a plan, whose pages are reserved, into samples. `backends` has one entry per layer."""

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        cache: CacheManager,
        controller: SparseController,
        backends: Sequence[AttentionBackend],
        device: torch.device,
    ) -> None:
        self.model = model
        self.spec = spec
        self.cache = cache
        self.controller = controller
        self.backends = tuple(backends)
        self.device = device
        self.sampler = Sampler()
        self.graphs: DecodeGraphs | None = None
        self.num_replays = 0
        self._distinct = tuple({id(b): b for b in self.backends}.values())
        self._prompt_logprobs: dict[int, list[Logprobs | None]] = {}

    def run(self, plan: StepPlan) -> dict[int, Sample]:
        """Samples by request id: of every chunk that samples, and of the siblings that fork it."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan, before: Pending | None = None) -> Pending:
        """Start a step; the host does not wait for its tokens.

        before: the step under way that samples the tokens which this plan does not know.
        """
        counts = self._counts(plan)
        hidden, best = self._forward(plan, before, counts)
        if best is None:
            self._note_prompt_logprobs(plan, counts, hidden)
        rows: list[int] = []
        requests: list[Request] = []
        for chunk, end in zip(plan.chunks, accumulate(counts), strict=True):
            if chunk.samples:
                members = (chunk.request, *chunk.forks)
                requests.extend(members)
                rows.extend([end - 1] * len(members))
        drawn: Drawn | None = None
        if rows and best is not None and self.sampler.draws(requests) is not None:
            drawn = self.sampler.take(*best, rows)
        elif rows:
            at = upload(np.array(rows, np.int64), self.device)
            drawn = self.sampler.draw(self.model.logits(hidden[at]), requests)
        return Pending(plan=plan, requests=requests, drawn=drawn)

    def collect(self, pending: Pending) -> dict[int, Sample]:
        """Samples by request id, once the device has them."""
        if pending.drawn is None:
            return {}
        samples = self.sampler.collect(pending.drawn, pending.requests)
        found = {r.id: s for r, s in zip(pending.requests, samples, strict=True)}
        for request in pending.requests:
            if request.id in self._prompt_logprobs:
                noted = self._prompt_logprobs.pop(request.id)
                found[request.id] = replace(found[request.id], prompt_logprobs=noted)
        return found

    def _counts(self, plan: StepPlan) -> list[int]:
        """How many of each chunk's newest tokens the hidden states are read of, at least one.

        Of prompts whose log-probabilities are asked for, all.
        """
        if plan.num_tokens > len(plan.chunks) and not self.controller.sees_output(plan):
            return [len(c.tokens) if _notes_logprobs(c) else 1 for c in plan.chunks]
        return [len(c.tokens) for c in plan.chunks]

    def _forward(
        self, plan: StepPlan, before: Pending | None, counts: Sequence[int]
    ) -> tuple[Tensor, Best | None]:
        """Hidden states, and tokens where a captured graph has sampled them already."""
        requests = [c.request for c in plan.chunks]
        draws = self.sampler.draws(requests) or "greedy"
        key = None if self.graphs is None else self.graphs.key(plan, draws)
        if self.graphs is None or key is None:
            return self.forward(plan, before, counts), None
        self.num_replays += 1
        knobs = None if draws == "greedy" else self.sampler.knobs(requests)
        return self.graphs.run(plan, key, before, knobs)

    def forward(
        self, plan: StepPlan, before: Pending | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """One pass of the model over the plan's tokens: hidden states [T, hidden_size].

        counts: only of so many newest tokens of each chunk.
        """
        for backend in self._distinct:
            backend.plan(plan, self.cache)
        ids = np.fromiter((t for c in plan.chunks for t in c.tokens), np.int64, plan.num_tokens)
        positions = np.concatenate(
            [np.arange(c.start, c.stop, dtype=np.int64) for c in plan.chunks]
        )
        prompts = np.fromiter((c.request.prompt_len for c in plan.chunks), np.int64)
        sizes = [len(c.tokens) for c in plan.chunks]
        lengths = np.maximum(positions + 1, np.repeat(prompts, sizes))
        tokens = upload(ids, self.device)
        fill_unknown(tokens, ids, plan, before)
        ctx = StepContext(
            plan,
            self.cache,
            self.controller,
            self.backends,
            self.spec,
            lengths=upload(lengths, self.device),
            wanted=None if counts is None else self._wanted(sizes, counts),
        )
        return self.model(tokens, upload(positions, self.device), ctx)

    def _wanted(self, sizes: Sequence[int], counts: Sequence[int]) -> Wanted | None:
        """The newest tokens of chunks of these sizes; None when they are all."""
        if sum(counts) == sum(sizes):
            return None
        ends = zip(accumulate(sizes), counts, strict=True)
        rows = np.concatenate([np.arange(end - n, end, dtype=np.int64) for end, n in ends])
        cu_q = np.fromiter(accumulate(counts, initial=0), np.int32)
        return Wanted(tuple(counts), *(upload(x, self.device) for x in (rows, cu_q)))

    def forget(self, request_id: int) -> None:
        self.sampler.forget(request_id)
        self._prompt_logprobs.pop(request_id, None)

    def _note_prompt_logprobs(self, plan: StepPlan, counts: Sequence[int], hidden: Tensor) -> None:
        """Row i of a prompt chunk predicts the prompt token behind it."""
        for chunk, first in zip(plan.chunks, accumulate(counts, initial=0), strict=False):
            count = chunk.request.sampling.prompt_logprobs
            if count is not None and _notes_logprobs(chunk):
                if chunk.start == 0:
                    self._prompt_logprobs[chunk.request.id] = [None]
                noted = self._prompt_logprobs[chunk.request.id]
                last = min(chunk.stop, chunk.request.prompt_len - 1)
                targets = chunk.request.tokens[chunk.start + 1 : last + 1]
                for i in range(0, len(targets), _LOGIT_ROWS):
                    some = targets[i : i + _LOGIT_ROWS]
                    at = slice(first + i, first + i + len(some))
                    logits = self.model.logits(hidden[at])
                    noted.extend(top_logprobs(logits, some, [count] * len(some)))


def _notes_logprobs(chunk: Chunk) -> bool:
    """Whether the prompt's log-probabilities are asked for and this is the first run of a part."""
    request = chunk.request
    is_prompt = chunk.purpose is Purpose.PREFILL and chunk.start < request.prompt_len
    is_asked = request.sampling.prompt_logprobs is not None
    return is_asked and is_prompt and request.num_generated == 0
