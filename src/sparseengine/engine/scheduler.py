"""Which chunks run in the next step.

One token budget per step; first come, first served. Decodes are all in a step or all out of it:

    mix        decodes, then prefill chunks in what is left of the budget; when the oldest prefill
               cannot move in what is left, it gets the next step for itself
    alternate  prefill steps, and after at most max_decode_stall_steps of them one of decodes

so a running decode waits at most `max_decode_stall_steps` steps, the oldest prefill at most one,
and the oldest waiting request until its pages are free.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sparseengine.config import SchedulerConfig
from sparseengine.core.cache import CacheManager
from sparseengine.core.method import SparseMethod
from sparseengine.core.plan import UNKNOWN, Chunk, Purpose, Request, StepPlan
from sparseengine.engine.admission import Admission, Ticket
from sparseengine.engine.faults import blame
from sparseengine.engine.outputs import Finish, Sample
from sparseengine.engine.prefix import Prefixes
from sparseengine.engine.quarantine import Quarantine
from sparseengine.errors import CapacityError


class Sink(Protocol):
    """Where tokens go. It alone decides that a request is complete."""

    def push(self, request: Request, sample: Sample) -> Finish | None:
        """A new token, already appended to the request; a `Finish` ends it."""
        ...

    def end(self, request: Request, finish: Finish) -> None:
        """The request is over; called once, while its rows still exist (if it has any)."""
        ...

    def forked(self, parent: Request, request: Request) -> None:
        """The request's rows are now a fork of the parent's."""
        ...

    def forget(self, request: Request, *, preempted: bool) -> None:
        """Its rows are gone: it ended, or will be run again."""
        ...


def _order(request: Request) -> tuple[int, int]:
    return (request.arrival, request.id)


class Scheduler:
    """Owns the requests: waiting ones in order of arrival, admitted ones with their tickets.

    shrink: makes a decoding request smaller, if its method can; `Controller.shrink`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        methods: Mapping[str, SparseMethod],
        sink: Sink,
        shrink: Callable[[Request], bool] = lambda request: False,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.config = config
        self.shrink = shrink
        self.cache = cache
        self.methods = methods
        self.sink = sink
        self.prefixes = prefixes or Prefixes(cache, methods, enabled=False)
        self.admission = Admission(config, cache, methods, self.prefixes)
        self.waiting: list[Request] = []
        self.siblings: dict[int, list[Request]] = {}
        self.running: dict[int, Ticket] = {}
        self.num_preemptions = self.num_shrinks = 0
        self.quarantine = Quarantine()
        self._in_flight: list[set[int]] = []  # ids of plans that are not booked yet
        self._stall_steps = 0
        # Decodes share a step or none runs, so no more requests run than a step has tokens.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)

    # ── requests come and go ──────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Queue a request. Raises `CapacityError` when it could not run even alone."""
        self.admission.check_fits(request)
        parent = request.parent
        if parent is not None and any(r.id == parent for r in reversed(self.waiting)):
            self.siblings.setdefault(parent, []).append(request)
        else:
            request.parent = None
            insort(self.waiting, request, key=_order)

    def abort(self, request_id: int) -> None:
        """End a request at any time; unknown ids are ignored, for it may just have finished."""
        finish = Finish("abort")
        if request_id in self.running:
            self._finish(self.running[request_id].request, finish)
            return
        for queue in (self.waiting, *self.siblings.values()):
            for i, request in enumerate(queue):
                if request.id == request_id:
                    del queue[i]
                    self._finish(request, finish)
                    return

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self.siblings.values()))

    def _orphan(self, parent_id: int, keep: int = 0) -> None:
        """Siblings past the first `keep` stop waiting for the parent and run the prompt anew."""
        siblings = self.siblings.pop(parent_id, [])
        for request in siblings[keep:]:
            request.parent = None
            insort(self.waiting, request, key=_order)
        if siblings[:keep]:
            self.siblings[parent_id] = siblings[:keep]

    # ── planning a step ───────────────────────────────────────────────────────────────────────────

    def schedule(self, *, ahead: bool = False) -> StepPlan | None:
        """The next step, its pages reserved; None when there is nothing to run.

        ahead: a step under way has tokens that are not booked yet. Then nothing is preempted: None
        also means that pages are short.
        """
        preempted: list[int] = []
        while True:
            if not preempted or not self.running:
                self._admit()
            chunks = self.quarantine.choose(self._pick())
            if not chunks:
                return None
            plan = StepPlan(tuple(chunks), tuple(preempted))
            try:
                self.cache.reserve(plan)
            except CapacityError as error:
                if ahead:
                    return None
                self._make_room(error, preempted)
                continue
            self._note(chunks)
            self._in_flight.append({c.request.id for c in chunks})
            return plan

    def _admit(self) -> None:
        """Admit from the head of the queue for as long as sequences and pages allow."""
        room = self._max_running - sum(1 + t.num_forks for t in self.running.values())
        if not self.waiting or room < 1:
            return
        running = self.running.values()
        available = self.admission.available_pages(running)
        while self.waiting:
            request = self.waiting[0]
            siblings = self.siblings.get(request.id, [])
            try:
                ticket = self.admission.admit(request, siblings, room, available, running)
            except Exception as error:
                blame(error, (request.id,))
                raise
            if ticket is None:
                if not self.running:  # cannot happen while check_fits and the cache agree
                    self.waiting.pop(0)
                    self._finish(request, Finish("error", "KV memory is held by no request"))
                    continue
                return
            self.waiting.pop(0)
            self.running[request.id] = ticket
            room -= 1 + ticket.num_forks
            available -= ticket.needed_pages + ticket.fork_pages
            self._orphan(request.id, keep=ticket.num_forks)

    def _pick(self) -> list[Chunk]:
        """Chunks of one step, DECODE ones first."""
        tickets = [t for t in self.running.values() if not t.awaits_last]
        decodes = [t for t in tickets if t.decodes]
        prefills = [t for t in tickets if not t.decodes]
        budget = self.config.max_num_batched_tokens
        if not prefills:
            return [t.decode_chunk() for t in decodes]
        if not decodes:
            return self._fill(prefills, budget)
        may_stall = self._stall_steps < self.config.max_decode_stall_steps
        if not self.config.mix:
            return (
                self._fill(prefills, budget) if may_stall else [t.decode_chunk() for t in decodes]
            )
        chunks = self._fill(prefills, budget - len(decodes))
        is_head_stuck = not chunks or chunks[0].request is not prefills[0].request
        if is_head_stuck and self._stall_steps == 0:
            return self._fill(prefills, budget)
        return [t.decode_chunk() for t in decodes] + chunks

    def _fill(self, prefills: list[Ticket], left: int) -> list[Chunk]:
        """Prefill chunks within `left` tokens, in order of admission.

        A run that must be whole and is longer than the budget is alone in its step.
        """
        budget = self.config.max_num_batched_tokens
        chunks: list[Chunk] = []
        for ticket in prefills:
            if left <= 0:
                break
            try:
                size = ticket.chunk_tokens(left, budget)
                is_alone = size > budget
                if size > left and not (is_alone and not chunks and left == budget):
                    continue
                chunks.append(self._chunk(ticket, size))
            except Exception as error:  # a method's own code is asked here
                blame(error, (ticket.request.id,))
                raise
            left -= size
        return chunks

    def _chunk(self, ticket: Ticket, size: int) -> Chunk:
        request = ticket.request
        if ticket.replays:
            return Chunk(request, ticket.replays[0], request.prompt_len, Purpose.REPLAY, False)
        start = request.computed
        stop = start + size
        samples = stop == len(request.tokens)
        forks: tuple[Request, ...] = ()
        if stop == request.prompt_len and samples and not ticket.planned_replays():
            forks = tuple(self.siblings.get(request.id, ()))
        tokens = tuple(request.tokens[start:stop])
        return Chunk(request, tokens, start, Purpose.PREFILL, samples, forks)

    def finishes_prompt(self, chunk: Chunk) -> bool:
        """Whether nothing of its request's prompt is left to run behind a chunk, nor again."""
        ticket = self.running.get(chunk.request.id)
        return ticket is not None and ticket.finishes_prompt(chunk)

    def _note(self, chunks: list[Chunk]) -> None:
        """Count the steps in which decodes stood by."""
        has_decode = chunks[0].purpose is Purpose.DECODE
        waits = not has_decode and any(t.decodes for t in self.running.values())
        self._stall_steps = self._stall_steps + 1 if waits else 0

    def _make_room(self, error: CapacityError, preempted: list[int]) -> None:
        """Preempt the newest request; one that is alone and still lacks pages cannot be served."""
        if self.config.under_pressure == "shrink" and self._shrink_one():
            return
        newest = max(self.running.values(), key=lambda t: _order(t.request))
        if len(self.running) == 1:
            message = f"{error}; its method asked for less memory than it uses"
            self._finish(newest.request, Finish("error", message))
            return
        preempted.append(newest.request.id)
        self._preempt(newest)

    def _shrink_one(self) -> bool:
        """Let the request that holds most of those that decode retain less; False if none can."""
        decoding = [t.request for t in self.running.values() if t.decodes]
        decoding.sort(key=lambda r: (-self.cache.usage(r.id).pages, _order(r)))
        for request in decoding:
            free = self.cache.free_pages()
            try:
                self.shrink(request)
            except Exception as error:
                blame(error, (request.id,))
                raise
            if self.cache.free_pages() > free:
                self.num_shrinks += 1
                return True
        return False

    def _preempt(self, ticket: Ticket) -> None:
        request = ticket.request
        self._drop(ticket, preempted=True)
        request.computed = 0
        request.parent = None
        self.num_preemptions += 1
        insort(self.waiting, request, key=_order)

    # ── after a step ──────────────────────────────────────────────────────────────────────────────

    def commit(self, plan: StepPlan, samples: Mapping[int, Sample]) -> None:
        """`advance`, then `book`: for a step whose samples are known when it is over."""
        self.advance(plan)
        self.book(plan, samples)

    def advance(self, plan: StepPlan) -> bool:
        """Note that a step is under way; what it samples is UNKNOWN until it is booked.

        Requests that ended since it was planned are passed over, here and in `book`. False when all
        have: there is nothing to book.
        """
        live = [c for c in plan.chunks if c.request.id in self.running]
        for chunk in live:
            try:
                self.running[chunk.request.id].advance(chunk)
            except Exception as error:
                blame(error, (chunk.request.id,))
                raise
            if chunk.samples:
                chunk.request.tokens.append(UNKNOWN)
        if not live:
            del self._in_flight[-1:]
        return bool(live)

    def book(self, plan: StepPlan, samples: Mapping[int, Sample]) -> None:
        """Forks, new tokens, ends of a step. `samples` is keyed by request id."""
        for chunk in plan.chunks:
            ticket = self.running.get(chunk.request.id)
            if ticket is None:
                continue
            try:
                self._book(ticket, chunk, samples)
            except Exception as error:
                blame(error, (chunk.request.id,))
                raise
        del self._in_flight[:1]

    def _book(self, ticket: Ticket, chunk: Chunk, samples: Mapping[int, Sample]) -> None:
        for sibling in chunk.forks:
            self._fork(ticket, sibling, samples[sibling.id])
        if chunk.ends_prompt:
            self._orphan(chunk.request.id)
        if chunk.samples:
            placeholder = chunk.request.tokens.pop()
            assert placeholder == UNKNOWN, "booked out of order"
            finish = self._append(chunk.request, samples[chunk.request.id])
            if finish is not None:
                self._finish(chunk.request, finish)
                return
        self.quarantine.advanced(chunk.request)
        if ticket.decodes and not ticket.is_steady:  # known once the token is appended
            self.admission.settle(ticket)

    def _append(self, request: Request, sample: Sample) -> Finish | None:
        if sample.error is not None:
            return Finish("error", sample.error)
        request.tokens.append(sample.token)
        try:
            return self.sink.push(request, sample)
        except Exception as error:
            blame(error, (request.id,))
            raise

    def _fork(self, parent: Ticket, sibling: Request, sample: Sample) -> None:
        """The sibling takes its own first token and, unless that ends it, the parent's rows."""
        waiting = self.siblings[parent.request.id]
        finish = self._append(sibling, sample)
        if finish is not None:
            waiting.remove(sibling)
            sibling.parent = None
            self._finish(sibling, finish)
            return
        ticket = self.admission.fork(parent, sibling)
        self.cache.fork(parent.request.id, sibling.id)
        waiting.remove(sibling)  # last: whatever fails above leaves it where it is found again
        sibling.parent = None
        sibling.computed, sibling.saved = sibling.prompt_len, parent.request.saved
        self.running[sibling.id] = ticket
        self.sink.forked(parent.request, sibling)

    def recover(self, suspects: Sequence[int], message: str) -> None:
        """A step failed part way: end the suspect, run everything else anew from its tokens.

        Several suspects (none named: all in the step) are run one by one from here on, until they
        are past where it failed; the one that fails alone is ended.
        """
        running = [t.request for t in self.running.values()]
        ids = set(suspects) or set().union(*self._in_flight) or {r.id for r in running}
        self._in_flight.clear()
        for request in running:  # what a step under way samples is never booked
            while request.tokens[-1] == UNKNOWN:
                request.tokens.pop()
        if not ids and self.waiting:
            ids = {self.waiting[0].id}
        for ticket in list(self.running.values()):
            if len(ids) > 1 or ticket.request.id not in ids:
                if ticket.request.id in ids:
                    self.quarantine.suspect(ticket.request)
                self._preempt(ticket)
        if len(ids) == 1:
            queues = (self.waiting, *self.siblings.values())
            everyone = [*running, *(r for queue in queues for r in queue)]
            for request in everyone:
                if request.id in ids:
                    self._end_faulty(request, message)
                    return

    def _end_faulty(self, request: Request, message: str) -> None:
        for queue in (self.waiting, *self.siblings.values()):
            if request in queue:
                queue.remove(request)
        self._finish(request, Finish("error", message))

    def _finish(self, request: Request, finish: Finish) -> None:
        self.sink.end(request, finish)
        self.quarantine.forget(request)
        if request.id in self.running:
            self.prefixes.keep(request, finish)
            self._drop(self.running[request.id], preempted=False)
        self._orphan(request.id)

    def _drop(self, ticket: Ticket, *, preempted: bool) -> None:
        request = ticket.request
        del self.running[request.id]
        self.cache.release(request.id)
        self.admission.drop(ticket)
        self.sink.forget(request, preempted=preempted)
