"""Structured outputs: grammars compiled beside the engine loop, and their masks on logits.

A grammar that cannot be compiled, or not within the time limit, fails the requests that ask for it
and no others. Compiled grammars, and refusals, are kept: one per specification, for the engine's
one vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparseengine.core.params import StructuredOutputs
from sparseengine.core.plan import Request
from sparseengine.engine.grammars import Backend, Grammar, Matcher, available, make_backend
from sparseengine.errors import RequestError

TIMEOUT_S = 10.0
_MAX_WORKERS = 2
_MAX_MASK_S = 2.0
_MAX_STUCK = 4  # threads that are left to compile grammars nobody waits for any more
_MAX_GRAMMARS = 256
_MAX_BYTES = 512 << 20


@dataclass(slots=True, eq=False)
class _Job:
    spec: StructuredOutputs
    future: Future[Grammar]
    is_settled: bool = False


class GrammarCompiler:
    """Compiles grammars in threads of its own and keeps them. Thread-safe.

    tokenizer: None when the model has none; every grammar is refused then. stop_ids: what may
    follow a complete text.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        stop_ids: Sequence[int],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.timeout_s = timeout_s
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = tuple(stop_ids)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._backends: dict[str, Backend] = {}
        self._cache: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._jobs: deque[_Job] = deque()
        self._workers = 0
        self._stuck = 0

    def start(self, spec: StructuredOutputs) -> Future[Grammar]:
        """The compiled grammar, some day: the future ends with it or with a `RequestError`.

        Raises `RequestError` at once when no grammar can be compiled here.
        """
        if self._tokenizer is None:
            raise RequestError("structured_outputs need a tokenizer, and this model has none")
        if not self._stop_ids:
            raise RequestError(
                "structured_outputs need a token that ends a text, and this model names none "
                "(eos_token_id in config.json or generation_config.json)"
            )
        available(spec.backend)
        spec = replace(spec, after=None)  # the grammar is the same wherever it begins
        with self._lock:
            future = self._cache.get(spec)
            if future is not None:
                self._cache.move_to_end(spec)
                return future
            if self._stuck >= _MAX_STUCK:
                raise RequestError(self._busy())
            future = Future()
            future.set_running_or_notify_cancel()  # it is shared: nobody may cancel it
            self._cache[spec] = future
            self._jobs.append(_Job(spec, future))
            self._add_worker()
        return future

    def get(self, spec: StructuredOutputs) -> Grammar:
        """Wait for a grammar. Raises `RequestError`."""
        return result_of(self.start(spec))

    # ── threads ───────────────────────────────────────────────────────────────────────────────────

    def _add_worker(self) -> None:
        """With the lock held."""
        if self._jobs and self._workers < _MAX_WORKERS:
            self._workers += 1
            threading.Thread(target=self._work, name="grammar", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._workers -= 1
                    return
                job = self._jobs.popleft()
            try:
                outcome = self._compile(job)
            except BaseException:  # a fault of a library: nobody may wait for ever
                fault = RequestError("structured_outputs: the grammar compiler broke down")
                if self._settle(job, fault):
                    with self._lock:
                        self._workers -= 1
                        self._add_worker()
                raise
            if not self._settle(job, outcome):
                return  # given up: another thread may have this one's place

    def _compile(self, job: _Job) -> Grammar | RequestError:
        """Try the backends in turn."""
        problems = []
        for name in available(job.spec.backend):
            try:
                backend = self._backend(name)
            except (ValueError, RuntimeError, TypeError) as error:
                problems.append(f"{name} cannot read the tokenizer: {error}")
                continue
            timer = threading.Timer(self.timeout_s, self._give_up, (job,))
            timer.daemon = True
            timer.start()
            try:
                grammar = backend.compile(job.spec)
                self._try(grammar)
                return grammar
            except ValueError as error:
                problems.append(f"{name}: {error}")
            finally:
                timer.cancel()
        text = "; ".join(problems)
        return RequestError(f"structured_outputs.{job.spec.kind} cannot be used: {text}")

    def _try(self, grammar: Grammar) -> None:
        """The first mask, here rather than in the loop. Raises ValueError when it cannot begin."""
        bits = torch.zeros(-(-self._vocab_size // 32), dtype=torch.int32)
        try:
            grammar.matcher().fill(bits)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if not bits.any():
            raise ValueError("no text fits it")

    def _backend(self, name: str) -> Backend:
        with self._making:
            if name not in self._backends:
                self._backends[name] = make_backend(
                    name, self._tokenizer, self._vocab_size, self._stop_ids
                )
            return self._backends[name]

    def _settle(self, job: _Job, outcome: Grammar | RequestError) -> bool:
        """End a job with what its thread found; False when it had been given up."""
        with self._lock:
            if job.is_settled:
                self._stuck -= 1
                self._add_worker()
                return False
            job.is_settled = True
        _end(job.future, outcome)
        if not isinstance(outcome, RequestError):
            self._evict()
        return True

    def _give_up(self, job: _Job) -> None:
        """The time is over: its thread cannot be stopped, so another takes its place."""
        dropped: list[_Job] = []
        with self._lock:
            if job.is_settled:
                return
            job.is_settled = True
            self._workers -= 1
            self._stuck += 1
            if self._stuck < _MAX_STUCK:
                self._add_worker()
            else:
                dropped, self._jobs = list(self._jobs), deque()
                for other in dropped:
                    other.is_settled = True
                    del self._cache[other.spec]
        kind, limit = job.spec.kind, f"{self.timeout_s:g} s"
        _end(
            job.future,
            RequestError(
                f"structured_outputs.{kind} takes more than {limit} to compile; make it smaller, "
                "or raise grammar_timeout_s (--grammar-timeout-s)"
            ),
        )
        for other in dropped:
            _end(other.future, RequestError(self._busy()))

    def _busy(self) -> str:
        return (
            f"structured_outputs: grammars that take more than {self.timeout_s:g} s keep all "
            "compilers busy; try again later"
        )

    def _evict(self) -> None:
        """Forget the grammars used longest ago, beyond a number and a size."""
        with self._lock:
            sizes = {s: f.result().size_bytes for s, f in self._cache.items() if _is_good(f)}
            total = sum(sizes.values())
            for spec in list(self._cache):
                if len(self._cache) <= _MAX_GRAMMARS and total <= _MAX_BYTES:
                    return
                if self._cache[spec].done():
                    total -= sizes.get(spec, 0)
                    del self._cache[spec]


def _is_good(future: Future[Grammar]) -> bool:
    return future.done() and future.exception() is None


def _end(future: Future[Grammar], outcome: Grammar | RequestError) -> None:
    if isinstance(outcome, RequestError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def result_of(future: Future[Grammar]) -> Grammar:
    """Wait for a grammar. Raises a `RequestError` of its own: the future's is shared."""
    error = future.exception()
    if error is not None:
        raise RequestError(str(error))
    return future.result()


class Constraint:
    """One text's way through its grammar: masks for the logits of its next token.

    It follows `Request.tokens`, so a request that is preempted and run again goes on where it was.
    Once the grammar is complete, and once a stop token was taken, only stop tokens may follow.
    is_free: says of the tokens generated so far whether the grammar has yet to begin behind them.
    """

    def __init__(
        self,
        grammar: Future[Grammar],
        vocab_size: int,
        stop_ids: Sequence[int],
        is_free: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.grammar = grammar
        self._is_free = is_free
        self._matcher: Matcher | None = None
        self._num_seen = 0
        self._has_stopped = False
        self.error: str | None = None  # why nothing may follow any more
        self._bits = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
        self._stop_bits = torch.zeros_like(self._bits)
        for token in stop_ids:
            self._stop_bits[token // 32] |= _BITS[token % 32]

    def mask(self, row: Tensor, request: Request) -> bool:
        """Forbid in `row` [V], in place, what may not come next. True when nothing but a stop may.

        Forbids all of them once there is an `error`, which ends the request.
        """
        self._follow(request)
        if self.error is not None:
            row.fill_(float("-inf"))
            return False
        bits = self._bits.to(row.device, non_blocking=True)
        shifts = torch.arange(32, dtype=torch.int32, device=row.device)
        allowed = ((bits[:, None] >> shifts) & 1).flatten()[: row.shape[0]]
        row.masked_fill_(allowed == 0, float("-inf"))
        return not bool((self._bits & ~self._stop_bits).any())

    def _follow(self, request: Request) -> None:
        """Take in the tokens since the last call and find what may come next."""
        if self._matcher is None:
            self._matcher = result_of(self.grammar).matcher()
        for token in request.tokens[request.prompt_len + self._num_seen :]:
            self._num_seen += 1
            if self._is_free is not None:
                seen = request.tokens[request.prompt_len : request.prompt_len + self._num_seen]
                self._is_free = self._is_free if self._is_free(seen) else None
                continue
            is_stop = token >= 0 and bool(self._stop_bits[token // 32] & _BITS[token % 32])
            if is_stop or self._has_stopped:
                self._has_stopped = True
            elif self.error is None and not self._matcher.accept(token):
                self.error = f"structured_outputs: token {token} does not fit the grammar"
        if self._is_free is not None:
            torch.bitwise_not(self._stop_bits, out=self._bits)
        elif self._has_stopped:
            self._bits.copy_(self._stop_bits)
        elif self.error is None:
            self._fill(self._matcher)

    def _fill(self, matcher: Matcher) -> None:
        begin = time.monotonic()
        try:
            matcher.fill(self._bits)
        except RuntimeError as error:  # a limit of the library
            self.error = f"structured_outputs: the grammar is too complex: {error}"
        else:
            took = time.monotonic() - begin
            if took > _MAX_MASK_S:
                self.error = (
                    "structured_outputs: the grammar is too complex: finding what may come next "
                    f"took {took:.1f} s, while other requests waited (limit {_MAX_MASK_S:g} s)"
                )


_BITS = [1 << i for i in range(31)] + [-(1 << 31)]
