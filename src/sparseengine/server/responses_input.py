"""Input items of the responses endpoint as chat messages, its tools as chat tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseengine.server.errors import ApiError
from sparseengine.server.messages_text import text_of


def chat_messages(
    instructions: str | None, given: str | Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages of a conversation. Calls join the assistant message in front of them."""
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        _add(found, index, item)
    return found


def _add(found: list[dict[str, Any]], index: int, item: Mapping[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        content = text_of(item.get("content"), f"input[{index}]")
        found.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        if found and found[-1]["role"] == "assistant":
            found[-1].setdefault("tool_calls", []).append(call)
        else:
            found.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = text_of(item.get("output"), f"input[{index}].output")
        found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        text = text_of(
            [{**p, "type": "text"} for p in item.get("content") or () if isinstance(p, Mapping)],
            f"input[{index}]",
        )
        found.append({"role": "assistant", "content": None, "reasoning_content": text})
    else:
        raise ApiError(
            400,
            f"input[{index}]: items of type {str(kind)[:40]!r} are not supported",
            param="input",
        )


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Flat function tools in chat's nested shape. Raises 400 for the provider's own tools."""
    if tools is None:
        return None
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise ApiError(
                400,
                f"tools[{index}]: only tools of type 'function' with a name are supported",
                param="tools",
            )
        inner = {k: tool[k] for k in ("name", "description", "parameters", "strict") if k in tool}
        found.append({"type": "function", "function": inner})
    return found
