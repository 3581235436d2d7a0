"""What a tool parser returns: content, calls, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from uuid import uuid4


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDelta:
    """More text for the reader."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStart:
    """A call begins. `index` counts the message's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


ToolEvent = ContentDelta | CallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A complete call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTools:
    """A whole output. `content` is None when there is nothing but calls."""

    content: str | None
    calls: tuple[ToolCall, ...] = ()


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def gather(events: Iterable[ToolEvent]) -> ParsedTools:
    """The output that a stream's events add up to."""
    text: list[str] = []
    starts: list[CallStart] = []
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            text.append(event.text)
        elif isinstance(event, CallStart):
            starts.append(event)
            arguments[event.index] = ""
        else:
            arguments[event.index] += event.text
    calls = tuple(ToolCall(id=s.id, name=s.name, arguments=arguments[s.index]) for s in starts)
    content = "".join(text)
    return ParsedTools(content=None if calls and not content else content, calls=calls)
