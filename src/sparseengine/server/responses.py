"""POST /v1/responses: OpenAI's newer format. Nothing is stored on the server."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sparseengine.server.answers import answer, event_stream, named_event
from sparseengine.server.blocks import Block, Blocks, Change
from sparseengine.server.conversation import Asked, Conversation
from sparseengine.server.errors import ApiError
from sparseengine.server.logprobs import chat_logprobs
from sparseengine.server.messages_text import flatten_messages
from sparseengine.server.responses_input import chat_messages, chat_tools
from sparseengine.server.sampling import structured
from sparseengine.server.schemas import ResponsesBody
from sparseengine.server.service import Service

_ITEM_IDS = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponsesJob:
    """One request and the shapes of its answers."""

    def __init__(self, service: Service, request: Request, body: ResponsesBody) -> None:
        self.talk = Conversation(service, request)
        self.request = request
        self.body = body
        self.model = service.check_model(body.model)
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.blocks = Blocks()
        self._items: dict[int, str] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._new_logprobs: list[dict[str, Any]] = []
        self._reasoning_tokens = 0
        self._numbers = itertools.count()

    async def prepare(self) -> None:
        body = self.body
        if body.store:
            raise ApiError(
                400, "store=true is not supported: nothing is kept after the answer", param="store"
            )
        self.wants_logprobs = body.top_logprobs is not None or bool(body.include)
        effort = body.reasoning.effort if body.reasoning is not None else None
        await self.talk.prepare(
            Asked(
                stream=bool(self.body.stream),
                cache_salt=body.cache_salt,
                messages=flatten_messages(chat_messages(body.instructions, body.input)),
                sampling={
                    "temperature": body.temperature,
                    "top_p": body.top_p,
                    "top_k": body.top_k,
                    "seed": body.seed,
                    "stop": body.stop,
                    "max_tokens": body.max_output_tokens,
                    "logprobs": (body.top_logprobs or 0) if self.wants_logprobs else None,
                    "structured_outputs": structured(body.text and body.text.format, None),
                },
                sparse=body.sparse,
                tools=chat_tools(body.tools),
                tool_choice=body.tool_choice,
                parallel_tool_calls=body.parallel_tool_calls,
                template_kwargs={"reasoning_effort": effort} if effort is not None else None,
            )
        )

    async def respond(self) -> Response:
        if self.body.stream:
            return await event_stream(
                self._events(),
                lambda error: named_event(
                    self._numbered(
                        {
                            "type": "error",
                            "code": error.code or error.type,
                            "message": error.message,
                            "param": error.param,
                        }
                    )
                ),
            )
        return await answer(self.request, self._whole())

    async def _whole(self) -> dict[str, Any]:
        async for _ in self._changes():
            pass
        return self._response()

    async def _changes(self) -> AsyncIterator[Change | None]:
        """None first, when the engine has taken the request; then what happens to the blocks."""
        async with self.talk.run() as stream:
            yield None
            while news := await stream.next():
                for arrived in news:
                    choice, delta, events = self.talk.take(arrived)
                    if self.wants_logprobs and delta.logprobs:
                        self._new_logprobs += chat_logprobs(
                            delta.token_ids,
                            delta.logprobs,
                            self.body.top_logprobs or 0,
                            as_ids=False,
                        )
                    before = len(choice.reader.content) + len(choice.reader.calls)
                    if choice.reader.reasoning and not before:
                        self._reasoning_tokens = len(choice.token_ids)
                    for event in events:
                        for change in self.blocks.add(event):
                            if change.what == "delta" and change.block.kind == "text":
                                self._logprobs += self._new_logprobs
                            yield change
                            self._new_logprobs = []
        for change in self.blocks.finish():
            yield change

    # ── events ────────────────────────────────────────────────────────────────────────────────────

    async def _events(self) -> AsyncIterator[str]:
        async with aclosing(self._changes()) as changes:
            await anext(changes)
            for kind in ("response.created", "response.in_progress"):
                value = {"type": kind, "response": self._response("in_progress")}
                yield named_event(self._numbered(value))
            async for change in changes:
                for value in self._shown(change) if change is not None else ():
                    yield named_event(self._numbered(value))
        last = self._response()
        kind = f"response.{last['status']}"
        yield named_event(self._numbered({"type": kind, "response": last}))

    def _numbered(self, value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "sequence_number": next(self._numbers)}

    def _shown(self, change: Change) -> list[dict[str, Any]]:
        block, at = change.block, {"output_index": change.block.index}
        inside = {**at, "item_id": self._item_id(block)}
        if change.what == "open":
            empty = {**self._item(block, "in_progress")}
            if block.kind != "call":
                empty["content"] = []
            found = [{"type": "response.output_item.added", **at, "item": empty}]
            if block.kind == "text":
                found.append(
                    {
                        "type": "response.content_part.added",
                        **inside,
                        "content_index": 0,
                        "part": {**_part(""), "logprobs": []},
                    }
                )
            return found
        if change.what == "delta":
            return [self._delta(block, inside, change.text)]
        return self._closed(block, at, inside)

    def _delta(self, block: Block, inside: dict[str, Any], text: str) -> dict[str, Any]:
        if block.kind == "call":
            return {"type": "response.function_call_arguments.delta", **inside, "delta": text}
        if block.kind == "reasoning":
            return {
                "type": "response.reasoning_text.delta",
                **inside,
                "content_index": 0,
                "delta": text,
            }
        return {
            "type": "response.output_text.delta",
            **inside,
            "content_index": 0,
            "delta": text,
            "logprobs": self._new_logprobs,
        }

    def _closed(
        self, block: Block, at: dict[str, Any], inside: dict[str, Any]
    ) -> list[dict[str, Any]]:
        item = self._item(block, "completed")
        done = {"type": "response.output_item.done", **at, "item": item}
        if block.kind == "call":
            arguments = {
                "type": "response.function_call_arguments.done",
                **inside,
                "name": block.name,
                "arguments": block.text or "{}",
            }
            return [arguments, done]
        where = {**inside, "content_index": 0}
        if block.kind == "reasoning":
            return [{"type": "response.reasoning_text.done", **where, "text": block.text}, done]
        part = item["content"][0]
        return [
            {
                "type": "response.output_text.done",
                **where,
                "text": block.text,
                "logprobs": self._logprobs,
            },
            {"type": "response.content_part.done", **where, "part": part},
            done,
        ]

    # ── objects ───────────────────────────────────────────────────────────────────────────────────

    def _item_id(self, block: Block) -> str:
        if block.index not in self._items:
            self._items[block.index] = f"{_ITEM_IDS[block.kind]}_{uuid.uuid4().hex}"
        return self._items[block.index]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            arguments = block.text if status == "in_progress" else block.text or "{}"
            call = {"call_id": block.id, "name": block.name, "arguments": arguments}
            return {**found, "type": "function_call", **call}
        if block.kind == "reasoning":
            part = {"type": "reasoning_text", "text": block.text}
            return {**found, "type": "reasoning", "summary": [], "content": [part]}
        text = {**_part(block.text), "logprobs": self._logprobs}
        return {**found, "type": "message", "role": "assistant", "content": [text]}

    def _response(self, status: str | None = None) -> dict[str, Any]:
        body, choice = self.body, self.talk.choices[0]
        is_cut = choice.finish_reason == "length"
        done = status is None
        status = status or ("incomplete" if is_cut else "completed")
        output = [self._item(b, "completed") for b in self.blocks.all] if done else []
        if done and is_cut and output:
            output[-1]["status"] = "incomplete"
        sampling = self.talk.sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if done and is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning is not None else None,
                "summary": None,
            },
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            "user": body.user,
            "metadata": body.metadata or {},
            **({"sparse": choice.sparse.to_dict()} if done and choice.sparse is not None else {}),
        }

    def _usage(self) -> dict[str, Any]:
        record = self.talk.record
        return {
            "input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": record.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": record.prompt_tokens + record.output_tokens,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


async def responses(service: Service, request: Request, body: ResponsesBody) -> Response:
    job = ResponsesJob(service, request, body)
    await job.prepare()
    return await job.respond()
