"""The lifecycle contract: hooks that return decisions, and what a method may see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparseengine.core.plan import Demand, Request, StepPlan
from sparseengine.core.specs import CacheGroup, LayerKind, LayerSpec, ModelSpec
from sparseengine.core.view import BlockMask, Keep, PackedTable, Selection


@dataclass(frozen=True, slots=True)
class Traits:
    """Static facts about a method: checked at resolve time, printed by `sparseengine explain`.

    sharing: what a finished row may become ("radix": intact pages; "chain": one owner's).
    decode_hooks: select or evict act during decode, so a preempted request must re-run its
      generated tokens one by one to end where it was; else they are re-run as one chunk.
    reads_tokens: hooks look at `Request.tokens` while decoding, so that a step is booked before the
      next one is planned.
    takes: what `budget` means: tokens retained, tokens read, or nothing.
    measures: whose attention the method knows, token by token, so that `kv_error` may stand in
      place of a budget: of the prompt's newest queries ("window", "newest"), of all queries so far,
      of those expected, of a repetition. None: it ranks tokens by something else, which says
      nothing about what a cut loses, and `kv_error` is refused.
    kinds: the layer kinds it can act on; layers of other kinds stay dense.
    """

    family: Literal["dense", "eviction", "selection"] = "eviction"
    sharing: Literal["radix", "chain", "none"] = "radix"
    prefill_policy: Literal["all_chunked", "long_bs1full_short_batch"] = "all_chunked"
    query_aware: bool = False
    graph_safe: bool = True
    tp: Literal["local", "reduce"] = "local"
    scores: Literal["mass", "logit_max"] | None = None
    needs: frozenset[Literal["hidden", "pre_rope"]] = frozenset()
    decode_hooks: bool = False
    reads_tokens: bool = False
    takes: Literal["retained", "read", "none"] = "none"
    measures: Literal["window", "newest", "all", "expected", "repetition"] | None = None
    kinds: frozenset[LayerKind] = frozenset({LayerKind.FULL, LayerKind.LATENT})


@dataclass(frozen=True, slots=True)
class SealedPages:
    """Pages that became full (or whose content was compacted) in one group since the last seal.

    One report for all layers of the group, so that summaries are one launch however many they are.
    layers: of the group. spec: any of theirs, for they are alike. pages: int64 [M] distinct page
    ids, in which all of the U heads are full; a page may hold one head of one layer or all of them.
    payload: the group's pools, [N, U, P, D] each. aux: its side tensors, SLOT [N, U, P, *shape] and
    PAGE [N, U, *shape]. rows: int64 [M] on the host, the row of a request that each page belongs
    to: unit u of a page of row r holds head (r * U + u) % kv_heads of the group's layer
    (r * U + u) // kv_heads. None if the reporter does not tell.
    """

    layers: tuple[int, ...]
    spec: LayerSpec
    pages: Tensor
    payload: tuple[Tensor, ...]
    aux: dict[str, Tensor]
    rows: npt.NDArray[np.int64] | None = None


class LayerStep(Protocol):
    """All that a method may see at one layer; nothing it may break.

    The chunks in `plan` are those of this method alone; q, k, v hold their tokens only.
    """

    layer: int
    spec: LayerSpec
    plan: StepPlan
    q: Tensor  # [T, Hq, D], rotated
    k: Tensor  # [T, Hkv, D], rotated; the latent for LATENT
    v: Tensor  # [T, Hkv, Dv]

    @property
    def page_size(self) -> int: ...

    @property
    def page_aux_bytes(self) -> int:
        """Bytes of the PAGE side tensors of one page of one head: what reading a summary costs."""
        ...

    def subset(self, chunks: Sequence[int]) -> LayerStep:
        """The same step seen by some of its chunks only (indices into this step's plan)."""
        ...

    def span(self, chunk: int) -> tuple[int, int]:
        """First and past-the-last token of a chunk within q, k, v."""
        ...

    def lens(self, chunk: int) -> tuple[int, ...]:
        """Row lengths of a chunk (this step's tokens included), one per row group; host numbers."""
        ...

    def budgets(self) -> Tensor:
        """int32 [S]: the budget of each chunk's request, 0 for none, on the device."""
        ...

    def table(self) -> tuple[Tensor, Tensor]:
        """(int32 [S, G, W] page ids, int32 [S, G] lengths) before selection, on the device."""
        ...

    def packed(self) -> tuple[PackedTable, Tensor]:
        """The same with the tables where they are, for ops that walk them."""
        ...

    def aux(self, name: str) -> Tensor:
        """The pool-shaped side tensor of this layer: [N, Hs, P, *shape] or [N, Hs, *shape]."""
        ...

    def request_aux(self, name: str, chunk: int) -> Tensor:
        """A Per.REQUEST side tensor of a chunk's request at this layer; write into it in place."""
        ...

    def push(self, name: str, value: Tensor) -> None:
        """value [S, ...] of chunks of one token each goes into their requests' rings.

        name: of a Per.REQUEST tensor declared as `ring`. Requests whose tensor was never asked for
        are left out. Device work of static shapes.
        """
        ...

    def gather(self, name: str, chunk: int, *, first: int | None = None) -> Tensor:
        """A per-slot tensor in row order, [Hkv, Lmax, ...]; "keys", "values" or a SLOT aux name.

        Rows shorter than Lmax hold zeros past their length. first: only so many slots of each row.
        """
        ...

    def scatter(self, name: str, chunk: int, value: Tensor) -> None:
        """Write a SLOT aux tensor back, [Hkv, Lmax, ...] in row order.

        Slots of earlier steps may change only if the aux is declared `rewritten`.
        """
        ...

    def scores(
        self,
        chunk: int,
        queries: Tensor,
        reduce: Literal["sum", "max"] = "sum",
        *,
        behind: int = 0,
    ) -> Tensor:
        """Attention mass of `queries` [w, Hq, D], the last w of the row, on every key of the row.

        Softmax in fp32 over all visible keys (causal, bottom-right), then reduced over the queries;
        returns fp32 [Hq, Lmax], query heads grouped by KV head, zero past a row's length. behind:
        the row is taken without its newest `behind` tokens, and Lmax is that much smaller.
        """
        ...

    def add_attention(self, mass: str, seen: str | None, left: float) -> None:
        """What chunks of one token each pay is added to SLOT aux tensors declared `rewritten`.

        mass: fp32 number per slot, becomes mass * left + the attention of the chunk's query, summed
        over a KV head's query heads; softmax in fp32 over the row. seen becomes seen * left + 1.
        Rows of requests that cannot outgrow their budget stay as they are. Others have written to
        these tensors (`scatter`) while they ran their prompts. Device work of static shapes.
        """
        ...

    def logits(self) -> Tensor:
        """q.k of chunks of one token each on every slot of their rows: fp32 [S, Hkv, W * P].

        Unscaled, the largest of a KV head's query heads. W: columns of the table. Slots past a
        row's end hold anything, NaN included. Device work of static shapes.
        """
        ...


class Vocabulary(Protocol):
    """What a method may ask of the model's tokenizer."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens around it."""
        ...

    def ending_in(self, marks: Sequence[str]) -> frozenset[int]:
        """Ids of all tokens whose text ends in one of the marks."""
        ...

    def answer_header(self) -> tuple[int, ...]:
        """What the chat template puts between a message and its answer; () without a template."""
        ...


class SparseMethod:
    """Lifecycle of one sparse method. Every hook has a default; most override one to three.

    One instance serves every request with the same knobs; what differs per request (the budget) is
    read from the request. Hooks marked "device" run in the forward pass, inside a captured graph
    when traits.graph_safe; "host" hooks run between forwards.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()
    config_class: ClassVar[type]
    manager: ClassVar[str] = "paged"

    def __init__(self, config: Any, model: ModelSpec) -> None:
        self.config = config
        self.model = model

    def uses(self, hook: str) -> bool:
        """Whether this instance does anything in a hook, by name; else it is not called."""
        return getattr(type(self), hook) is not getattr(SparseMethod, hook)

    def read(self, vocabulary: Vocabulary) -> None:
        """Host, once, before any request: what words the method needs, of a model that has any."""

    def cache_plan(self) -> tuple[CacheGroup, ...]:
        """The storage this method needs. Engines merge the plans of all enabled methods."""
        raise NotImplementedError

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Tokens per row at the worst moment and while decoding."""
        total = prompt_len + max_tokens
        return Demand(total, total)

    def reusable(self, prompt_len: int) -> int:
        """How many leading tokens of a prompt may be found stored, as a dense prompt leaves them.

        The hooks are not called for those: a method that must see them run cannot take them.
        """
        looks = self.uses("observe") or self.uses("layer_end")
        return prompt_len if self.traits.sharing == "radix" and not looks else 0

    def saves(self) -> bool:
        """Whether later prompts may begin with rows that this method has cut (`Request.saved`)."""
        return False

    def prefill_block(self) -> int | None:
        """Chunks of this method's prompts never straddle a multiple of this many tokens."""
        return None

    def select(self, at: LayerStep) -> Selection | None:
        """Device, before attention, DECODE chunks only: which columns each span reads."""
        return None

    def captured_budget(self, plan: StepPlan, lens: Sequence[int]) -> int | None:
        """Host: what a captured decode step of this method depends on, beside shapes.

        lens: the longest row of each chunk. None: in this step `select` returns None at every
        layer, and no other device hook does anything. Else a budget: device hooks do the same work
        for any requests whose largest budget this is, if host code is told rows that are long
        enough. Only methods that have traits.graph_safe are asked.
        """
        return None

    def mixed_budget(self, budget: int, longest: int) -> int | None:
        """Host: the same for a step in which requests of other methods take part, too.

        To device hooks all chunks look like the method's own; the others' budget is `longest`,
        which no row exceeds, and they do not outgrow it. budget: what `captured_budget` says of
        the method's own. None: a captured step cannot tell them apart.
        """
        return None

    def idle(self, plan: StepPlan, lens: Sequence[int]) -> bool:
        """Host: whether no device hook has anything to do in this decode step.

        Then a captured graph serves it even if the method's hooks could not be part of one, and
        `replayed` follows. lens: the longest row of each chunk, this step's tokens included.
        """
        return not self.traits.decode_hooks

    def needs_tokens(self, request: Request) -> bool:
        """Whether a request's step is booked before its next one is planned, as its text is read.

        Only methods that have traits.reads_tokens may say so.
        """
        return self.traits.reads_tokens

    def replayed(self, plan: StepPlan, lens: Sequence[int]) -> None:
        """Host: a decode step ran as a captured graph, so that no device hook was called for it.

        For what `observe` tells `evict`. lens: the longest row of each chunk, this step's tokens
        included.
        """

    def observe(self, at: LayerStep) -> None:
        """Device, after attention: look at q, k, v and the stored rows."""

    def layer_end(self, at: LayerStep, hidden: Tensor) -> None:
        """Device, after the layer."""

    def weigh(self, plan: StepPlan, layers: Callable[[], Iterable[LayerStep]]) -> None:
        """Host, after the forward, before `evict`: look at what is stored, for `evict`.

        Called for eager and captured steps alike. layers: this step at each layer of the method's
        kinds, made when asked for, as `observe` sees it but without q, k and v.
        """

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        """Host, after the forward: what to retain of the plan's requests."""
        return ()

    def shrink(
        self, request: Request, target_tokens: int, rows: Sequence[LayerStep]
    ) -> Sequence[Keep]:
        """Host, under memory pressure: retain `target_tokens` per row; () if it cannot.

        rows: the request at each layer with KV, as a step whose plan holds its last chunk alone
        and whose row lengths are those of now.
        """
        return ()

    def seal(self, pages: SealedPages) -> None:
        """Host, batched over all rows of a group: summarise full pages into PAGE aux tensors."""

    def replay(self, request: Request) -> Sequence[tuple[int, ...]]:
        """Extra token runs after prefill, observed and then forgotten."""
        return ()

    def forget(self, request_id: int) -> None:
        """The request ended or was preempted: drop what is pending for it."""


class SparseController(Protocol):
    """Drives the hooks; the only caller of methods. Holds no method's name."""

    def select(self, at: LayerStep) -> Selection | None: ...
    def observe(self, at: LayerStep) -> None: ...
    def sees_output(self, plan: StepPlan) -> bool:
        """Whether a method looks at the last layer's output, of whatever tokens."""
        ...

    def layer_end(self, at: LayerStep, hidden: Tensor, extra: Tensor | None = None) -> None:
        """The layer's output is hidden + extra; they are added if a method looks at it."""
        ...

    def prefill_masks(self, at: LayerStep) -> Mapping[int, BlockMask]:
        """By chunk of the step, before attention; chunks that are not in it read everything."""
        ...

    def add_digests(self, at: LayerStep, out: Tensor) -> Tensor:
        """Attention of the step's first tokens [T, Hq, Dv] with what digests add to it."""
        ...

    def end_step(self, plan: StepPlan) -> None:
        """Truncate replays, weigh, evict, apply, seal: in this order."""
        ...
