"""Where tokens go: text, stop conditions, outputs, counters. The scheduler's sink."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sparseengine.core.plan import Request
from sparseengine.engine.controller import Controller
from sparseengine.engine.detokenize import Detokenizer
from sparseengine.engine.outputs import (
    CompletionOutput,
    Finish,
    Logprob,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    Sample,
)
from sparseengine.engine.record import token_bytes
from sparseengine.engine.runner import Runner

_AROUND = 12  # tokens shown on both sides of where a prompt leaves what is stored


@dataclass(slots=True, eq=False)
class Family:
    """A request as its caller sees it: the n completions of one prompt."""

    output: RequestOutput
    stream: bool
    members: dict[int, CompletionOutput] = field(default_factory=dict)
    texts: dict[int, Detokenizer] = field(default_factory=dict)


class Collector:
    """Gathers what requests produce and says when one is complete.

    `backend` is the `tokenizers.Tokenizer` (None: no text); `eos_ids` end a request that does not
    ignore them.
    """

    def __init__(
        self, controller: Controller, runner: Runner, backend: Any, eos_ids: Iterable[int]
    ) -> None:
        self.controller = controller
        self.runner = runner
        self.backend = backend
        self.eos_ids = frozenset(eos_ids)
        self._token_bytes = token_bytes(controller.model)
        self.counters: Counter[str] = Counter()
        self._families: dict[int, Family] = {}
        self._changed: dict[str, Family] = {}

    def open(self, family: Family, requests: Iterable[Request]) -> None:
        """Expect the tokens of a prompt's requests, in order of their index."""
        for request in requests:
            family.members[request.id] = family.output.outputs[len(family.members)]
            self._families[request.id] = family
            p = request.sampling
            if self.backend is not None and p.detokenize:
                family.texts[request.id] = Detokenizer(
                    self.backend,
                    stop=p.stop,
                    skip_special_tokens=p.skip_special_tokens,
                    include_stop=p.include_stop_str_in_output,
                    min_tokens=p.min_tokens,
                )
        self.counters["prompt_tokens"] += len(family.output.prompt_token_ids)

    @property
    def has_news(self) -> bool:
        """Something that `take` would return, for example the output of an aborted request."""
        return bool(self._changed)

    def take(self) -> list[RequestOutput]:
        """Outputs that ended since the last call, and streamed ones that grew."""
        changed = [f.output for f in self._changed.values() if f.stream or f.output.finished]
        self._changed.clear()
        return changed

    # ── the scheduler's sink ──────────────────────────────────────────────────────────────────────

    def push(self, request: Request, sample: Sample) -> Finish | None:
        """Book a token; a `Finish` when it is the request's last."""
        family = self._families[request.id]
        completion = family.members[request.id]
        completion.token_ids.append(sample.token)
        self.counters["generation_tokens"] += 1
        metrics = family.output.metrics
        if metrics is not None and metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        if sample.prompt_logprobs is not None:
            family.output.prompt_logprobs = [
                None if row is None else self._decoded(row) for row in sample.prompt_logprobs
            ]
        if sample.logprobs is not None:
            self._add_logprobs(completion, sample.token, sample.logprobs)
        finish = self._stop_token(request, sample.token)
        text = family.texts.get(request.id)
        if text is not None:
            if finish is None or request.sampling.include_stop_str_in_output:
                stop = text.push(sample.token)
                finish = finish or (None if stop is None else Finish("stop", stop))
            completion.text = text.text
        completion.sparse = self.controller.sparse_output(request)
        if finish is None and request.num_generated >= request.max_tokens:
            finish = Finish("length")
        self._changed[family.output.request_id] = family
        return finish

    def end(self, request: Request, finish: Finish) -> None:
        family = self._families.pop(request.id)
        completion = family.members[request.id]
        text = family.texts.get(request.id)
        if text is not None:
            is_cut = finish.reason == "stop" and isinstance(finish.stop_reason, str)
            if not is_cut and finish.reason != "error":
                stop = text.finish()
                finish = finish if stop is None else Finish("stop", stop)
            completion.text = text.text
        completion.finish_reason, completion.stop_reason = finish
        completion.sparse = self.controller.sparse_output(request)
        self._note_kv(family, request)
        self._note_cache(family.output, request)
        self.runner.forget(request.id)
        self.counters[f"finished_{finish.reason}"] += 1
        if all(c.finished() for c in family.members.values()):
            family.output.finished = True
            if family.output.metrics is not None:
                family.output.metrics.finished_time = time.monotonic()
        self._changed[family.output.request_id] = family

    def forked(self, parent: Request, request: Request) -> None:
        self.controller.recorder.fork(parent, request)

    def forget(self, request: Request, *, preempted: bool) -> None:
        self.controller.forget(request.id)
        self.controller.recorder.forget(request.id)
        if preempted:
            self.counters["preemptions"] += 1
            metrics = self._families[request.id].output.metrics
            if metrics is not None:
                metrics.num_preemptions += 1

    # ── details ───────────────────────────────────────────────────────────────────────────────────

    def _stop_token(self, request: Request, token: int) -> Finish | None:
        """EOS first: its stop_reason is None, as vLLM's; a stop id names itself."""
        p = request.sampling
        if request.num_generated < p.min_tokens:
            return None
        if token in self.eos_ids and not p.ignore_eos:
            return Finish("stop")
        return Finish("stop", token) if token in p.stop_token_ids else None

    def _note_kv(self, family: Family, request: Request) -> None:
        """What its rows hold at the end, beside what dense rows would."""
        metrics = family.output.metrics
        if metrics is not None and request.computed:
            metrics.kv_bytes += self.controller.cache.usage(request.id).bytes
            metrics.dense_kv_bytes += request.computed * self._token_bytes

    def _note_cache(self, output: RequestOutput, request: Request) -> None:
        """What was found stored, and why not more; with the words around a fork in the text."""
        if request.cached is None:
            return
        output.num_cached_tokens, output.cache_miss = request.cached, request.miss
        miss = request.miss
        if miss is not None and miss.at is not None and self.backend is not None:
            around = request.tokens[max(0, miss.at - _AROUND) : miss.at + _AROUND]
            text = self.backend.decode(around, skip_special_tokens=False)
            output.cache_miss = miss._replace(detail=text)

    def _add_logprobs(self, completion: CompletionOutput, token: int, row: Logprobs) -> None:
        if completion.logprobs is None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        completion.logprobs.append(self._decoded(row))
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + row[token].logprob

    def _decoded(self, row: Logprobs) -> Logprobs:
        if self.backend is None:
            return row
        return {t: Logprob(p.logprob, p.rank, self._token_text(t)) for t, p in row.items()}

    def _token_text(self, token: int) -> str:
        text: str = self.backend.decode([token], skip_special_tokens=False)
        return text


def new_family(
    request_id: str, prompt: str | None, prompt_token_ids: list[int], n: int, *, stream: bool
) -> Family:
    """An empty output with n completions."""
    output = RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[CompletionOutput(index=i) for i in range(n)],
        metrics=RequestMetrics(arrival_time=time.monotonic()),
    )
    return Family(output, stream)
