"""Runs a model over the real cache, controller and a backend, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
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
    """One request of a model, dense, over head pages."""

    def __init__(self, model: str | Path, *, max_tokens: int, backend: str = "reference") -> None:
        source = open_model(ModelConfig(model=str(model)))
        self.spec = model_spec(source.hf_config, torch.float32)
        self.model = load_model(source, self.spec)
        method = make_method("full", {}, self.spec)
        groups = merge_plans(self.spec, [method.cache_plan()])
        self.cache = PagedCache(
            self.spec, groups, num_pages=-(-max_tokens // 16) * len(self.spec.layers), poison=True
        )
        self.controller = Controller(self.spec, self.cache, {"full": method})
        backends = (BACKENDS.get(backend)(),) * len(self.spec.layers)
        self.runner = Runner(
            self.model, self.spec, self.cache, self.controller, backends, torch.device("cpu")
        )
        self.request = Request(id=0, tokens=[], prompt_len=0, max_tokens=max_tokens)
        self.cache.admit(self.request, PrefixHit())

    @torch.inference_mode()
    def feed(self, ids: Sequence[int], purpose: Purpose = Purpose.PREFILL) -> Tensor:
        """Run these tokens as one chunk; logits [T, vocab] of all of them."""
        request = self.request
        start = len(request.tokens)
        request.tokens.extend(ids)
        if purpose is Purpose.PREFILL:
            request.prompt_len = len(request.tokens)
        chunk = Chunk(request, tuple(ids), start, purpose, True)
        plan = StepPlan((chunk,))
        self.cache.reserve(plan)
        logits: Tensor = self.model.logits(self.runner.forward(plan))
        self.controller.end_step(plan)
        self.cache.check()
        return logits


def paged_logits(folder: Path, ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Logits of the whole prompt, run in chunks of these sizes."""
    assert sum(sizes) == len(ids)
    run, out, start = PagedRun(folder, max_tokens=len(ids)), [], 0
    for size in sizes:
        out.append(run.feed(ids[start : start + size]))
        start += size
    return torch.cat(out)
