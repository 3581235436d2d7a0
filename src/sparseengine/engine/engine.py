"""The engine: one step schedules, runs, ends the step and books the result."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from dataclasses import replace

import torch

from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Request, StepPlan
from sparseengine.engine.collector import Collector, new_family
from sparseengine.engine.controller import Controller
from sparseengine.engine.faults import blamed, describe, is_fatal
from sparseengine.engine.intake import Intake, Submission
from sparseengine.engine.outputs import Finish, RequestOutput
from sparseengine.engine.pending import Pending
from sparseengine.engine.runner import Runner
from sparseengine.engine.scheduler import Scheduler
from sparseengine.engine.stats import StepStats
from sparseengine.errors import RequestError

_COMPILE_WAIT_S = 0.005


class Engine:
    """Runs requests to their end, many at a time. Not thread-safe: one caller drives `step`.

    overlap: the host plans and books while the device runs; tokens are the same.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        scheduler: Scheduler,
        runner: Runner,
        controller: Controller,
        collector: Collector,
        overlap: bool = False,
    ) -> None:
        self.intake = intake
        self.scheduler = scheduler
        self.runner = runner
        self.controller = controller
        self.collector = collector
        self.overlap = overlap
        self.num_steps = 0
        self.stats = StepStats()
        self._pending: Pending | None = None
        self._live: dict[str, Submission] = {}
        self._compiling: list[Submission] = []  # queued once their grammars are compiled

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """One forward pass; returns requests that ended, and streamed ones that grew."""
        if self._compiling and not self.scheduler.has_work and self._pending is None:
            grammars = [s.grammar for s in self._compiling if s.grammar is not None]
            futures.wait(grammars, _COMPILE_WAIT_S, futures.FIRST_COMPLETED)  # nothing else to do
        self._queue_compiled()
        return self._step_ahead() if self.overlap else self._step()

    def _step(self) -> list[RequestOutput]:
        plan = self.scheduler.schedule()
        if plan is not None:
            samples = self.runner.run(plan)
            self._end_step(plan)
            self.scheduler.commit(plan, samples)
            self._count(plan)
        return self.report()

    def _step_ahead(self) -> list[RequestOutput]:
        """Launch a step, then book the one before it, which the device has meanwhile finished.

        Tokens that the host has not seen go from step to step on the device. A request that turns
        out to have ended was run once too often: what that sampled is dropped.
        """
        before = self._pending
        plan = None
        if before is None or self._may_run_ahead(before):
            plan = self.scheduler.schedule(ahead=before is not None)
        self._pending = None if plan is None else self.runner.launch(plan, before)
        if plan is not None:
            self._end_step(plan)
            self._count(plan)
        if before is not None:
            self.scheduler.book(before.plan, self.runner.collect(before))
        if plan is not None and not self.scheduler.advance(plan):
            self._pending = None
        return self.report()

    def _end_step(self, plan: StepPlan) -> None:
        """Prompts that are done are kept before anything is evicted from them, and afterwards."""
        prefixes = self.scheduler.prefixes
        for chunk in plan.chunks:
            if chunk.ends_prompt:
                prefixes.prompt_done(chunk.request)
        self.controller.end_step(plan)
        for chunk in plan.chunks:
            if chunk.request.sparse.save_prefix and self.scheduler.finishes_prompt(chunk):
                prefixes.prompt_cut(chunk.request)

    def _count(self, plan: StepPlan) -> None:
        self.num_steps += 1
        replays = None if self.runner.graphs is None else self.runner.num_replays
        self.stats.note(plan, replays)

    def _may_run_ahead(self, pending: Pending) -> bool:
        """Whether the next step can be planned before the tokens of this one are known."""
        if self.scheduler.quarantine.is_active:  # one step at a time shows who fails
            return False
        return not any(
            c.forks
            or c.request.sparse.record
            or self.runner.sampler.needs_last(c.request)
            or self.controller.methods[c.request.method].needs_tokens(c.request)
            for c in pending.plan.chunks
        )

    @property
    def has_work(self) -> bool:
        is_running = self.scheduler.has_work or self._pending is not None
        return is_running or self.collector.has_news or bool(self._compiling)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        sparse: SparseParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str = "",
    ) -> str:
        """Check and queue a prompt; returns its request id.

        `stream` makes every step that adds tokens return the request, not only the last one. Stored
        prefixes are shared between requests of one `cache_salt`. Raises
        `RequestError` (`CapacityError` when it can never fit); the engine goes on serving.
        """
        submission = self.prepare(
            prompt_token_ids,
            sampling,
            sparse,
            prompt=prompt,
            request_id=request_id,
            stream=stream,
            cache_salt=cache_salt,
        )
        self.submit(submission)
        return submission.request_id

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        sparse: SparseParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str = "",
    ) -> Submission:
        """The checks of `add_request` alone."""
        if request_id is not None and request_id in self._live:
            raise RequestError(f"request_id={request_id!r} is in use by a request that still runs")
        submission = self.intake.prepare(
            prompt_token_ids,
            sampling,
            sparse,
            prompt=prompt,
            request_id=request_id,
            stream=stream,
            cache_salt=cache_salt,
        )
        self.scheduler.prefixes.check(submission.requests[0])
        self.scheduler.admission.check_fits(submission.requests[0])
        while submission.request_id in self._live:  # a caller's own id looks like one of ours
            submission = replace(submission, request_id=f"{submission.request_id}+")
        return submission

    def submit(self, submission: Submission) -> None:
        """Queue a prepared prompt."""
        first = submission.requests[0]
        family = new_family(
            submission.request_id,
            submission.prompt,
            list(first.tokens),
            len(submission.requests),
            stream=submission.stream,
        )
        self._live[submission.request_id] = submission
        self.collector.open(family, submission.requests)
        for request, extras in zip(submission.requests, submission.extras, strict=True):
            self.runner.sampler.add(request, extras)
        grammar = submission.grammar
        if grammar is not None and (not grammar.done() or grammar.exception() is not None):
            self._compiling.append(submission)  # one that failed meanwhile ends in the next step
            return
        for request in submission.requests:
            self._queue(request)

    def _queue_compiled(self) -> None:
        """Queue requests whose grammar is compiled by now; end those whose cannot be."""
        waiting, self._compiling = self._compiling, []
        for submission in waiting:
            grammar = submission.grammar
            if grammar is not None and not grammar.done():
                self._compiling.append(submission)
                continue
            error = None if grammar is None else grammar.exception()
            for request in submission.requests:
                if error is None:
                    self._queue(request)
                else:
                    self.collector.end(request, Finish("error", str(error)))

    def _queue(self, request: Request) -> None:
        """A method's own code is asked for its demand here: a fault in it ends the request."""
        try:
            self.scheduler.add(request)
        except Exception as error:
            if is_fatal(error):
                raise
            self.collector.end(request, Finish("error", describe(error)))

    def is_compiling(self, request_id: str) -> bool:
        """Whether a request still waits for its grammar."""
        return any(s.request_id == request_id for s in self._compiling)

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; unknown or finished ids are ignored.

        Its memory is free when this returns; the next `step` returns its output.
        """
        submission = self._live.get(request_id)
        if submission in self._compiling:
            self._compiling.remove(submission)
            for request in submission.requests:
                self.collector.end(request, Finish("abort"))
            return
        for request in reversed(submission.requests if submission else ()):
            self.scheduler.abort(request.id)

    def discard(self) -> None:
        """Forget outputs that nobody waits for, after `abort`."""
        self.report()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges under vLLM's names."""
        counters, cache = self.collector.counters, self.scheduler.cache
        total = cache.total_pages()
        found: dict[str, float] = {
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": self.scheduler.num_waiting,
            "kv_cache_usage_perc": 1.0 - cache.free_pages() / total if total else 0.0,
            "prompt_tokens": counters["prompt_tokens"],
            "generation_tokens": counters["generation_tokens"],
            "num_preemptions": counters["preemptions"],
            "num_shrinks": self.scheduler.num_shrinks,
            "num_steps": self.num_steps,
            **self.stats.values(),
            **self.scheduler.prefixes.values(),
        }
        for reason in ("stop", "length", "abort", "error"):
            found[f"request_success_{reason}"] = counters[f"finished_{reason}"]
        return found

    def reset_prefix_cache(self) -> bool:
        """Forget what is kept for later requests; what runs goes on."""
        self.scheduler.cache.forget_kept()
        return True

    def recover(self, error: Exception) -> None:
        """After `step` raised: end the request that is to blame, let all others go on."""
        self._pending = None
        self.scheduler.recover(blamed(error), describe(error))

    def report(self) -> list[RequestOutput]:
        """Outputs that ended or, streamed, grew since the last call."""
        outputs = self.collector.take()
        for output in outputs:
            if output.finished:
                del self._live[output.request_id]
        return outputs
