"""POST /v1/messages: Anthropic's format on the same engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sparseengine.server.answers import answer, event_stream, named_event
from sparseengine.server.blocks import Block, Blocks, Change
from sparseengine.server.conversation import Asked, Conversation
from sparseengine.server.errors import ApiError
from sparseengine.server.messages_text import flatten_messages, text_of
from sparseengine.server.schemas import CountTokensBody, MessagesBody
from sparseengine.server.service import Service


class MessagesJob:
    """One request and the shapes of its answers."""

    def __init__(self, service: Service, request: Request, body: MessagesBody) -> None:
        self.talk = Conversation(service, request)
        self.request = request
        self.body = body
        self.model = service.check_model(body.model)
        self.id = f"msg_{uuid.uuid4().hex}"
        self.blocks = Blocks()

    async def prepare(self) -> None:
        body = self.body
        choice = body.tool_choice
        await self.talk.prepare(
            Asked(
                stream=bool(self.body.stream),
                cache_salt=body.cache_salt,
                messages=flatten_messages(chat_messages(body.system, body.messages)),
                sampling={
                    "temperature": body.temperature,
                    "top_p": body.top_p,
                    "top_k": body.top_k,
                    "stop": body.stop_sequences,
                    "max_tokens": body.max_tokens,
                },
                sparse=body.sparse,
                tools=chat_tools(body.tools),
                tool_choice=choice,
                parallel_tool_calls=not (choice or {}).get("disable_parallel_tool_use", False),
                template_kwargs=_thinking(body),
            )
        )

    async def respond(self) -> Response:
        if self.body.stream:
            return await event_stream(
                self._events(), lambda error: named_event(error.anthropic_body())
            )
        return await answer(self.request, self._whole())

    async def _whole(self) -> dict[str, Any]:
        async for _ in self._changes():
            pass
        content = [_content(b, whole=True) for b in self.blocks.all]
        return {**self._message(), "content": content, **self._end(), "usage": self._usage()}

    async def _changes(self) -> AsyncIterator[Change | None]:
        """None first, when the engine has taken the request; then what happens to the blocks."""
        async with self.talk.run() as stream:
            yield None
            while news := await stream.next():
                for arrived in news:
                    _, _, events = self.talk.take(arrived)
                    for event in events:
                        for change in self.blocks.add(event):
                            yield change
        for change in self.blocks.finish():
            yield change

    async def _events(self) -> AsyncIterator[str]:
        async with aclosing(self._changes()) as changes:
            await anext(changes)
            start = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            start["usage"] = {**self._usage(), "output_tokens": 0}
            yield named_event({"type": "message_start", "message": start})
            async for change in changes:
                if change is not None:
                    yield named_event(_shown(change))
        yield named_event({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
        yield named_event({"type": "message_stop"})

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _end(self) -> dict[str, Any]:
        choice = self.talk.choices[0]
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if choice.reader.has_calls and choice.finish_reason == "stop":
            reason = "tool_use"
        elif choice.finish_reason == "length":
            reason = "max_tokens"
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        found: dict[str, Any] = {"stop_reason": reason, "stop_sequence": stop}
        record = choice.sparse
        return found if record is None else {**found, "sparse": record.to_dict()}

    def _usage(self) -> dict[str, Any]:
        record = self.talk.record
        return {
            "input_tokens": record.prompt_tokens - record.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
        }


def _shown(change: Change) -> dict[str, Any]:
    block, at = change.block, {"index": change.block.index}
    if change.what == "open":
        return {"type": "content_block_start", **at, "content_block": _content(block, whole=False)}
    if change.what == "close":
        return {"type": "content_block_stop", **at}
    kinds = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }
    kind, name = kinds[block.kind]
    return {"type": "content_block_delta", **at, "delta": {"type": kind, name: change.text}}


def _content(block: Block, *, whole: bool) -> dict[str, Any]:
    """A block, empty at its start."""
    text = block.text if whole else ""
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    value = json.loads(text) if text else {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": value}


# ── input ─────────────────────────────────────────────────────────────────────────────────────────


def chat_messages(
    system: str | Sequence[Mapping[str, Any]] | None, given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Anthropic's messages in chat's shape: tool results become messages of their own."""
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": text_of(system, "system")})
    for index, message in enumerate(given):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise _wrong(index, f"role {str(role)[:40]!r} is not 'user' or 'assistant'")
        if isinstance(content, list):
            found.extend(_blocks(index, role, content))
        else:
            found.append({"role": role, "content": content})
    return found


def _blocks(index: int, role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(text_of([block], f"messages[{index}]"))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), f"messages[{index}]")
            call = block.get("tool_use_id")
            found.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            raise _wrong(index, f"blocks of type {str(kind)[:40]!r} are not supported here")
    if texts or calls or not found:
        message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        found.append(message)
    return found


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    found = []
    for index, tool in enumerate(tools):
        is_own = tool.get("type") in (None, "custom")
        if not (is_own and isinstance(tool.get("name"), str)):
            raise ApiError(
                400, f"tools[{index}]: only custom tools with a name are supported", param="tools"
            )
        inner = {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": tool.get("input_schema") or {},
        }
        found.append({"type": "function", "function": inner})
    return found


def _thinking(body: MessagesBody | CountTokensBody) -> dict[str, Any] | None:
    """What templates of reasoning models call it."""
    if body.thinking is None:
        return None
    return {"enable_thinking": body.thinking.type != "disabled"}


def _wrong(index: int, what: str) -> ApiError:
    return ApiError(400, f"messages[{index}]: {what}", param="messages")


async def messages(service: Service, request: Request, body: MessagesBody) -> Response:
    job = MessagesJob(service, request, body)
    await job.prepare()
    return await job.respond()


async def count_tokens(service: Service, request: Request, body: CountTokensBody) -> dict[str, Any]:
    service.check_model(body.model)
    _, ids = await service.encode_chat(
        flatten_messages(chat_messages(body.system, body.messages)),
        tools=chat_tools(body.tools),
        template_kwargs=_thinking(body),
    )
    return {"input_tokens": len(ids)}
