"""Chat messages from OpenAI's wire format to what chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparseengine.server.errors import ApiError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def flatten_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text content, parsed tool arguments and roles that templates know.

    Raises 400 for pictures, sounds and files: no model here reads them.
    """
    if not messages:
        raise ApiError(400, "messages=[] is not allowed; give a message", param="messages")
    return [_message(i, m) for i, m in enumerate(messages)]


def _message(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if role not in _ROLES:
        raise _wrong(index, f"role {str(role)[:40]!r} is not allowed; known: {', '.join(_ROLES)}")
    content = given.get("content")
    calls = given.get("tool_calls")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if content is None and not calls and role != "assistant":
        raise _wrong(index, "content is missing")
    found["content"] = text_of(content, f"messages[{index}]")
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if isinstance(given.get(name), str):
            found[name] = given[name]
    if calls:
        if not isinstance(calls, list):
            raise _wrong(index, "tool_calls must be a list")
        found["tool_calls"] = [_call(index, call) for call in calls]
    return found


def text_of(content: Any, where: str) -> str:
    """The text of a content field: a string, null, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: content must be text or parts of text", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = None if kind is None else part.get("refusal" if kind == "refusal" else "text")
        if isinstance(part, str):
            text = part
        elif kind not in _TEXT_PARTS:
            raise ApiError(
                400,
                f"{where}: parts of type {str(kind)[:40]!r} are not supported; this server reads "
                "text only",
                param="messages",
            )
        if not isinstance(text, str):
            raise ApiError(400, f"{where}: a text part has no text", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _call(index: int, call: Any) -> dict[str, Any]:
    """Templates want the arguments as an object, OpenAI's format has them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(index, "a tool call needs function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise _wrong(index, "function.arguments of a tool call is not JSON") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _wrong(index, "function.arguments of a tool call must be a JSON object")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _wrong(index: int, what: str) -> ApiError:
    return ApiError(400, f"messages[{index}]: {what}", param="messages")
