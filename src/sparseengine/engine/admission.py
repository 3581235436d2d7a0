"""How much memory a request may count on, in head pages, before it is let in.

A method tells only its `Demand`; the cache turns tokens into pages. What an admitted request is
charged:

    in prefill   the worst of the prompt's peak and of what decoding will take
    decoding     steady: what is retained plus the output (all of it, or `reserve_output_tokens`)
    n > 1        each sibling its own output and open pages; the prompt's full pages once per family

WINDOW layers hold a window and the chunk that runs, whatever the method retains elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparseengine.config import SchedulerConfig
from sparseengine.core.cache import CacheManager
from sparseengine.core.method import SparseMethod
from sparseengine.core.plan import UNKNOWN, Chunk, Purpose, Request
from sparseengine.engine.prefix import Prefixes
from sparseengine.errors import CapacityError


class Charge(NamedTuple):
    """Head pages of one request: `most` at any time, `steady` while it decodes."""

    most: int
    steady: int


def charge(
    cache: CacheManager,
    method: SparseMethod,
    prompt_len: int,
    output_tokens: int,
    budget: int | None,
    *,
    digests: bool = False,
) -> Charge:
    """What a request of this shape is charged; `digests`: if it keeps digests of what it evicts."""
    demand = method.demand(prompt_len, output_tokens, budget)
    positions = prompt_len + output_tokens
    steady = cache.pages_for(demand.steady_tokens, positions=positions, chunk=1)
    positions = max(positions, demand.peak_tokens)  # a replay runs on top of the prompt
    policy = method.traits.prefill_policy
    whole = policy == "long_bs1full_short_batch" or method.uses("replay")
    most = cache.pages_for(max(demand), positions=positions, chunk=positions if whole else None)
    found = Charge(most, steady)
    if not digests:
        return found
    return _with_digests(found, cache, method, prompt_len, output_tokens, budget)


def _with_digests(
    found: Charge,
    cache: CacheManager,
    method: SparseMethod,
    prompt_len: int,
    output_tokens: int,
    budget: int | None,
) -> Charge:
    """The same request when it keeps digests of all that it may evict.

    Those of one eviction when the prompt ends take less than it frees, but for a page per row.
    Without a budget it has an error target, and its prompt is cut once.
    """
    total = prompt_len + output_tokens
    if budget is None:
        one = cache.digest_pages(1)
        return Charge(found.most + one, found.steady + one)
    if total <= budget:
        return found
    extra = cache.digest_pages(total - budget)
    steady = found.steady + extra
    before = extra if method.prefill_block() is not None else cache.digest_pages(1)
    return Charge(max(found.most + before, steady), steady)


def fitting(cache: CacheManager, one: Charge) -> int:
    """How many requests of this charge run at once: one in prefill, all others decoding."""
    room = cache.total_pages() - one.most
    return 0 if room < 0 else 1 + room // max(1, one.steady)


@dataclass(slots=True, eq=False)
class Ticket:
    """An admitted request: its charge, and where it stands.

    num_forks, fork_pages: siblings that will fork it when its prompt is done, and pages kept for
    them. family: the tickets that share its prompt's pages; the first of them is charged for
    `shared_pages`, the others are not. source, hit_pages: the kept row that it began with, and the
    pages it owns together with all that began so. needed_pages: what was free for it at first.
    """

    request: Request
    method: SparseMethod
    charge_pages: int
    num_forks: int = 0
    fork_pages: int = 0
    is_steady: bool = False
    source: int | None = None
    hit_pages: int = 0
    needed_pages: int = 0
    shared_pages: int = 0
    family: list[Ticket] = field(default_factory=list)
    replays: deque[tuple[int, ...]] = field(default_factory=deque)
    _planned: tuple[tuple[int, ...], ...] | None = None

    @property
    def decodes(self) -> bool:
        """Its next chunk is a DECODE of one token."""
        request = self.request
        if self.replays or request.in_prefill:
            return False
        if request.computed == len(request.tokens) - 1:
            return True
        return self.method.traits.decode_hooks or request.sparse.digests

    @property
    def awaits_last(self) -> bool:
        """The step under way samples its last token."""
        request = self.request
        return request.tokens[-1] == UNKNOWN and request.num_generated >= request.max_tokens

    def decode_chunk(self) -> Chunk:
        request = self.request
        at = request.computed
        samples = at == len(request.tokens) - 1
        return Chunk(request, (request.tokens[at],), at, Purpose.DECODE, samples)

    def chunk_tokens(self, left: int, budget: int) -> int:
        """Tokens of the next prefill or replay chunk; more than `left` when it must run whole.

        A chunk ends at the prompt's end, at a multiple of the method's block, or at `left` tokens,
        cut down to a multiple of `request.align` when a step has room for so many.
        Tokens that a preempted request had generated are a run of their own.
        """
        if self.replays:
            return len(self.replays[0])
        request, start = self.request, self.request.computed
        end = request.prompt_len if request.in_prefill else len(request.tokens)
        if request.in_prefill and self.method.traits.prefill_policy == "long_bs1full_short_batch":
            return end - start
        block = self.method.prefill_block()
        if block and request.in_prefill:
            end = min(end, (start // block + 1) * block)
        stop, align = start + min(left, end - start), request.align
        if stop < end and request.in_prefill and align <= budget:
            stop = max(stop // align, start // align + 1) * align
        return min(stop, end) - start

    def planned_replays(self) -> tuple[tuple[int, ...], ...]:
        """What the method wants to run again after the prompt; asked once."""
        if self._planned is None:
            self._planned = tuple(tuple(r) for r in self.method.replay(self.request))
        return self._planned

    def finishes_prompt(self, chunk: Chunk) -> bool:
        """Whether nothing of the prompt is left to run behind this chunk, its last one."""
        if chunk.purpose is Purpose.REPLAY:
            return len(self.replays) == 1
        return chunk.ends_prompt and not self.planned_replays()

    def advance(self, chunk: Chunk) -> None:
        """The chunk has run."""
        if chunk.purpose is Purpose.REPLAY:
            self.replays.popleft()
            return
        self.request.computed = chunk.stop
        if chunk.ends_prompt:
            self.replays.extend(self.planned_replays())


class Admission:
    """Turns demands into page charges. Knows tokens and pages, no method."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        methods: Mapping[str, SparseMethod],
        prefixes: Prefixes | None = None,
    ) -> None:
        self.reserve_output_tokens = config.reserve_output_tokens
        self.cache = cache
        self.methods = methods
        self.prefixes = prefixes or Prefixes(cache, methods, enabled=False)

    def check_fits(self, request: Request) -> None:
        """Raise `CapacityError` when the request could not run with all pages to itself."""
        needed = self._charge(request, request.max_tokens).most
        available = self.cache.total_pages()
        if needed > available:
            raise CapacityError(
                f"a prompt of {request.prompt_len} tokens with max_tokens={request.max_tokens} and "
                f"method {request.sparse.method!r} needs {needed} KV pages, the engine has "
                f"{available}; shorten it, lower max_tokens or the budget, or raise "
                f"kv_cache_memory_bytes (gpu_memory_utilization on a GPU)",
                needed=needed,
                available=available,
            )

    def available_pages(self, running: Collection[Ticket]) -> int:
        """Pages that neither are in use nor are promised to an admitted request."""
        taken = 0
        for ticket in running:
            used = self.cache.usage(ticket.request.id).pages - ticket.shared_pages
            taken += max(ticket.charge_pages, used) + ticket.fork_pages - ticket.hit_pages
        taken += sum(self._hit_pages(running).values())
        return min(self.cache.free_pages(), self.cache.total_pages() - taken)

    @staticmethod
    def _hit_pages(running: Collection[Ticket]) -> dict[int, int]:
        """Pages that requests own together, by the kept row they began with."""
        found: dict[int, int] = {}
        for ticket in running:
            if ticket.source is not None:
                found[ticket.source] = max(found.get(ticket.source, 0), ticket.hit_pages)
        return found

    def admit(
        self,
        request: Request,
        siblings: Sequence[Request],
        room: int,
        available: int,
        running: Collection[Ticket] = (),
    ) -> Ticket | None:
        """Give the request rows if it fits into `room` sequences and `available` pages, else None.

        Siblings are let in with their parent, as many as could fit at all. What it finds stored and
        shares with running requests, they have paid for.
        """
        pages = self._charge(request, self._output_tokens(request))
        paid = self._hit_pages(running)
        if room < 1 or (pages.most > available and not paid and not request.sparse.save_prefix):
            return None
        hit = self.prefixes.find(request)
        if hit.held is not None:
            pages = self._grown(request, hit.tokens, hit.held)
        shares = hit.source is not None and hit.held is None and not hit.copies
        own = self._full_pages(hit.tokens) if shares else 0
        needed = pages.most - (min(own, paid.get(hit.source, 0)) if hit.source is not None else 0)
        if needed > available:
            return None
        num_forks, each = 0, 0
        if siblings:
            each = pages.steady - self._shared_pages(request)
            most = (self.cache.total_pages() - pages.most) // max(1, each)
            num_forks = min(len(siblings), most)
            if num_forks and needed + num_forks * each > available:
                return None
            num_forks = min(num_forks, room - 1)
        self.cache.admit(request, hit)
        self.prefixes.note(request, hit)
        request.computed = hit.tokens
        request.saved = 0 if hit.held is None else hit.tokens
        return Ticket(
            request,
            self.methods[request.method],
            pages.most,
            num_forks=num_forks,
            fork_pages=num_forks * max(0, each),
            source=hit.source if own else None,
            hit_pages=own,
            needed_pages=needed,
        )

    def settle(self, ticket: Ticket) -> None:
        """The prompt is done and evicted: from now on the request is charged its steady pages."""
        if not ticket.request.saved:  # its rows grow as they have been charged
            ticket.charge_pages = self._steady_pages(ticket.request)
        ticket.num_forks = ticket.fork_pages = 0
        ticket.is_steady = True

    def fork(self, parent: Ticket, sibling: Request) -> Ticket:
        """The ticket of a sibling that shares the parent's prompt pages from now on."""
        if not parent.family:
            parent.family.append(parent)
        shared = self._shared_pages(sibling)
        charge = self._steady_pages(sibling) - shared
        ticket = Ticket(sibling, parent.method, charge, is_steady=True, shared_pages=shared)
        ticket.family = parent.family
        ticket.family.append(ticket)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Its rows are released; the next of its family pays for the shared pages."""
        if not ticket.family:
            return
        was_first = ticket.family[0] is ticket
        ticket.family.remove(ticket)
        if was_first and ticket.family:
            heir = ticket.family[0]
            heir.charge_pages += heir.shared_pages
            heir.shared_pages = 0

    def _charge(self, request: Request, output_tokens: int) -> Charge:
        method = self.methods[request.method]
        shape = request.prompt_len, output_tokens, request.budget
        return charge(self.cache, method, *shape, digests=request.sparse.digests)

    def _grown(self, request: Request, tokens: int, held: int) -> Charge:
        """A request whose first `tokens` are rows of `held`: the rest is appended and stays."""
        total = held + request.prompt_len - tokens + self._output_tokens(request)
        pages = self.cache.pages_for(total, positions=request.prompt_len + request.max_tokens)
        return Charge(pages, pages)

    def _output_tokens(self, request: Request) -> int:
        """Output that is paid for in advance."""
        if self.reserve_output_tokens is None:
            return request.max_tokens
        ahead = request.num_generated + self.reserve_output_tokens
        return max(1, min(request.max_tokens, ahead))

    def _steady_pages(self, request: Request) -> int:
        return self._charge(request, self._output_tokens(request)).steady

    def _shared_pages(self, request: Request) -> int:
        """Full pages of the prompt's rows, which forks share for as long as they live.

        None when the method may evict while decoding, for that gives every fork its own copy; none
        of WINDOW layers, which leave the prompt behind.
        """
        method = self.methods[request.method]
        if method.traits.decode_hooks:
            return 0
        output = self._output_tokens(request)
        demand = method.demand(request.prompt_len, output, request.budget)
        return self._full_pages(max(0, demand.steady_tokens - output))

    def _full_pages(self, tokens: int) -> int:
        """Pages of rows of so many tokens, without the open ones and those of WINDOW layers."""
        full = self.cache.pages_for(tokens, positions=0) - self.cache.pages_for(1, positions=0)
        return max(0, full)
