"""Pipelines: a scored eviction, how its budget is shared out, and what is read of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sparseengine.core.method import LayerStep, SealedPages, SparseMethod, Vocabulary
from sparseengine.core.plan import Demand, Request, StepPlan
from sparseengine.core.specs import CacheGroup
from sparseengine.core.view import Keep, Selection
from sparseengine.errors import RequestError, nearest
from sparseengine.methods.allocate import KINDS, SCOPES, Allocation
from sparseengine.methods.families import EvictionMethod, SelectionMethod
from sparseengine.methods.knobs import STAGE_KNOBS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a pipeline after its method, checked. Raises `RequestError`."""

    allocate: str | None = None
    allocate_scope: str | None = None
    select: str | None = None
    select_tokens: int | None = None
    select_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in (("allocate", KINDS), ("allocate_scope", SCOPES)):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                hint = nearest(str(value), allowed)
                raise RequestError(f"{name}={value!r} is not allowed; {hint}")
        if self.allocate_scope is not None and self.allocate not in ("adakv", "page_quanta"):
            raise RequestError(
                f"allocate_scope={self.allocate_scope!r} needs allocate='adakv' or 'page_quanta'; "
                f"allocate is {self.allocate!r}"
            )
        count = self.select_tokens
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            count = 0
        if count is not None and count < 1:
            raise RequestError(
                f"select_tokens={self.select_tokens!r} is not allowed; it must be a number >= 1"
            )
        if not isinstance(self.select_config, Mapping):
            raise RequestError(
                f"select_config={self.select_config!r} is not allowed; it must be a mapping of "
                "knobs"
            )
        if self.select is None and (count is not None or self.select_config):
            raise RequestError("select_tokens and select_config need select: name a method there")
        if self.select is not None and not isinstance(self.select, str):
            raise RequestError(f"select={self.select!r} is not allowed; it must be a method's name")

    @property
    def allocation(self) -> Allocation | None:
        if self.allocate is None:
            return None
        return Allocation(kind=self.allocate, scope=self.allocate_scope or "layer")


def split_stages(knobs: Mapping[str, Any]) -> tuple[Stages, dict[str, Any]]:
    """Knobs of a request -> its stages, and the knobs of the method itself."""
    given = {k: v for k, v in knobs.items() if k in STAGE_KNOBS and v is not None}
    return Stages(**given), {k: v for k, v in knobs.items() if k not in STAGE_KNOBS}


def allocated(method: SparseMethod, stages: Stages) -> SparseMethod:
    """The method with its allocation. Raises `RequestError` if it has no scores to share by."""
    allocation = stages.allocation
    if allocation is None:
        return method
    if isinstance(method, Wrapper):
        raise RequestError(
            f"allocate={allocation.kind!r} is not possible with method {method.name!r}: it shares "
            f"budgets out itself; leave `allocate` out, or name a method that scores"
        )
    if not isinstance(method, EvictionMethod):
        raise RequestError(
            f"allocate={allocation.kind!r} is not possible with method {method.name!r}: it scores "
            "no tokens for an eviction"
        )
    reason = method.why_not(allocation)
    if reason is not None:
        raise RequestError(
            f"allocate={allocation.kind!r} is not possible with method {method.name!r}: {reason}"
        )
    method.allocation = allocation
    if allocation.shares:  # a rank would need the scores of all heads
        object.__setattr__(method, "traits", replace(method.traits, tp="reduce"))
    return method


def composed(retain: SparseMethod, read: SparseMethod, tokens: int | None) -> Composite:
    """An eviction and a selection on what it retains. Raises `RequestError` for other pairs."""
    pair = f"method {retain.name!r} with select={read.name!r} is not possible"
    if read.traits.family != "selection" or not isinstance(read, SelectionMethod):
        raise RequestError(f"{pair}: {read.name!r} does not select what is read; quest does, say")
    if retain.traits.family == "selection":
        raise RequestError(f"{pair}: both select, and a step reads one selection; leave one out")
    if retain.traits.family == "dense":
        raise RequestError(
            f"{pair}: {retain.name!r} evicts nothing; make {read.name!r} the method, and "
            "select_tokens its budget"
        )
    if read.aligned_layers:
        raise RequestError(
            f"{pair}: {read.name!r} reads in one layer the slots that another layer chose, and "
            "after an eviction these hold other tokens"
        )
    if not read.layers:
        kinds = ", ".join(sorted(k.name for k in read.traits.kinds))
        raise RequestError(
            f"{pair}: the selection acts on no layer of this model (kinds {kinds}, first "
            "dense_layers left out)"
        )
    read.fixed_budget = tokens or type(read).default_budget
    return Composite(retain, read)


class Wrapper(SparseMethod):
    """A method around another: every hook is the inner one's, unless a subclass has its own."""

    def __init__(self, config: Any, retain: SparseMethod) -> None:
        super().__init__(config, retain.model)
        self.retain = retain

    def adopt(self, **facts: Any) -> None:
        """Facts of a class elsewhere that are this instance's here."""
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def uses(self, hook: str) -> bool:
        return self.retain.uses(hook)

    def read(self, vocabulary: Vocabulary) -> None:
        self.retain.read(vocabulary)

    def cache_plan(self) -> tuple[CacheGroup, ...]:
        return self.retain.cache_plan()

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        return self.retain.demand(prompt_len, max_tokens, budget)

    def reusable(self, prompt_len: int) -> int:
        return self.retain.reusable(prompt_len)

    def saves(self) -> bool:
        return self.retain.saves()

    def prefill_block(self) -> int | None:
        return self.retain.prefill_block()

    def select(self, at: LayerStep) -> Selection | None:
        return self.retain.select(at)

    def captured_budget(self, plan: StepPlan, lens: Sequence[int]) -> int | None:
        return self.retain.captured_budget(plan, lens)

    def idle(self, plan: StepPlan, lens: Sequence[int]) -> bool:
        return self.retain.idle(plan, lens)

    def needs_tokens(self, request: Request) -> bool:
        return self.retain.needs_tokens(request)

    def replayed(self, plan: StepPlan, lens: Sequence[int]) -> None:
        self.retain.replayed(plan, lens)

    def observe(self, at: LayerStep) -> None:
        self.retain.observe(at)

    def layer_end(self, at: LayerStep, hidden: Tensor) -> None:
        self.retain.layer_end(at, hidden)

    def weigh(self, plan: StepPlan, layers: Callable[[], Iterable[LayerStep]]) -> None:
        self.retain.weigh(plan, layers)

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        return self.retain.evict(plan)

    def shrink(
        self, request: Request, target_tokens: int, rows: Sequence[LayerStep]
    ) -> Sequence[Keep]:
        return self.retain.shrink(request, target_tokens, rows)

    def seal(self, pages: SealedPages) -> None:
        self.retain.seal(pages)

    def replay(self, request: Request) -> Sequence[tuple[int, ...]]:
        return self.retain.replay(request)

    def forget(self, request_id: int) -> None:
        self.retain.forget(request_id)


class Composite(Wrapper):
    """Two methods on one request: what the first retains, decode steps read by the second's choice.

    Hooks go to the stage they belong to: everything that scores, evicts, replays and bounds memory
    to the eviction; `select` to the selection; `read` and `seal` to both. The controller seals
    after it has evicted, in prompts and while decoding, so that page summaries are those of
    compacted pages. The request's budget (or error target) is the eviction's; the selection has its
    own, the same for all requests.
    """

    def __init__(self, retain: SparseMethod, read: SelectionMethod) -> None:
        super().__init__({"retain": retain.config, "read": read.config}, retain)
        self.reader = read
        first, second = retain.traits, read.traits
        traits = replace(
            first,
            query_aware=first.query_aware or second.query_aware,
            graph_safe=first.graph_safe and second.graph_safe,
            tp="reduce" if "reduce" in (first.tp, second.tp) else "local",
            needs=first.needs | second.needs,
            decode_hooks=True,
            kinds=first.kinds | second.kinds,
        )
        same = ("layers", "default_budget", "default_ratio")
        facts = {name: getattr(retain, name, None) for name in same}
        self.adopt(name=retain.name, traits=traits, **facts)

    def uses(self, hook: str) -> bool:
        return hook == "select" or self.retain.uses(hook)

    def read(self, vocabulary: Vocabulary) -> None:
        self.retain.read(vocabulary)
        self.reader.read(vocabulary)

    def cache_plan(self) -> tuple[CacheGroup, ...]:
        """The finer rows and all side tensors of both, layer by layer."""
        own = {layer: g for g in self.reader.cache_plan() for layer in g.layers}
        return tuple(
            _joined(group, layer, own.get(layer))
            for group in self.retain.cache_plan()
            for layer in group.layers
        )

    def select(self, at: LayerStep) -> Selection | None:
        requests = [c.request for c in at.plan.chunks]
        if all(r.budget is None and r.sparse.kv_error is None for r in requests):
            return None  # a made-up step in which nothing acts
        return self.reader.select(at)

    def captured_budget(self, plan: StepPlan, lens: Sequence[int]) -> int | None:
        """The eviction's, if it acts; else one that no made-up request outgrows."""
        acting = self.retain.captured_budget(plan, lens)
        if acting is not None:
            return acting
        reads = self.reader.captured_budget(plan, lens)
        return None if reads is None else max(2, reads)

    def idle(self, plan: StepPlan, lens: Sequence[int]) -> bool:
        return self.retain.idle(plan, lens) and self.reader.captured_budget(plan, lens) is None

    def seal(self, pages: SealedPages) -> None:
        self.retain.seal(pages)
        self.reader.seal(pages)

    def forget(self, request_id: int) -> None:
        self.retain.forget(request_id)
        self.reader.forget(request_id)


def _joined(group: CacheGroup, layer: int, other: CacheGroup | None) -> CacheGroup:
    """One layer's storage for both stages."""
    more = () if other is None else tuple(a for a in other.aux if a not in group.aux)
    ragged = group.ragged if other is None else max(group.ragged, other.ragged, key=_fineness)
    return replace(group, layers=(layer,), ragged=ragged, aux=group.aux + more)


def _fineness(ragged: Any) -> int:
    return int(ragged.value)


def describe_pipeline(method: SparseMethod) -> list[dict[str, Any]]:
    """The stages of a method as JSON-ready data: what retains, how rows share, what is read."""
    first = method.retain if isinstance(method, Composite) else method
    stages: list[dict[str, Any]] = [{"stage": "method", "name": first.name}]
    allocation = first.allocation if isinstance(first, EvictionMethod) else None
    if allocation is not None:
        scope = {"scope": allocation.scope} if allocation.shares else {}
        stages.append({"stage": "allocate", "name": allocation.kind, **scope})
    if isinstance(method, Composite):
        read = method.reader
        stages.append({"stage": "select", "name": read.name, "tokens": read.fixed_budget})
    return stages
