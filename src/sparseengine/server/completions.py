"""POST /v1/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sparseengine.async_llm import Arrived, Stream
from sparseengine.core.params import SamplingParams
from sparseengine.engine.record import SparseOutput
from sparseengine.server.answers import DONE, answer, data_event, event_stream
from sparseengine.server.errors import ApiError, not_finished
from sparseengine.server.logprobs import CompletionLogprobs, prompt_rows
from sparseengine.server.records import Record
from sparseengine.server.sampling import common_fields
from sparseengine.server.schemas import CompletionBody
from sparseengine.server.service import Service, record_of

_DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One answer as it grows."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sparse: SparseOutput | None = None


class CompletionJob:
    """One checked request: its prompts, its parameters, and the shapes of its answers."""

    def __init__(self, service: Service, request: Request, body: CompletionBody) -> None:
        self.service = service
        self.request = request
        self.body = body
        self.model = service.check_model(body.model)
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.scores_only = body.echo and body.max_tokens == 0
        self.prompts: list[list[int]] = []
        self.texts: list[str] = []

    async def prepare(self) -> None:
        """Every check that needs no engine."""
        body = self.body
        if body.best_of not in (None, body.n):
            raise ApiError(
                400,
                f"best_of={body.best_of} is not supported other than equal to n={body.n}",
                param="best_of",
            )
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(
                400, "max_tokens=0 generates nothing; it is for echo=true", param="max_tokens"
            )
        self.sampling = self._sampling()
        self.sparse = self.service.sparse(body.sparse)
        given = self._given_prompts()
        self.service.check_room(len(given) * self.sampling.n)
        for prompt in given:
            if isinstance(prompt, str):
                ids = await self.service.encode(prompt, special=body.add_special_tokens)
            else:
                ids = prompt
            if not ids:
                raise ApiError(
                    400, "the prompt is empty; it must hold at least one token", param="prompt"
                )
            self.service.check_length(len(ids), body.max_tokens)
            self.prompts.append(ids)
            self.texts.append(prompt if isinstance(prompt, str) else "")
        if body.echo:
            self._fill_texts(given)

    def _given_prompts(self) -> list[str | list[int]]:
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt=[] is not allowed; give a prompt", param="prompt")
        if isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    def _fill_texts(self, given: list[str | list[int]]) -> None:
        tokenizer = self.service.prompts.tokenizer
        vocab = self.service.info.vocab_size
        for i, prompt in enumerate(given):
            if not isinstance(prompt, str) and tokenizer is not None:
                if not all(0 <= t < vocab for t in prompt):
                    continue  # the engine says which one is wrong
                self.texts[i] = tokenizer.decode(prompt, skip_special_tokens=False)

    def _sampling(self) -> SamplingParams:
        body = self.body
        fields = common_fields(body)
        asked = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        fields["max_tokens"] = 1 if self.scores_only else asked
        if body.logprobs is not None:
            fields["logprobs"] = body.logprobs
            if body.echo:
                fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        return self.service.sampling(fields)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────

    async def respond(self) -> Response:
        if self.body.stream:
            return await event_stream(
                self._events(), lambda error: data_event(error.body()), last=DONE
            )
        return await answer(self.request, self._whole())

    async def _whole(self) -> dict[str, Any]:
        choices = self._choices()
        rows: dict[int, Any] = {}
        async with self._run() as stream:
            while news := await stream.next():
                for arrived in news:
                    self._open_prompt(choices, arrived, rows)
                    self._take(self._choice_of(choices, arrived), arrived)
        shown = [self._shown(c, rows.get(c.index // self.sampling.n)) for c in choices]
        return {**self._head(), "choices": shown, "usage": self._usage()}

    def _shown(self, c: _Choice, rows: Any) -> dict[str, Any]:
        text = c.text
        prompt = c.index // self.sampling.n
        if self.body.echo:
            text = self.texts[prompt] + text
        found: dict[str, Any] = {
            "index": c.index,
            "text": text,
            "logprobs": None if c.logprobs is None else c.logprobs.take(),
            "finish_reason": c.finish_reason,
            "stop_reason": c.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_rows(rows)
        if self.body.return_token_ids:
            found["token_ids"] = c.token_ids
            found["prompt_token_ids"] = self.prompts[prompt]
        if c.sparse is not None:
            found["sparse"] = c.sparse.to_dict()
        return found

    async def _events(self) -> AsyncIterator[str]:
        choices = self._choices()
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        head = {**self._head(), "usage": None} if with_usage else self._head()
        rows: dict[int, Any] = {}
        async with self._run() as stream:
            if self.body.echo and self.sampling.prompt_logprobs is None:
                for c in choices:
                    text = self.texts[c.index // self.sampling.n]
                    yield data_event({**head, "choices": [self._piece(c, text)]})
            while news := await stream.next():
                for arrived in news:
                    for c in self._open_prompt(choices, arrived, rows):
                        text = self.texts[arrived.prompt] if self.body.echo else ""
                        yield data_event({**head, "choices": [self._piece(c, text)]})
                    c = self._choice_of(choices, arrived)
                    shown = len(c.text)
                    self._take(c, arrived)
                    piece = self._piece(c, c.text[shown:])
                    if arrived.delta.sparse is not None:
                        piece["sparse"] = arrived.delta.sparse.to_dict()
                    if piece["text"] or piece["logprobs"] or "sparse" in piece:
                        usage = {"usage": self._usage()} if running else {}
                        yield data_event({**head, **usage, "choices": [piece]})
                    if c.finish_reason is not None:
                        last = self._piece(c, "", last=True)
                        yield data_event({**head, "choices": [last]})
        if with_usage:
            yield data_event({**self._head(), "choices": [], "usage": self._usage()})

    def _piece(self, c: _Choice, text: str, *, last: bool = False) -> dict[str, Any]:
        logprobs = None
        if c.logprobs is not None and c.logprobs.tokens:
            logprobs = c.logprobs.take()
        found: dict[str, Any] = {
            "index": c.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": c.finish_reason if last else None,
        }
        if last:
            found["stop_reason"] = c.stop_reason
        return found

    # ── details ───────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> Any:
        return self.service.running(
            record_of(self.request),
            self.prompts,
            self.sampling,
            self.sparse,
            self.body.cache_salt,
        )

    def _choices(self) -> list[_Choice]:
        wanted = self.body.logprobs is not None
        count = len(self.prompts) * self.sampling.n
        found = [_Choice(index=i) for i in range(count)]
        for c in found:
            if wanted:
                c.logprobs = CompletionLogprobs(self.body.return_tokens_as_token_ids)
        return found

    def _choice_of(self, choices: list[_Choice], arrived: Arrived) -> _Choice:
        return choices[arrived.prompt * self.sampling.n + arrived.delta.choice]

    def _open_prompt(
        self, choices: list[_Choice], arrived: Arrived, rows: dict[int, Any]
    ) -> list[_Choice]:
        """Book a prompt's log-probabilities; the choices whose echo they belong to."""
        found = arrived.delta.prompt_logprobs
        if found is None:
            return []
        rows[arrived.prompt] = found
        first, n = arrived.prompt * self.sampling.n, self.sampling.n
        opened = choices[first : first + n] if self.body.echo else []
        tokenizer = self.service.prompts.tokenizer
        decode = str if tokenizer is None else tokenizer.decode
        for c in opened:
            if c.logprobs is not None:
                c.logprobs.add_prompt(self.prompts[arrived.prompt], found, decode)
        return opened

    def _take(self, c: _Choice, arrived: Arrived) -> None:
        record_of(self.request).note(arrived)
        delta = arrived.delta
        if delta.finish_reason == "error":
            raise not_finished(delta.stop_reason)
        if not self.scores_only:
            c.text += delta.text
            c.token_ids += delta.token_ids
            if c.logprobs is not None and delta.logprobs:
                c.logprobs.add(delta.token_ids, delta.logprobs)
        if delta.sparse is not None:
            c.sparse = delta.sparse.added_to(c.sparse)
        if delta.finish_reason is not None:
            c.finish_reason, c.stop_reason = delta.finish_reason, delta.stop_reason

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self) -> dict[str, Any]:
        record = record_of(self.request)
        output = 0 if self.scores_only else record.output_tokens
        return usage(record, output)


def usage(record: Record, output: int) -> dict[str, Any]:
    """OpenAI's `usage`; `cache_miss` says why no more of the prompt was found stored."""
    prompt, details = record.prompt_tokens, {"cached_tokens": record.cached_tokens}
    if record.cache_miss is not None:
        details |= {"cache_miss": record.cache_miss._asdict()}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": details,
    }


async def completions(service: Service, request: Request, body: CompletionBody) -> Response:
    job = CompletionJob(service, request, body)
    await job.prepare()
    return await job.respond()


__all__ = ["CompletionJob", "Stream", "completions", "usage"]
