"""The JSON text of a call's arguments, forwarded while it is being written."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGINS = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_WORD = re.compile(r"[-+.\w]+")
_NOT_STRICT = re.compile("[\x00-\x1f\ud800-\udfff]")
_CLOSERS = {"{": "}", "[": "]"}


class ArgumentsText:
    """Reads the JSON object that begins at `start` and passes on what is certainly valid.

    What it passes on is the beginning of a valid object: line breaks inside strings are escaped,
    the rest stays as it was written, and reading stops for good at what is not JSON. The last brace
    is for the owner to add, once it knows that the whole call is well formed: until then nobody can
    take the text for complete.
    """

    def __init__(self, start: int) -> None:
        self._at = start
        self._stack: list[str] = []
        self._wants = (
            "value"  # first: or the end; more: after a comma; colon; next: a comma or the end
        )
        self._in_string = False
        self._stopped = False
        self.complete = False
        self._fresh: list[str] = []
        self._all: list[str] = []

    def feed(self, text: str) -> None:
        """Go on in `text`, which only grows between calls."""
        while not self._stopped and self._step(text):
            pass

    def take(self) -> str:
        """What is new since the last call."""
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    @property
    def text(self) -> str:
        """Everything, with the last brace."""
        return "".join(self._all) + "}"

    def _step(self, text: str) -> bool:
        """Read one token; False: wait, or stopped."""
        if self._in_string:
            return self._read_string(text)
        end = _match(_SPACE, text, self._at).end()
        self._emit(text[self._at : end])
        self._at = end
        if end == len(text):
            return False
        mark = text[end]
        if mark == '"':
            return self._begin_string()
        if mark in "{[":
            return self._open(mark)
        if mark in "}]":
            return self._close(mark)
        if mark in ",:":
            return self._separate(mark)
        return self._read_word(text)

    def _stop(self) -> bool:
        self._stopped = True
        return False

    def _emit(self, text: str) -> None:
        if text:
            self._fresh.append(text)
            self._all.append(text)

    def _open(self, mark: str) -> bool:
        if self._wants not in ("value", "first", "more") or (self._stack and self._is_key()):
            return self._stop()
        self._stack.append(mark)
        self._wants = "first"
        self._emit(mark)
        self._at += 1
        return True

    def _is_key(self) -> bool:
        return self._stack[-1] == "{" and self._wants in ("first", "more")

    def _close(self, mark: str) -> bool:
        if self._wants not in ("first", "next") or _CLOSERS[self._stack[-1]] != mark:
            return self._stop()
        self._stack.pop()
        if not self._stack:
            self.complete = True  # the last brace is held back
            return self._stop()
        self._wants = "next"
        self._emit(mark)
        self._at += 1
        return True

    def _separate(self, mark: str) -> bool:
        if self._wants != ("next" if mark == "," else "colon"):
            return self._stop()
        self._wants = "more" if mark == "," else "value"
        self._emit(mark)
        self._at += 1
        return True

    def _begin_string(self) -> bool:
        if self._wants not in ("value", "first", "more"):
            return self._stop()
        self._wants = "colon" if self._is_key() else "next"
        self._in_string = True
        self._emit('"')
        self._at += 1
        return True

    def _read_string(self, text: str) -> bool:
        end = _match(_PLAIN, text, self._at).end()
        self._emit(_NOT_STRICT.sub(lambda m: json.dumps(m[0])[1:-1], text[self._at : end]))
        self._at = end
        if end == len(text):
            return False
        if text[end] == '"':
            self._in_string = False
            self._emit('"')
            self._at += 1
            return True
        escape = _ESCAPE.match(text, end)
        if escape is None:
            return False if _ESCAPE_BEGINS.match(text, end) else self._stop()
        self._emit(escape[0])
        self._at = escape.end()
        return True

    def _read_word(self, text: str) -> bool:
        """A number or a literal, once something stands behind it."""
        word = _WORD.match(text, self._at)
        if word is None or self._wants not in ("value", "first", "more") or self._is_key():
            return self._stop()
        if word.end() == len(text):
            return False if len(word[0]) < 400 else self._stop()
        if not _is_scalar(word[0]):
            return self._stop()
        self._wants = "next"
        self._emit(word[0])
        self._at = word.end()
        return True


def _match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    found = pattern.match(text, at)
    assert found is not None, "the pattern matches nothing, too"
    return found


def _is_scalar(word: str) -> bool:
    try:
        value: Any = json.loads(word)
    except ValueError:
        return False
    return not isinstance(value, float) or math.isfinite(value)
