"""The storage contract. One manager owns every byte of KV and every side tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sparseengine.core.method import LayerStep, SealedPages
from sparseengine.core.plan import Miss, Request, StepPlan
from sparseengine.core.view import AttentionView, Keep, Segment, Selection


class PrefixHit(NamedTuple):
    """Tokens of a request that are already stored, and the id they are forked from.

    copies: the request will rewrite them, so its first step gives it pages of its own. held: of
    rows that an eviction has cut, the mean length, each rounded up to pages.
    """

    tokens: int = 0
    source: int | None = None
    miss: Miss | None = None
    copies: bool = False
    held: int | None = None


class Usage(NamedTuple):
    """Bytes of one request's rows: payload and side tensors of its pages (shared ones in full)."""

    pages: int
    bytes: int


class CacheManager(Protocol):
    """Head pages, rows, tables, side tensors. Configured by a cache plan; knows no method."""

    def total_pages(self) -> int:
        """Pages in all groups together, in head pages."""
        ...

    def free_pages(self) -> int:
        """Pages that are free, or would be if nothing were kept for later requests."""
        ...

    def pages_for(
        self, tokens: int, *, positions: int | None = None, chunk: int | None = None
    ) -> int:
        """Head pages of one request whose rows have `tokens` tokens each, all groups together.

        WINDOW rows hold the newest of `positions` tokens that were run (None: of `tokens`), and a
        chunk of at most `chunk` tokens while it runs (None: the largest there may be).
        """
        ...

    def free_tokens(self) -> int:
        """How many tokens one more request could have, evicting nothing."""
        ...

    def match(self, request: Request, limit: int, salt: str | None = None) -> PrefixHit:
        """The longest part of the first `limit` tokens that a kept row of its salt holds.

        Whole pages, where rows can be cut; with the reason when it is not all that could be. Rows
        that an eviction has cut are found where the prompt begins with the whole of their text.
        salt: in place of the request's own.
        """
        ...

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Give the request (empty or forked) rows. Forked rows share pages until written."""
        ...

    def fork(self, source_id: int, request_id: int) -> None:
        """A second owner of the source's rows; the first write into a shared page copies it."""
        ...

    def reserve(self, plan: StepPlan) -> None:
        """Pages, slot mapping and tables of a step; or CapacityError, and nothing changes."""
        ...

    def truncate(self, request_id: int, num_tokens: int) -> None:
        """Remove the newest `num_tokens` tokens of every row.

        Of WINDOW rows no more than their window can do without, once they were sealed.
        """
        ...

    def keep(
        self, request_id: int, tokens: Sequence[int], salt: str = "", *, evicted: bool = False
    ) -> None:
        """Keep a copy of the request's rows, which hold these tokens, for later requests.

        They share its pages, and go, the least recently used first, when others need the memory.
        Rows that hold more are cut back to these tokens. Nothing is kept of rows that cannot be cut
        back so far, nor of rows from which something was evicted, or with `evicted` of others.
        """
        ...

    def forget_kept(self, tokens: Sequence[int] | None = None, salt: str = "") -> None:
        """Let go of what is kept and begins with the same page as these tokens; None: of all."""
        ...

    @property
    def reuse_step(self) -> int:
        """Prompts take over multiples of so many tokens, where rows can be cut back."""
        ...

    @property
    def keeps_ends_only(self) -> bool:
        """Whether kept rows cannot be cut back at will (windows, states)."""
        ...

    def release(self, request_id: int) -> None: ...

    def write(self, layer: int, payload: tuple[Tensor, ...]) -> None: ...

    def view(self, layer: int, selection: Selection | None) -> AttentionView: ...

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """RECURRENT: [B, *shape] of this step's chunks, gathered; write back with `set_state`."""
        ...

    def set_state(self, layer: int, value: tuple[Tensor, ...]) -> None: ...

    def layer_step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> LayerStep:
        """What the methods may see of this step at one layer."""
        ...

    def stored_step(self, layer: int) -> LayerStep:
        """The same after the forward: q, k and v are empty."""
        ...

    def apply(self, keeps: Sequence[Keep]) -> None:
        """Order-preserving compaction in place; side tensors move along; whole pages come free."""
        ...

    def digests(self, request_id: int, layer: int) -> Segment | None:
        """Digests of what was evicted from a request's rows at a layer, [1, G, ...], or None.

        Kept for requests with `SparseParams.digests`, from the first eviction on.
        """
        ...

    def digest_pages(self, dropped: int) -> int:
        """Head pages of the digests of one request whose rows lose `dropped` tokens each."""
        ...

    def seal(self, plan: StepPlan) -> Sequence[SealedPages]:
        """Pages that are full and not reported yet; drops prefill-lifetime side tensors.

        Ends the step: WINDOW rows (not those of REPLAY chunks) drop whole leading pages that no
        later query sees, so a slot's index in such a row is not its position.
        """
        ...

    def lens(self, request_id: int, layer: int) -> tuple[int, ...]:
        """Row lengths of a request at a layer, one per KV head; host numbers."""
        ...

    def usage(self, request_id: int) -> Usage: ...

    def check(self) -> None:
        """Conservation, ownership, lengths. Raises AssertionError that says what broke."""
        ...
