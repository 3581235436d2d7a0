"""Runs one planned step on the device: forward, logits of the rows that need them, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sparseengine.core.attention import AttentionBackend
from sparseengine.core.cache import CacheManager
from sparseengine.core.context import StepContext
from sparseengine.core.method import SparseController
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import ModelSpec
from sparseengine.engine.graphs import Best, DecodeGraphs
from sparseengine.engine.model import Model
from sparseengine.engine.outputs import Logprobs, Sample
from sparseengine.engine.sampling import Sampler, top_logprobs

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
        hidden, best = self._forward(plan)
        if best is None:
            self._note_prompt_logprobs(plan, hidden)
        rows: list[int] = []
        requests: list[Request] = []
        end = 0
        for chunk in plan.chunks:
            end += len(chunk.tokens)
            if chunk.samples:
                members = (chunk.request, *chunk.forks)
                requests.extend(members)
                rows.extend([end - 1] * len(members))
        if not rows:
            return {}
        if best is not None and not self.sampler.needs_logits(requests):
            samples = self.sampler.take(*best, rows)
        else:
            at = torch.tensor(rows, device=self.device)
            samples = self.sampler.sample(self.model.logits(hidden[at]), requests)
        found = {r.id: s for r, s in zip(requests, samples, strict=True)}
        for request in requests:
            if request.id in self._prompt_logprobs:
                noted = self._prompt_logprobs.pop(request.id)
                found[request.id] = replace(found[request.id], prompt_logprobs=noted)
        return found

    def _forward(self, plan: StepPlan) -> tuple[Tensor, Best | None]:
        """Hidden states, and greedy tokens where a captured graph has found them already."""
        key = None if self.graphs is None else self.graphs.key(plan)
        if self.graphs is None or key is None:
            return self.forward(plan), None
        self.num_replays += 1
        return self.graphs.run(plan, key)

    def forward(self, plan: StepPlan) -> Tensor:
        """One pass of the model over the plan's tokens: hidden states [T, hidden_size]."""
        for backend in self._distinct:
            backend.plan(plan, self.cache)
        ids = np.fromiter((t for c in plan.chunks for t in c.tokens), np.int64, plan.num_tokens)
        positions = np.concatenate(
            [np.arange(c.start, c.stop, dtype=np.int64) for c in plan.chunks]
        )
        prompts = np.fromiter((c.request.prompt_len for c in plan.chunks), np.int64)
        sizes = [len(c.tokens) for c in plan.chunks]
        lengths = np.maximum(positions + 1, np.repeat(prompts, sizes))
        to = self.device
        ctx = StepContext(
            plan,
            self.cache,
            self.controller,
            self.backends,
            self.spec,
            lengths=torch.from_numpy(lengths).to(to),
        )
        return self.model(torch.from_numpy(ids).to(to), torch.from_numpy(positions).to(to), ctx)

    def forget(self, request_id: int) -> None:
        self.sampler.forget(request_id)
        self._prompt_logprobs.pop(request_id, None)

    def _note_prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> None:
        """Row i of a prompt chunk predicts the prompt token behind it."""
        first = 0
        for chunk in plan.chunks:
            count = chunk.request.sampling.prompt_logprobs
            if count is not None and _is_first_prefill(chunk):
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
            first += len(chunk.tokens)


def _is_first_prefill(chunk: Chunk) -> bool:
    """A chunk of the prompt of a request that has not generated anything yet."""
    request = chunk.request
    is_prompt = chunk.purpose is Purpose.PREFILL and chunk.start < request.prompt_len
    return is_prompt and request.num_generated == 0
