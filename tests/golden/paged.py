"""Runs a model over the real cache, controller and a backend, without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparseengine.attention import BACKENDS
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.plan import merge_plans
from sparseengine.config import ModelConfig
from sparseengine.core.cache import PrefixHit
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.engine.controller import Controller
from sparseengine.engine.runner import Runner
from sparseengine.methods import make_method
from sparseengine.models import load_model, model_spec
from sparseengine.weights.source import open_model


class PagedRun:
    """Requests of a model, dense, over head pages. `prompts` holds their prompts' lengths.

    Without `prompts` there is one request, whose prompt grows by every chunk that is fed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_tokens: int,
        backend: str = "reference",
        prompts: Sequence[int] = (0,),
    ) -> None:
        source = open_model(ModelConfig(model=str(model)))
        self.spec = model_spec(source.hf_config, torch.float32)
        self.model = load_model(source, self.spec)
        method = make_method("full", {}, self.spec)
        groups = merge_plans(self.spec, [method.cache_plan()])
        num_pages = len(prompts) * -(-max_tokens // 16) * len(self.spec.layers)
        self.cache = PagedCache(self.spec, groups, num_pages=num_pages, poison=True)
        self.controller = Controller(self.spec, self.cache, {"full": method})
        backends = (BACKENDS.get(backend)(),) * len(self.spec.layers)
        self.runner = Runner(
            self.model, self.spec, self.cache, self.controller, backends, torch.device("cpu")
        )
        self.requests = [
            Request(id=i, tokens=[], prompt_len=n, max_tokens=max_tokens)
            for i, n in enumerate(prompts)
        ]
        for request in self.requests:
            self.cache.admit(request, PrefixHit())

    def feed(self, ids: Sequence[int], purpose: Purpose = Purpose.PREFILL) -> Tensor:
        """Run these tokens of the first request as one chunk; logits [T, vocab] of all of them."""
        return self.step({0: ids}, purpose)[0]

    @torch.inference_mode()
    def step(
        self, chunks: Mapping[int, Sequence[int]], purpose: Purpose | None = None
    ) -> list[Tensor]:
        """One step with a chunk for some requests; each chunk's logits [T, vocab]."""
        return [self.model.logits(hidden) for hidden in self.hidden(chunks, purpose)]

    @torch.inference_mode()
    def hidden(
        self,
        chunks: Mapping[int, Sequence[int]],
        purpose: Purpose | None = None,
        counts: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """One step with a chunk for some requests; each chunk's hidden states [T, hidden].

        Tokens after a request's prompt are decodes, one to a chunk, and come first in the step.
        counts: of so many newest tokens of each chunk only.
        """
        planned = []
        for number, ids in chunks.items():
            request, start = self.requests[number], len(self.requests[number].tokens)
            request.tokens.extend(ids)
            kind = purpose or (Purpose.PREFILL if start < request.prompt_len else Purpose.DECODE)
            if kind is Purpose.PREFILL:
                request.prompt_len = max(request.prompt_len, len(request.tokens))
            planned.append(Chunk(request, tuple(ids), start, kind, True))
        plan = StepPlan(tuple(planned))
        self.cache.reserve(plan)
        hidden = self.runner.forward(plan, counts=counts)
        self.controller.end_step(plan)
        self.cache.check()
        return list(torch.split(hidden, counts or [len(chunk.tokens) for chunk in planned]))


def paged_logits(
    folder: Path, ids: Sequence[int], sizes: Sequence[int], backend: str = "reference"
) -> Tensor:
    """Logits of a prompt that is run in chunks of these sizes."""
    assert sum(sizes) == len(ids)
    run = PagedRun(folder, max_tokens=len(ids), backend=backend, prompts=(len(ids),))
    out, start = [], 0
    for size in sizes:
        out.append(run.feed(ids[start : start + size], Purpose.PREFILL))
        start += size
    return torch.cat(out)
