"""Decode steps as captured CUDA graphs: one launch instead of a thousand.

A step of decodes only is padded to a bucket of requests and replayed. Its inputs lie at fixed
addresses: token ids, positions, row lengths, budgets, and where each request's page tables are. All
else (slot mapping, selection, attention, the largest logit) is device work inside the graph. Padded
rows read and write the trash page. Beside shapes, a graph depends on its `Key` alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseengine.cache.manager import PagedCache
from sparseengine.cache.tensors import upload_into
from sparseengine.core.attention import AttentionBackend
from sparseengine.core.context import StepContext
from sparseengine.core.method import SparseMethod
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.engine.controller import Controller
from sparseengine.engine.draw import NUM_KNOBS, draw
from sparseengine.engine.model import Model
from sparseengine.engine.pending import Pending, fill_unknown
from sparseengine.engine.sampling import Draws

MAX_GRAPHS = 64  # beside those of `warm_up`; the least recently used ones are dropped
_FIRST_LEN = 4096
_GONE = object()
_LEN_GROWTH = 2  # row lengths are bucketed by powers of this


class Key(NamedTuple):
    """rows, max_len: rounded up to buckets. method, budget: of a method whose device hooks act in
    this step; "" and None when none does. draws: how tokens are sampled."""

    rows: int
    max_len: int
    method: str
    budget: int | None
    draws: Draws = "greedy"

    @property
    def host_len(self) -> int:
        """The row length that host code is told: above the budget exactly when there is one."""
        return 0 if self.budget is None else max(self.max_len, self.budget + 1)


class Best(NamedTuple):
    """Sampled tokens int64 [S] and the largest logits fp32 [S], on the device."""

    tokens: Tensor
    logits: Tensor


class Captured(NamedTuple):
    """How to run a captured step again, and where its results are.

    owner: the instance whose hooks are part of it; once it is gone, so is what they read.
    """

    replay: Callable[[], None]
    hidden: Tensor
    best: Best
    owner: ReferenceType[SparseMethod] | None = None


def row_buckets(limit: int) -> list[int]:
    """Numbers of requests that steps are padded to."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, 4097, 64)]
    return [n for n in sizes if n < limit] + [limit]


def len_buckets(limit: int) -> list[int]:
    """Row lengths that launch grids are sized by."""
    sizes, size = [], _FIRST_LEN
    while size < limit:
        sizes.append(size)
        size *= _LEN_GROWTH
    return [*sizes, limit]


class DecodeGraphs:
    """Captures decode steps, replays them, and says which steps it can take.

    Budgets, row lengths and ways to sample make graphs of their own, so that their number is
    bounded (`MAX_GRAPHS`): a client that names ever new budgets pays for captures, not with memory.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        cache: PagedCache,
        controller: Controller,
        methods: Mapping[str, SparseMethod],
        backends: Sequence[AttentionBackend],
        *,
        max_rows: int,
        max_len: int,
    ) -> None:
        self.model, self.spec, self.cache = model, spec, cache
        self.controller, self.methods, self.backends = controller, methods, tuple(backends)
        self.rows, self.lens = row_buckets(max_rows), len_buckets(max_len)
        device = cache.device
        self._inputs = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._knobs = torch.zeros(NUM_KNOBS, max_rows, dtype=torch.float64, device=device)
        self._graphs: dict[Key, Captured] = {}
        self._pool: Any = None
        self._version = -1
        self._has_states = any(s.kind is LayerKind.RECURRENT for s in spec.layers)
        cache.make_static(max_rows)

    # ── which steps ──────────────────────────────────────────────────────────────────────────────

    def key(self, plan: StepPlan, draws: Draws = "greedy") -> Key | None:
        """The graph that runs this reserved step, or None: it has to run eagerly.

        Eager are steps with prompts, with a request that is recorded or keeps digests, of several
        methods of which one acts while decoding, and of models with recurrent states.
        """
        if self._has_states or any(c.purpose is not Purpose.DECODE for c in plan.chunks):
            return None
        if len(plan.chunks) > self.rows[-1]:
            return None
        if any(c.request.sparse.record or c.request.sparse.digests for c in plan.chunks):
            return None
        names = {c.request.method for c in plan.chunks}
        longest = self.cache.longest_rows()
        acting: dict[str, int] = {}
        for name in names:
            method, own = self.methods[name], _of(name, plan)
            part, lens = StepPlan(tuple(plan.chunks[i] for i in own)), longest[own].tolist()
            if method.traits.graph_safe:
                budget = method.captured_budget(part, lens)
                if budget is not None:
                    acting[name] = budget
            elif method.traits.decode_hooks and not method.idle(part, lens):
                return None
        if acting and len(names) > 1:
            return None
        rows = self.rows[bisect_left(self.rows, len(plan.chunks))]
        at = bisect_left(self.lens, int(longest.max(initial=1)))
        if at == len(self.lens):
            return None
        name, found = next(iter(acting.items())) if acting else ("", None)
        return Key(rows, self.lens[at], name, found, draws)

    # ── replay ───────────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        plan: StepPlan,
        key: Key,
        before: Pending | None = None,
        knobs: NDArray[np.float64] | None = None,
    ) -> tuple[Tensor, Best]:
        """Hidden states [S, hidden] and tokens of a reserved step; captures on first use.

        before: the step whose tokens this one takes. knobs: of `draw`, unless all are greedy.
        """
        captured = self._captured(key)
        num = len(plan.chunks)
        inputs = np.zeros((3, key.rows), np.int64)
        inputs[0, :num] = [c.tokens[0] for c in plan.chunks]
        inputs[1, :num] = [c.start for c in plan.chunks]
        inputs[2] = inputs[1] + 1  # a decoded token lies behind its prompt
        upload_into(self._inputs[:, : key.rows], inputs)
        fill_unknown(self._inputs[0], inputs[0, :num], plan, before)
        if knobs is not None:
            upload_into(self._knobs[:, :num], knobs)
        self.cache.load_static(key.rows)
        captured.replay()
        self.controller.replayed(plan, self.cache.longest_rows().tolist())
        best = Best(captured.best.tokens[:num], captured.best.logits[:num])
        return captured.hidden[:num], best

    def _captured(self, key: Key) -> Captured:
        if self._version != self.cache.static_version:  # an address has changed
            self._graphs.clear()
            self._version = self.cache.static_version
        if key not in self._graphs or not self._is_current(key):
            for stale in [k for k in self._graphs if not self._is_current(k)]:
                del self._graphs[stale]
            owner = ref(self.methods[key.method]) if key.method else None
            self._graphs[key] = self._record(key)._replace(owner=owner)
            # The device has waited before it captured: what is dropped does not run. Its memory
            # goes back to the pool that all captures share.
            others = [k for k in self._graphs if not self._is_lasting(k)]
            for oldest in others[:-MAX_GRAPHS]:
                del self._graphs[oldest]
        found = self._graphs[key] = self._graphs.pop(key)  # the newest is last
        return found

    def _is_lasting(self, key: Key) -> bool:
        """Whether it is one of `warm_up`, of which there are no more than buckets."""
        return key == Key(key.rows, self.lens[0], "", None)

    def _is_current(self, key: Key) -> bool:
        """Whether the instance that was captured is the one that runs now."""
        owner = self._graphs[key].owner
        return owner is None or owner() is self.methods.get(key.method, _GONE)

    # ── capture ──────────────────────────────────────────────────────────────────────────────────

    def warm_up(self) -> None:
        """Capture every bucket of requests at the shortest length, the largest first."""
        for rows in reversed(self.rows):
            self._captured(Key(rows, self.lens[0], "", None))

    def capture_largest(self) -> None:
        """Capture the largest bucket of requests alone."""
        self._captured(Key(self.rows[-1], self.lens[0], "", None))

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def _record(self, key: Key) -> Captured:
        """Run the made-up step once, which compiles kernels and fills workspaces, then capture."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self.cache.clear_static(key.rows, key.budget)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.device_work(key)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden, best = self.device_work(key)
        return Captured(graph.replay, hidden, best)

    def device_work(self, key: Key) -> tuple[Tensor, Best]:
        """A step that reads the fixed addresses; the plan is made anew, so that nothing that host
        code remembers of another run gets into this one."""
        plan = _made_up(key, next(iter(self.methods)))
        ids, positions, lengths = self._inputs[:, : key.rows].unbind(0)
        with self.cache.static_step(plan, key.max_len, key.host_len):
            ctx = StepContext(
                plan, self.cache, self.controller, self.backends, self.spec, lengths=lengths
            )
            hidden = self.model(ids, positions, ctx)
        logits = self.model.logits(hidden)
        best, tokens = logits.max(-1)
        if key.draws != "greedy":
            knobs = self._knobs[:, : key.rows]
            tokens = draw(logits, knobs, truncate=key.draws == "truncated")
        return hidden, Best(tokens, best)


def _of(name: str, plan: StepPlan) -> list[int]:
    """The chunks of one method."""
    return [i for i, c in enumerate(plan.chunks) if c.request.method == name]


def _made_up(key: Key, method: str) -> StepPlan:
    """Decodes of requests that do not exist, alike in what the key says."""
    chunks = []
    for i in range(key.rows):
        request = Request(
            id=-1 - i,
            tokens=[0, 0],
            prompt_len=1,
            max_tokens=1,
            method=key.method or method,
            budget=key.budget,
        )
        chunks.append(Chunk(request, (0,), 1, Purpose.DECODE, True))
    return StepPlan(tuple(chunks))
