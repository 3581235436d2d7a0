"""Formats that write each argument between tags: GLM-4.5 and later, Qwen3-Coder.

Sources: the models' chat templates. Values are bare text; the tool's JSON schema says what they
are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparseengine.server.tools.jsons import dump
from sparseengine.server.tools.schema import tool_schemas, typed
from sparseengine.server.tools.stream import Found, Scanner, Tools, find_literal

_NAME = re.compile(r"[^\s<>{}\"]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The marks of a format, in the order in which they come; "" where a format has none."""

    open: str
    name: str  # in front of the tool's name
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    close: str  # behind the last argument
    is_value_on_lines: bool  # one line break on each side of a value is not part of it


GLM = Tags(
    open="<tool_call>",
    name="",
    name_end="",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    close="</tool_call>",
    is_value_on_lines=False,
)
QWEN_CODER = Tags(
    open="<tool_call>",
    name="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    close="</function>",
    is_value_on_lines=True,
)


class Tagged:
    """A call between tags. With a mark in front of the name, the opening may be missing."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._openers = tuple(filter(None, (tags.open, tags.name)))
        self.trailing = ("</tool_call>",)

    def find(self, text: str, last: bool) -> tuple[int, bool]:
        return find_literal(text, self._openers, last)

    def scanner(self, text: str, tools: Tools) -> Scanner:
        return _TagScanner(self._tags, len(self._tags.open), tools, text)


class _TagScanner:
    """Walks from tag to tag; `_at` is behind the last complete part."""

    def __init__(self, tags: Tags, opening: int, tools: Tools, text: str) -> None:
        self._tags = tags
        self._at = opening if text.startswith(tags.open) else 0
        self._opening = self._at or len(tags.name)
        self._schemas = tool_schemas(tools)
        self._name: str | None = None
        self._arguments: dict[str, str] = {}

    def scan(self, text: str, last: bool) -> Found | None:
        while True:
            step = self._read_name(text) if self._name is None else self._read_argument(text)
            if isinstance(step, Found):
                return step
            if not step:  # more text is needed
                return Found(end=self._opening) if last else None

    def _read_name(self, text: str) -> Found | bool:
        tags = self._tags
        rest = text[self._at :]
        bare = rest.lstrip()
        start = self._at + len(rest) - len(bare)
        if tags.name and not bare.startswith(tags.name):
            return False if tags.name.startswith(bare) else Found(end=self._opening)
        start += len(tags.name)
        match = _NAME.match(text, start)
        if match is None:
            return Found(end=self._opening) if start < len(text) else False
        end = match.end()
        behind = text[end:].lstrip()
        expected = (tags.name_end,) if tags.name_end else (tags.key, tags.close)
        if not behind.startswith(expected):
            is_open = any(mark.startswith(behind) for mark in expected)
            return False if is_open else Found(end=self._opening)
        self._name = match[0]
        self._at = len(text) - len(behind) + len(tags.name_end)
        return True

    def _read_argument(self, text: str) -> Found | bool:
        """One argument, or the end of the call."""
        tags = self._tags
        bare = text[self._at :].lstrip()
        start = len(text) - len(bare)
        if bare.startswith(tags.close):
            return self._call(start + len(tags.close))
        if not bare.startswith(tags.key):
            is_open = any(mark.startswith(bare) for mark in (tags.key, tags.close))
            return False if is_open else Found(end=self._opening)
        key_at = start + len(tags.key)
        key_end = text.find(tags.key_end, key_at)
        if key_end < 0:
            return False
        behind = text[key_end + len(tags.key_end) :]
        bare = behind.lstrip() if tags.value else behind
        if not bare.startswith(tags.value):
            return False if tags.value.startswith(bare) else Found(end=self._opening)
        value_at = len(text) - len(bare) + len(tags.value)
        value_end = text.find(tags.value_end, value_at)
        if value_end < 0:
            return False
        value = text[value_at:value_end]
        if tags.is_value_on_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        self._arguments[text[key_at:key_end].strip()] = value
        self._at = value_end + len(tags.value_end)
        return True

    def _call(self, end: int) -> Found:
        name = self._name or ""
        schema = self._schemas.get(name, {})
        values = {k: typed(v, k, schema) for k, v in self._arguments.items()}
        try:
            return Found(end=end, name=name, arguments=dump(values))
        except ValueError:  # nested too deeply
            return Found(end=end)
