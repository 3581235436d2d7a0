"""Formats that write each argument between tags: GLM-4.5 and later, Qwen3-Coder.

Sources: the models' chat templates. Values are bare text; the tool's JSON schema says what they
are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparseengine.server.tools.jsons import dump, skip_space
from sparseengine.server.tools.schema import is_string, tool_schemas, typed
from sparseengine.server.tools.stream import Found, Scanner, Tools, find_literal, held

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
    """Walks from tag to tag; `_at` is behind the last complete part, `_searched` further on.

    The arguments grow as the text does: a string, where the schema knows nothing else, character
    by character, other values when they are complete. A key that comes again is left out.
    """

    def __init__(self, tags: Tags, opening: int, tools: Tools, text: str) -> None:
        self._tags = tags
        self._at = opening if text.startswith(tags.open) else 0
        self._opening = self._at or len(tags.name)
        self._searched = 0
        self._schemas = tool_schemas(tools)
        self._name: str | None = None
        self._key: str | None = None
        self._keys: set[str] = set()
        self._arguments = ""  # JSON so far, without its end
        self._taken = 0  # characters of it that `begun` has given
        self._read = 0  # characters of a string under way that are in it
        self._is_string = self._is_broken = self._is_shown = False

    def begun(self) -> tuple[str, str] | None:
        if self._name is None or not self._arguments:
            return None
        new = self._arguments[self._taken :]
        self._taken, self._is_shown = len(self._arguments), True
        return self._name, new

    def scan(self, text: str, last: bool) -> Found | None:
        while True:
            if self._name is None:
                step = self._read_name(text)
            elif self._key is None:
                step = self._read_key(text)
            else:
                step = self._read_value(text, self._key)
            if isinstance(step, Found):
                return step
            if not step:  # more text is needed
                return Found(end=len(text)) if last else None

    def _read_name(self, text: str) -> Found | bool:
        tags = self._tags
        start = skip_space(text, self._at)
        if tags.name:
            if not text.startswith(tags.name, start):
                return self._unless(_may_come(text, start, tags.name))
            start += len(tags.name)
        match = _NAME.match(text, start)
        if match is None:
            return self._unless(start == len(text))
        behind = skip_space(text, match.end())
        expected = (tags.name_end,) if tags.name_end else (tags.key, tags.close)
        if not text.startswith(expected, behind):
            return self._unless(_may_come(text, behind, *expected))
        self._name = match[0]
        self._at = behind + len(tags.name_end)
        return True

    def _read_key(self, text: str) -> Found | bool:
        """A key and the opening of its value, or the end of the call."""
        tags = self._tags
        start = skip_space(text, self._at)
        if text.startswith(tags.close, start):
            return self._call(start + len(tags.close))
        if not text.startswith(tags.key, start):
            return self._unless(_may_come(text, start, tags.key, tags.close))
        begin = start + len(tags.key)
        end = text.find(tags.key_end, begin)
        if text.find("<", begin, end if end >= 0 else len(text) - len(tags.key_end)) >= 0:
            return self._no_call()  # another tag inside
        if end < 0:
            return False
        behind = end + len(tags.key_end)
        if tags.value:
            behind = skip_space(text, behind)
            if not text.startswith(tags.value, behind):
                return self._unless(_may_come(text, behind, tags.value))
        self._key = text[begin:end].strip()
        self._at = self._searched = behind + len(tags.value)
        self._is_string, self._read = False, 0
        if self._key not in self._keys and is_string(self._key, self._schema()):
            self._is_string = True
            self._arguments += f'{self._before(self._key)}"'
        return True

    def _read_value(self, text: str, key: str) -> Found | bool:
        mark = self._tags.value_end
        end = text.find(mark, self._searched)
        if end < 0:
            self._searched = max(self._at, len(text) - len(mark) + 1)
            if self._is_string:
                marks = (mark, f"\n{mark}") if self._tags.is_value_on_lines else (mark,)
                self._add_string(text[self._at : len(text) - held(text[self._at :], marks)])
            return False
        value = text[self._at : end]
        if self._tags.is_value_on_lines:
            value = value.removesuffix("\n") if len(value) > 1 else value.strip("\n")
        if self._is_string:
            self._add_string(value)
            self._arguments += '"'
        elif key not in self._keys:
            self._add_value(key, value.removeprefix("\n" if self._tags.is_value_on_lines else ""))
        self._keys.add(key)
        self._key, self._at = None, end + len(mark)
        return True

    def _schema(self) -> Mapping[str, Any]:
        return self._schemas.get(self._name or "", {})

    def _before(self, key: str) -> str:
        return f"{', ' if self._arguments else '{'}{dump(key)}: "

    def _add_string(self, value: str) -> None:
        """Add what is new of a string; `value` is all that came of it."""
        if self._tags.is_value_on_lines:
            value = value.removeprefix("\n")
        # one by one, for one lone surrogate changes how `dump` writes all of a text
        self._arguments += "".join(dump(c)[1:-1] for c in value[self._read :])
        self._read = max(self._read, len(value))

    def _add_value(self, key: str, value: str) -> None:
        try:
            self._arguments += self._before(key) + dump(typed(value, key, self._schema()))
        except ValueError:  # nested too deeply
            self._is_broken = True

    def _unless(self, may_come: bool) -> Found | bool:
        """What is missing may still come, or this is no call."""
        return False if may_come else self._no_call()

    def _no_call(self) -> Found:
        """Content after all; of a call that is shown already, what was read is dropped."""
        return Found(end=max(self._opening, self._at) if self._is_shown else self._opening)

    def _call(self, end: int) -> Found:
        if self._is_broken:
            return Found(end=end)
        return Found(end=end, name=self._name, arguments=f"{self._arguments or '{'}}}")


def _may_come(text: str, at: int, *marks: str) -> bool:
    """Whether the text ends in the beginning of a mark."""
    return any(mark.startswith(text[at : at + len(mark)]) for mark in marks)
