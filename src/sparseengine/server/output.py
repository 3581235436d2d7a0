"""From a completion's text to what a message shows: reasoning, content, tool calls.

Every byte passes through the same parsers, streamed or whole, so that both show the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparseengine.engine.record import SparseOutput
from sparseengine.server.reasoning import ReasoningSplitter, splitter_for
from sparseengine.server.tools import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    ToolParser,
    ToolStream,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


Event = ReasoningDelta | ContentDelta | CallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How the outputs of one request are read.

    reasoning: name of the splitter, None shows all as content. prompt: the rendered conversation.
    parser: of tool calls, None when the request offers none. tools: what it offers. stream: the
    client sees outputs as they come, arguments of calls included.
    """

    reasoning: str | None = None
    prompt: str = ""
    parser: ToolParser | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    stream: bool = False

    def reader(self) -> OutputReader:
        """For one completion."""
        splitter = None
        if self.reasoning is not None:
            splitter = splitter_for(self.reasoning, prompt=self.prompt)
        stream = None
        if self.parser is not None:
            stream = self.parser.stream(self.tools, eager=self.stream)
        return OutputReader(splitter, stream)


@dataclass(slots=True)
class Call:
    """A tool call as far as it is known."""

    id: str
    name: str
    arguments: str = ""


class OutputReader:
    """Turns text as it comes into events, and keeps what they add up to."""

    def __init__(self, splitter: ReasoningSplitter | None, stream: ToolStream | None) -> None:
        self._splitter = splitter
        self._stream = stream
        self.reasoning = ""
        self.content = ""
        self.calls: list[Call] = []

    @property
    def has_calls(self) -> bool:
        """Whether a call came to its end."""
        return self._stream is not None and self._stream.num_complete > 0

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        reasoning, content = ("", text) if self._splitter is None else self._splitter.push(text)
        return self._events(reasoning, content, last=False)

    def finish(self) -> list[Event]:
        """The text is over: whatever was held back."""
        reasoning, content = ("", "") if self._splitter is None else self._splitter.finish()
        return self._events(reasoning, content, last=True)

    def _events(self, reasoning: str, content: str, *, last: bool) -> list[Event]:
        found: list[Event] = []
        if reasoning:
            found.append(ReasoningDelta(text=reasoning))
        if self._stream is None:
            if content:
                found.append(ContentDelta(text=content))
        else:
            found.extend(self._stream.push(content) if content else ())
            found.extend(self._stream.finish() if last else ())
        for event in found:
            self._note(event)
        return found

    def _note(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, ContentDelta):
            self.content += event.text
        elif isinstance(event, CallStart):
            self.calls.append(Call(event.id, event.name))
        else:
            self.calls[event.index].arguments += event.text


@dataclass(slots=True, kw_only=True)
class MessageChoice:
    """One answer of a conversation as it grows."""

    index: int
    reader: OutputReader
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sparse: SparseOutput | None = None
