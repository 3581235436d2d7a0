"""The part that all tool-call formats share: text in, events out.

Text that may be the start of a call is held back until it is one or cannot become one. A call is
complete when it is well formed to its end: a client must never run a call that was cut off or that
is not JSON. Anything that turns out not to be a call is content, unchanged. How the text is split
into pushes decides nothing but how content and arguments are split into events.

An eager stream reports a call as soon as its name and the beginning of its arguments are known, and
the arguments while they are written, without their last brace, which comes when the call is
complete. A call that was begun and does not become complete stays without that brace: what was sent
cannot be taken back, and is no JSON that a client could run.

White space next to a call (the line breaks that templates put there) is not content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparseengine.server.tools.calls import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    ParsedTools,
    ToolEvent,
    gather,
    new_call_id,
)

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first `end` characters are a call, or (name None) are content after all."""

    end: int
    name: str | None = None
    arguments: str = "{}"


class Scanner(Protocol):
    """Reads one candidate, which begins the text."""

    def scan(self, text: str, last: bool) -> Found | None:
        """None: more text is needed; never when `last`. `text` only grows between calls."""
        ...

    def begun(self) -> tuple[str, str] | None:
        """(name, arguments that came since the last call) of a call that is under way."""
        ...


class Format(Protocol):
    """How one family of models writes calls.

    trailing: what may follow a call and means nothing.
    """

    trailing: tuple[str, ...]

    def find(self, text: str, last: bool) -> tuple[int, bool]:
        """(where the next candidate begins, whether its opening is complete)."""
        ...

    def scanner(self, text: str, tools: Tools) -> Scanner:
        """For the candidate that begins `text`."""
        ...


def find_literal(text: str, openers: Sequence[str], last: bool) -> tuple[int, bool]:
    """`Format.find` for fixed openings: the first one, or a tail that may become one."""
    hits = [at for at in map(text.find, openers) if at >= 0]
    if hits:
        return min(hits), True
    return len(text) if last else len(text) - held(text, openers), False


def held(text: str, marks: Sequence[str]) -> int:
    """Length of the longest tail of `text` that is a proper prefix of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        tail = text[-n:]
        if any(len(m) > n and m.startswith(tail) for m in marks):
            return n
    return 0


class ToolStream:
    """One output as it comes. After `finish` it is used up.

    num_complete: calls that came to their end.
    """

    def __init__(self, form: Format, tools: Tools, *, eager: bool = False) -> None:
        self._form = form
        self._tools = tools
        self._eager = eager
        self._sent: int | None = None  # characters of arguments that the open call has shown
        self.num_complete = 0
        self._text = ""
        self._space = ""  # white space that is content only if content follows
        self._scanner: Scanner | None = None
        self._behind_call = False
        self._num_calls = 0
        self._events: list[ToolEvent] = []

    def push(self, text: str) -> list[ToolEvent]:
        """Add text; returns what is certain by now."""
        self._text += text
        return self._advance(last=False)

    def finish(self) -> list[ToolEvent]:
        """The text is over: returns the rest."""
        events = self._advance(last=True)
        if self._space and not self._num_calls:
            events.append(ContentDelta(text=self._space))
        self._space = ""
        return events

    def _advance(self, last: bool) -> list[ToolEvent]:
        while self._text:
            if self._behind_call and not self._skip_trailing(last):
                break
            if self._scanner is None:
                at, is_open = self._form.find(self._text, last)
                self._content(at)
                if not is_open:
                    break
                self._scanner = self._form.scanner(self._text, self._tools)
            found = self._scanner.scan(self._text, last)
            if self._eager:
                self._begin(self._scanner.begun())
            if found is None:
                break
            self._scanner = None
            if found.name is not None:
                self._call(found)
            elif self._sent is not None:  # begun, and it is no call: the rest of it is dropped
                self._end_call(found)
            else:
                self._content(found.end)
        events, self._events = self._events, []
        return events

    def _content(self, end: int) -> None:
        """The first `end` characters are content, except white space at their end, which waits."""
        text = self._space + self._text[:end]
        self._text = self._text[end:]
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(ContentDelta(text=shown))

    def _begin(self, begun: tuple[str, str] | None) -> None:
        """Show a call that is under way, and what is new of its arguments."""
        if begun is None:
            return
        name, text = begun
        if self._sent is None:
            self._events.append(CallStart(index=self._num_calls, id=new_call_id(), name=name))
            self._sent, self._space = 0, ""
        if text:
            self._events.append(ArgumentsDelta(index=self._num_calls, text=text))
            self._sent += len(text)

    def _call(self, found: Found) -> None:
        self._begin((found.name or "", ""))
        rest = found.arguments[self._sent or 0 :]
        self._events.append(ArgumentsDelta(index=self._num_calls, text=rest))
        self._end_call(found)
        self.num_complete += 1

    def _end_call(self, found: Found) -> None:
        self._text, self._space, self._sent = self._text[found.end :], "", None
        self._num_calls += 1
        self._behind_call = True

    def _skip_trailing(self, last: bool) -> bool:
        """Drop marks that may follow a call; False while the text may yet become one."""
        while True:
            bare = self._text.lstrip()
            mark = next((m for m in self._form.trailing if bare.startswith(m)), None)
            if mark is None:
                break
            self._text = bare[len(mark) :]
        if not last and any(m.startswith(bare) for m in self._form.trailing):
            return False  # also when only white space is left
        self._behind_call = False
        return True


class ToolParser:
    """Parses the outputs of one family of models; one object serves any number of outputs.

    needs_special_tokens: the calls are marked by special tokens in some tokenizers, so text must be
    decoded with skip_special_tokens=False.
    """

    def __init__(self, form: Format, *, needs_special_tokens: bool = True) -> None:
        self._form = form
        self.needs_special_tokens = needs_special_tokens

    def stream(self, tools: Tools = (), *, eager: bool = False) -> ToolStream:
        """A new output's stream. `tools`: what the request offers, in OpenAI's shape.

        eager: arguments come while they are written.
        """
        return ToolStream(self._form, tools, eager=eager)

    def parse(self, text: str, tools: Tools = ()) -> ParsedTools:
        """A whole output: what a stream of the same text adds up to. Never raises."""
        stream = self.stream(tools)
        return gather([*stream.push(text), *stream.finish()])
