"""POST /v1/chat/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sparseengine.engine.messages import Delta
from sparseengine.server.answers import DONE, answer, data_event, event_stream
from sparseengine.server.completions import usage
from sparseengine.server.conversation import Asked, Conversation
from sparseengine.server.errors import ApiError
from sparseengine.server.logprobs import chat_logprobs
from sparseengine.server.messages_text import flatten_messages
from sparseengine.server.output import Event, MessageChoice, ReasoningDelta
from sparseengine.server.sampling import common_fields
from sparseengine.server.schemas import ChatBody
from sparseengine.server.service import Service
from sparseengine.server.tools import ArgumentsDelta, CallStart


class ChatJob:
    """One chat request and the shapes of its answers."""

    def __init__(self, service: Service, request: Request, body: ChatBody) -> None:
        self.conversation = Conversation(service, request)
        self.request = request
        self.body = body
        self.model = service.check_model(body.model)
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())

    async def prepare(self) -> None:
        body = self.body
        await self.conversation.prepare(
            Asked(
                stream=bool(self.body.stream),
                cache_salt=body.cache_salt,
                messages=flatten_messages(body.messages),
                sampling=self._fields(),
                sparse=body.sparse,
                tools=body.tools,
                tool_choice=body.tool_choice,
                parallel_tool_calls=body.parallel_tool_calls,
                template_kwargs=self._template_kwargs(),
                add_generation_prompt=body.add_generation_prompt
                and not body.continue_final_message,
                continue_final_message=body.continue_final_message,
            )
        )

    def _template_kwargs(self) -> dict[str, Any]:
        found = dict(self.body.chat_template_kwargs or {})
        if self.body.reasoning_effort is not None:
            found.setdefault("reasoning_effort", self.body.reasoning_effort)
        return found

    def _fields(self) -> dict[str, Any]:
        body = self.body
        fields = common_fields(body)
        asked = [m for m in (body.max_completion_tokens, body.max_tokens) if m is not None]
        fields["max_tokens"] = asked[0] if asked else None
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if body.add_special_tokens:
            raise ApiError(
                400,
                "add_special_tokens=true is not supported: the chat template writes them",
                param="add_special_tokens",
            )
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
        return fields

    async def respond(self) -> Response:
        if self.body.stream:
            return await event_stream(
                self._events(), lambda error: data_event(error.body()), last=DONE
            )
        return await answer(self.request, self._whole())

    # ── at once ───────────────────────────────────────────────────────────────────────────────────

    async def _whole(self) -> dict[str, Any]:
        talk = self.conversation
        rows = None
        async with talk.run() as stream:
            while news := await stream.next():
                for arrived in news:
                    choice, delta, _ = talk.take(arrived)
                    choice.logprobs += self._logprobs(delta)
                    rows = delta.prompt_logprobs or rows
        found = {
            **self._head("chat.completion"),
            "choices": [self._choice(c) for c in talk.choices],
            "usage": self._usage(),
        }
        if self.body.prompt_logprobs is not None:
            from sparseengine.server.logprobs import prompt_rows

            found["prompt_logprobs"] = prompt_rows(rows)
        if self.body.return_token_ids:
            found["prompt_token_ids"] = talk.prompt_ids
        return found

    def _choice(self, c: MessageChoice) -> dict[str, Any]:
        reader = c.reader
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if reader.calls and not reader.content else reader.content,
            "refusal": None,
        }
        if reader.reasoning and self.body.include_reasoning:
            message["reasoning_content"] = reader.reasoning
        if reader.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments or "{}"},
                }
                for call in reader.calls
            ]
        found: dict[str, Any] = {
            "index": c.index,
            "message": message,
            "logprobs": {"content": c.logprobs, "refusal": None} if self.body.logprobs else None,
            "finish_reason": finish_reason(c),
            "stop_reason": c.stop_reason,
        }
        if c.sparse is not None:
            found["sparse"] = c.sparse.to_dict()
        if self.body.return_token_ids:
            found["token_ids"] = c.token_ids
        return found

    # ── as it comes ───────────────────────────────────────────────────────────────────────────────

    async def _events(self) -> AsyncIterator[str]:
        talk, options = self.conversation, self.body.stream_options
        with_usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        head = self._head("chat.completion.chunk")
        if with_usage:
            head = {**head, "usage": None}
        async with talk.run() as stream:
            for c in talk.choices:
                first = {"role": "assistant", "content": ""}
                yield data_event({**head, "choices": [self._piece(c, first)]})
            while news := await stream.next():
                for arrived in news:
                    c, delta, events = talk.take(arrived)
                    usage_now = {"usage": self._usage()} if running else {}
                    for piece in self._pieces(c, delta, events):
                        yield data_event({**head, **usage_now, "choices": [piece]})
                    if c.finish_reason is not None:
                        last = self._piece(c, {})
                        last |= {
                            "finish_reason": finish_reason(c),
                            "stop_reason": c.stop_reason,
                        }
                        yield data_event({**head, "choices": [last]})
        if with_usage:
            head["usage"] = self._usage()
            yield data_event({**head, "choices": []})

    def _pieces(self, c: MessageChoice, delta: Delta, events: list[Event]) -> list[dict[str, Any]]:
        """One chunk per event; log-probabilities and what was recorded ride on the first one."""
        shown = [d for d in map(self._delta, events) if d is not None]
        logprobs = self._logprobs(delta)
        if (logprobs or delta.sparse is not None) and not shown:
            shown = [{"content": ""}]
        pieces = [self._piece(c, d) for d in shown]
        if logprobs:
            pieces[0]["logprobs"] = {"content": logprobs, "refusal": None}
        if delta.sparse is not None:
            pieces[0]["sparse"] = delta.sparse.to_dict()
        return pieces

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, ReasoningDelta):
            return {"reasoning_content": event.text} if self.body.include_reasoning else None
        if isinstance(event, CallStart):
            call = {
                "index": event.index,
                "id": event.id,
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        if isinstance(event, ArgumentsDelta):
            inner = {"index": event.index, "function": {"arguments": event.text}}
            return {"tool_calls": [inner]}
        return {"content": event.text}

    def _piece(self, c: MessageChoice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}

    # ── details ───────────────────────────────────────────────────────────────────────────────────

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not self.body.logprobs or not delta.logprobs:
            return []
        return chat_logprobs(
            delta.token_ids,
            delta.logprobs,
            self.body.top_logprobs or 0,
            as_ids=self.body.return_tokens_as_token_ids,
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> dict[str, Any]:
        record = self.conversation.record
        return usage(record, record.output_tokens)


def finish_reason(c: MessageChoice) -> str | None:
    """OpenAI's word: a complete call is why the model stopped."""
    return "tool_calls" if c.reader.has_calls and c.finish_reason == "stop" else c.finish_reason


async def chat_completions(service: Service, request: Request, body: ChatBody) -> Response:
    job = ChatJob(service, request, body)
    await job.prepare()
    return await job.respond()
