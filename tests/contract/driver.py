"""Runs methods on the real cache and controller with step plans that a test spells out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from contract.toy import Toy
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.plan import merge_plans
from sparseengine.core.context import StepContext
from sparseengine.core.method import SparseMethod
from sparseengine.core.params import SparseParams
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.prefill import PrefillPattern
from sparseengine.core.specs import LayerSpec, ModelSpec
from sparseengine.core.view import AttentionView
from sparseengine.engine.controller import Controller
from sparseengine.methods import make_method

PAGE = 4
PLAIN = SparseParams()
POSITIONS = 2048  # channel 0 of a key is its position divided by this: exact in fp32


class Reads(ReferenceBackend):
    """Decodes each view into positions, which channel 0 of every key must carry (`reads.mark`).

    log[i] of the i-th call is [span][kv head] -> positions read, in row order.
    """

    def __init__(self, *, attend: bool = True) -> None:
        self.log: list[list[list[list[int]]]] = []
        self.attend = attend  # False: outputs are zeros, for tests that look at decisions only

    def run(
        self, q: Tensor, view: AttentionView, layer: LayerSpec, scores: Tensor | None
    ) -> Tensor:
        spans = []
        for s in range(len(view.cu_q) - 1):
            spans.append([self._row(view, s, h) for h in range(layer.kv_heads)])
        self.log.append(spans)
        if not self.attend:
            return q.new_zeros(len(q), layer.q_heads, layer.value_dim)
        return super().run(q, view, layer, scores)

    @staticmethod
    def _row(view: AttentionView, span: int, head: int) -> list[int]:
        out: list[int] = []
        for segment in view.segments:
            pool = segment.payload[0][0]  # [N, Hs, P, D]
            group = head if segment.table.shape[1] > 1 else 0
            inner = head if pool.shape[1] > 1 else 0
            keys = pool[segment.table[span, group].long(), inner].flatten(0, 1)  # [W * P, D]
            marks = keys[: int(segment.lens[span, group]), 0].double() * POSITIONS
            out += marks.round().long().tolist()
        return out


def make(model: ModelSpec, name: str, page_size: int = PAGE, **knobs: Any) -> SparseMethod:
    return make_method(name, knobs, model, page_size=page_size)


class Driver:
    """A model on a real cache and controller, without a scheduler.

    `methods` and `patterns` map keys that requests carry to instances; `model` is called like an
    engine's.
    """

    def __init__(
        self,
        model: Any,
        methods: Mapping[str, SparseMethod],
        *,
        num_pages: int = 4096,
        backend: Any = None,
        patterns: Mapping[str, PrefillPattern] | None = None,
        poison: bool = True,
    ) -> None:
        self.model, self.methods = model, dict(methods)
        spec = model.spec
        groups = merge_plans(spec, [m.cache_plan() for m in methods.values()])
        self.cache = PagedCache(
            spec, groups, num_pages=num_pages, max_num_seqs=16, device="cpu", dtype=spec.dtype,
            poison=poison,
        )  # fmt: skip
        self.controller = Controller(spec, self.cache, self.methods, patterns)
        self.backends = tuple(backend or ReferenceBackend() for _ in spec.layers)
        self.requests: dict[int, Request] = {}
        self.peak_pages: dict[int, int] = {}

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        key: str,
        budget: int | None,
        prefill: str = "dense",
        sparse: SparseParams = PLAIN,
    ) -> Request:
        request = Request(
            request_id, list(prompt), len(prompt), max_tokens, method=key, budget=budget,
            prefill=prefill, sparse=sparse,
        )  # fmt: skip
        self.requests[request_id] = request
        self.cache.admit(request, self.cache.match(request))
        return request

    @torch.no_grad()
    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one plan: logits [B, vocab] of each chunk's last token."""
        plan = StepPlan(tuple(chunks))
        self.cache.reserve(plan)
        ids = torch.tensor([t for c in chunks for t in c.tokens])
        positions = torch.cat([torch.arange(c.start, c.stop) for c in chunks])
        ctx = StepContext(plan, self.cache, self.controller, self.backends, self.model.spec)
        for backend in set(self.backends):
            backend.plan(plan, self.cache)
        hidden = self.model(ids, positions, ctx)
        for chunk in chunks:
            pages = self.cache.usage(chunk.request.id).pages
            peak = self.peak_pages.get(chunk.request.id, 0)
            self.peak_pages[chunk.request.id] = max(peak, pages)
        self.controller.end_step(plan)
        self.cache.check()
        last = torch.tensor([len(c.tokens) for c in chunks]).cumsum(0) - 1
        return self.model.logits(hidden[last])

    def next_chunk(self, request: Request, limit: int) -> Chunk:
        """What a scheduler would run next: prefill up to `limit` tokens, or one decode."""
        start, method = request.computed, self.methods[request.method]
        if not request.in_prefill:
            left = len(request.tokens) - start
            one = left == 1 or method.traits.decode_hooks
            stop = start + 1 if one else len(request.tokens)
            purpose = Purpose.DECODE if one else Purpose.PREFILL
            tokens = tuple(request.tokens[start:stop])
            return Chunk(request, tokens, start, purpose, stop == len(request.tokens))
        stop = min(start + limit, request.prompt_len)
        block = method.prefill_block()
        if block is not None:
            stop = min(stop, (start // block + 1) * block)
        samples = stop == len(request.tokens)
        return Chunk(request, tuple(request.tokens[start:stop]), start, Purpose.PREFILL, samples)

    def advance(self, requests: Sequence[Request], limit: int = 1 << 20) -> None:
        """One step of the given requests; greedy tokens are appended."""
        chunks = [self.next_chunk(r, limit) for r in requests]
        chunks.sort(key=lambda c: c.purpose is not Purpose.DECODE)
        logits = self.step(chunks)
        for chunk, row in zip(chunks, logits, strict=True):
            chunk.request.computed = chunk.stop
            if chunk.samples:
                chunk.request.tokens.append(int(row.argmax()))
        self._replay([c.request for c in chunks if c.ends_prompt])

    def _replay(self, requests: Sequence[Request]) -> None:
        """What methods want to run again after a prompt, in shared steps."""
        runs = [(r, list(self.methods[r.method].replay(r))) for r in requests]
        while runs := [(r, left) for r, left in runs if left]:
            self.step([replay_chunk(r, left.pop(0)) for r, left in runs])

    def finish(
        self,
        requests: Sequence[Request],
        limit: int = 1 << 20,
        each: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Run all to their end in shared steps, release them, and return what was generated."""
        live = [r for r in requests if not is_done(r)]
        while live:
            self.advance(live, limit)
            each()
            for request in [r for r in live if is_done(r)]:
                self.drop(request)
                live.remove(request)
        return [r.tokens[r.prompt_len :] for r in requests]

    def drop(self, request: Request) -> None:
        """End, abort or preempt: the rows go, and what the method holds for them."""
        self.cache.release(request.id)
        self.controller.forget(request.id)
        self.cache.check()

    def resume(self, request: Request) -> None:
        """Admit a dropped request again, from its first token."""
        request.computed = 0
        self.cache.admit(request, self.cache.match(request))


def replay_chunk(request: Request, tokens: Sequence[int]) -> Chunk:
    return Chunk(request, tuple(tokens), request.prompt_len, Purpose.REPLAY, False)


def is_done(request: Request) -> bool:
    return request.num_generated >= request.max_tokens


_SOLO: dict[str, list[int]] = {}


def solo(
    kinds: str, name: str, prompt: Sequence[int], n: int, budget: int | None, **knobs: Any
) -> list[int]:
    """Greedy tokens of one request alone on a toy of these layers, prefilled whole."""
    key = repr((kinds, name, prompt, n, budget, knobs))
    if key not in _SOLO:
        toy = Toy(kinds)
        driver = Driver(toy, {name: make(toy.spec, name, **knobs)})
        _SOLO[key] = driver.finish([driver.add(0, prompt, n, name, budget)])[0]
    return list(_SOLO[key])
