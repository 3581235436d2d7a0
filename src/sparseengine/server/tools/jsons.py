"""Formats that write a call as JSON: Hermes and Qwen, Llama 3, DeepSeek V3 and V3.1.

Sources: the models' chat templates. JSON is read as the models write it (line breaks inside strings
are accepted) and written anew, strictly valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sparseengine.server.tools.arguments import ArgumentsText
from sparseengine.server.tools.schema import tool_schemas
from sparseengine.server.tools.stream import Found, Scanner, Tools, find_literal

_OUTSIDE = re.compile(r'["{}]')
_INSIDE = re.compile(r'["\\]')


class ObjectEnd:
    """Where the JSON object that begins at `start` ends; goes on from where it stopped."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The position behind the closing brace, by braces and strings alone."""
        while True:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, self._at)
            if match is None:
                self._at = len(text)
                return None
            mark = match[0]
            if mark == "\\" and match.end() == len(text):
                self._at = match.start()  # what it escapes has not come yet
                return None
            self._at = match.end() + (mark == "\\")
            if mark == '"':
                self._in_string = not self._in_string
            elif mark != "\\":
                self._depth += 1 if mark == "{" else -1
                if self._depth == 0:
                    return self._at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def load(text: str) -> Any:
    """A JSON value, line breaks in strings allowed. Raises ValueError."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump(value: Any) -> str:
    """Strictly valid JSON. Raises ValueError for numbers that have none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text


def arguments_text(value: Any) -> str | None:
    """The arguments as JSON text; None when they are no object.

    For a tool without parameters models write {}, null, "" or nothing; some quote the object.
    """
    try:
        if isinstance(value, str) and value.strip():
            value = load(value)
        if value is None or value == "":
            return "{}"
        return dump(value) if isinstance(value, Mapping) else None
    except ValueError:
        return None


def read_call(text: str) -> tuple[str, str] | None:
    """(name, arguments) of {"name": ..., "arguments" or "parameters": {...}}."""
    try:
        value = load(text)
    except ValueError:
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # OpenAI's own shape
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    key = "arguments" if "arguments" in value else "parameters"
    arguments = arguments_text(value.get(key))
    if not isinstance(name, str) or not name.strip() or arguments is None:
        return None
    return name.strip(), arguments


_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEAD_CHARS = 512  # a call whose arguments begin later is reported when it is complete

Head = Callable[[str, int], tuple[str, int] | None]


def read_head(text: str, start: int) -> tuple[str, int] | None:
    """(name, where its arguments begin) of the object at `start`, in the usual order of keys."""
    match = _HEAD.match(text, start, start + _HEAD_CHARS)
    if match is None:
        return None
    try:
        name = load(match[1]).strip()
    except ValueError:
        return None
    return (name, match.end()) if name else None


class ObjectScanner:
    """An opening of `opening` characters, white space or `skip`, an object.

    read: from the object's text to (name, arguments), or None when it is no call. head: from its
    beginning to the name and to where its arguments begin, None when they are not known (yet).
    """

    def __init__(
        self,
        opening: int,
        read: Callable[[str], tuple[str, str] | None],
        skip: str = "",
        head: Head = read_head,
    ) -> None:
        self._opening = opening
        self._read = read
        self._skip = skip
        self._head = head
        self._start = opening
        self._end: ObjectEnd | None = None
        self._name: str | None = None
        self._arguments: ArgumentsText | None = None
        self._may_begin = True

    def scan(self, text: str, last: bool) -> Found | None:
        if self._end is None:
            self._start = skip_space(text, self._start, self._skip)
            if self._start == len(text):
                return Found(end=len(text)) if last else None
            if text[self._start] != "{":
                return Found(end=max(self._opening, 1))
            self._end = ObjectEnd(self._start)
        end = self._end.find(text)
        self._follow(text if end is None else text[:end])
        if end is None:
            return Found(end=len(text)) if last else None
        call = self._read(text[self._start : end])
        if call is None:
            return Found(end=end)
        if self._name is None or self._arguments is None:
            return Found(end=end, name=call[0], arguments=call[1])
        if not self._arguments.complete:
            return Found(end=end)
        return Found(end=end, name=self._name, arguments=self._arguments.text)

    def begun(self) -> tuple[str, str] | None:
        if self._name is None or self._arguments is None:
            return None
        return self._name, self._arguments.take()

    def _follow(self, text: str) -> None:
        """Read the arguments as far as they are there."""
        if self._arguments is None and self._may_begin:
            found = self._head(text, self._start)
            self._may_begin = len(text) < self._start + _HEAD_CHARS
            if found is not None:
                self._name, at = found
                self._arguments = ArgumentsText(at)
        if self._arguments is not None:
            self._arguments.feed(text)


class Hermes:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes 2 Pro, Qwen 2.5 and 3."""

    trailing = ("</tool_call>", "}")
    _OPEN = "<tool_call>"

    def find(self, text: str, last: bool) -> tuple[int, bool]:
        return find_literal(text, (self._OPEN,), last)

    def scanner(self, text: str, tools: Tools) -> Scanner:
        return ObjectScanner(len(self._OPEN), read_call)


class Llama3:
    """{"name": ..., "parameters": {...}}, several separated by ";", perhaps behind <|python_tag|>.

    Nothing marks the end of a call, and an answer may be JSON too: without the tag an object is a
    call only if it names one of the request's tools.
    """

    trailing = (";", ",")
    _TAG = "<|python_tag|>"
    _KEYS = ('"name"', '"parameters"', '"arguments"', '"type"', '"function"')
    _NEAR = 64  # the first key stands within so many characters

    def find(self, text: str, last: bool) -> tuple[int, bool]:
        at, is_tag = find_literal(text, (self._TAG,), last)
        brace = text.find("{", 0, at)
        while brace >= 0:
            near = text[brace + 1 : brace + 1 + self._NEAR]
            rest = near.lstrip()
            if rest.startswith(self._KEYS):
                return brace, True
            could_come = not last and len(near) < self._NEAR
            if could_come and any(k.startswith(rest) for k in self._KEYS):
                return brace, False
            brace = text.find("{", brace + 1, at)
        return at, is_tag

    def scanner(self, text: str, tools: Tools) -> Scanner:
        if text.startswith(self._TAG):
            return ObjectScanner(len(self._TAG), read_call)
        names = tool_schemas(tools)

        def read(raw: str) -> tuple[str, str] | None:
            call = read_call(raw)
            return call if call and (not names or call[0] in names) else None

        def head(text: str, start: int) -> tuple[str, int] | None:
            found = read_head(text, start)
            return found if found and (not names or found[0] in names) else None

        return ObjectScanner(0, read, head=head)


class DeepSeek:
    """Calls between marker tokens.

    V3 and R1-0528: begin, "function", separator, name, a fenced block of JSON, end. V3.1: begin,
    name, separator, JSON, end.
    """

    _CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    _SEP = "<｜tool▁sep｜>"
    trailing = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "}")

    def find(self, text: str, last: bool) -> tuple[int, bool]:
        return find_literal(text, (self._CALLS, self._CALL), last)

    def scanner(self, text: str, tools: Tools) -> Scanner:
        return _DeepSeekScanner(self._CALLS, self._CALL, self._SEP)


class _DeepSeekScanner:
    def __init__(self, calls: str, call: str, sep: str) -> None:
        self._calls, self._call, self._sep = calls, call, sep
        self._name = ""
        self._start = 0
        self._end: ObjectEnd | None = None
        self._arguments = ArgumentsText(0)

    def begun(self) -> tuple[str, str] | None:
        return None if self._end is None else (self._name, self._arguments.take())

    def scan(self, text: str, last: bool) -> Found | None:
        if self._end is None:
            found = self._head(text)
            if found is not None or self._end is None:
                return found or (Found(end=len(text)) if last else None)
        end = self._end.find(text)
        self._arguments.feed(text if end is None else text[:end])
        if end is None:
            return Found(end=len(text)) if last else None
        try:
            is_call = arguments_text(load(text[self._start : end])) is not None
        except ValueError:
            is_call = False
        if not is_call or not self._arguments.complete:
            return Found(end=end)
        return Found(end=end, name=self._name, arguments=self._arguments.text)

    def _head(self, text: str) -> Found | None:
        """Everything before the arguments. A `Found` when this is no call; None: wait or go on."""
        at = 0
        if text.startswith(self._calls):
            at = skip_space(text, len(self._calls))
            if not text.startswith(self._call, at):
                could_come = self._call.startswith(text[at:])
                return None if could_come else Found(end=len(self._calls))
        begin = at + len(self._call)
        sep = text.find(self._sep, begin)
        if sep < 0:
            return None
        name = text[begin:sep].strip()
        brace = text.find("{", sep)
        if brace < 0:
            return None
        between = text[sep + len(self._sep) : brace]
        if name == "function" and between.strip():
            name, _, fence = between.strip().partition("\n")
            is_fence = fence.strip() in ("", "```json", "```")
        else:
            is_fence = between.strip() in ("", "```json", "```")
        if not name.strip() or not is_fence:
            return Found(end=sep + len(self._sep))
        self._name, self._start, self._end = name.strip(), brace, ObjectEnd(brace)
        self._arguments = ArgumentsText(brace)
        return None


def skip_space(text: str, at: int, more: str = "") -> int:
    """The position behind white space, and characters of `more`, that begin at `at`."""
    while at < len(text) and (text[at].isspace() or text[at] in more):
        at += 1
    return at
