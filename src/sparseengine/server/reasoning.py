"""Splits what a model thinks from what it answers: <think> ... </think>.

The opening tag stands in the text, or at the end of the prompt, where some chat templates put it;
the prompt tells which. Tags are never shown, not even a part of one. White space around them is
neither reasoning nor content.
"""

from __future__ import annotations

from enum import Enum, auto

from sparseengine.errors import ConfigError, nearest

_OPEN, _CLOSE = "<think>", "</think>"
# name: whether text without an opening tag is reasoning when the prompt is not known
_SPLITTERS = {
    "deepseek_r1": True,
    "deepseek_v3": False,
    "qwen3": False,
    "glm45": False,
}
_ALIASES = {"deepseek": "deepseek_r1", "glm": "glm45", "glm47": "glm45", "qwen": "qwen3"}


class _State(Enum):
    """Where in the output the next character stands; LEADING and CLOSED: white space is dropped."""

    START = auto()
    LEADING = auto()
    REASONING = auto()
    CLOSED = auto()
    CONTENT = auto()


def splitter_names() -> tuple[str, ...]:
    """Every name that `splitter_for` takes."""
    return tuple(sorted((*_SPLITTERS, *_ALIASES)))


def splitter_for(name: str, *, prompt: str | None = None) -> ReasoningSplitter:
    """A splitter for one output, by vLLM's --reasoning-parser names.

    prompt: the rendered text in front of the output. Ending in <think> it means that the output
    begins inside; otherwise the output must open the tag itself. Without it, deepseek_r1 begins
    inside and the others do not. Raises `ConfigError` for an unknown name.
    """
    key = name.strip().lower().replace("-", "_")
    key = _ALIASES.get(key, key)
    if key not in _SPLITTERS:
        raise ConfigError(f"unknown reasoning parser {name!r}; {nearest(key, splitter_names())}")
    inside = _SPLITTERS[key] if prompt is None else _is_open(prompt)
    return ReasoningSplitter(inside=inside)


def structure_begins_after(prompt: str) -> str | None:
    """What a structured answer must wait for (`StructuredOutputs.after`): the end of the reasoning
    that the prompt has begun, None when it has begun none."""
    return _CLOSE if _is_open(prompt) else None


def _is_open(prompt: str) -> bool:
    return prompt.rstrip().endswith(_OPEN)


class ReasoningSplitter:
    """One output as it comes: how the text is split into pushes changes nothing."""

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._state = _State.START
        self._text = ""

    def push(self, text: str) -> tuple[str, str]:
        """(new reasoning, new content)."""
        self._text += text
        return self._advance(last=False)

    def finish(self) -> tuple[str, str]:
        """The text is over: the rest of both."""
        return self._advance(last=True)

    def split(self, text: str) -> tuple[str | None, str | None]:
        """(reasoning, content) of a whole output; None for what is empty."""
        first, rest = self.push(text), self.finish()
        return first[0] + rest[0] or None, first[1] + rest[1] or None

    def _advance(self, last: bool) -> tuple[str, str]:
        reasoning = content = ""
        if self._state is _State.START:
            self._open(last)
        if self._state is _State.LEADING:
            self._skip_space(_State.REASONING)
        if self._state is _State.REASONING:
            reasoning = self._reason(last)
        if self._state is _State.CLOSED:
            self._skip_space(_State.CONTENT)
        if self._state is _State.CONTENT:
            content, self._text = self._text, ""
        return reasoning, content

    def _open(self, last: bool) -> None:
        """Drop an opening tag, unless one may still come."""
        bare = self._text.lstrip()
        if bare.startswith(_OPEN):
            self._text, self._state = bare[len(_OPEN) :], _State.LEADING
        elif last or not _OPEN.startswith(bare):
            self._state = _State.LEADING if self._inside else _State.CONTENT

    def _skip_space(self, behind: _State) -> None:
        self._text = self._text.lstrip()
        if self._text:
            self._state = behind

    def _reason(self, last: bool) -> str:
        at = self._text.find(_CLOSE)
        end = at if at >= 0 else len(self._text) - (0 if last else _held(self._text))
        shown = self._text[:end].rstrip()  # white space may turn out to stand before the tag
        if at >= 0:
            self._text, self._state = self._text[at + len(_CLOSE) :], _State.CLOSED
        else:
            self._text = self._text[len(shown) :]
        return shown


def _held(text: str) -> int:
    """Length of the tail that may be the beginning of the closing tag."""
    tails = range(min(len(_CLOSE) - 1, len(text)), 0, -1)
    return next((n for n in tails if _CLOSE.startswith(text[-n:])), 0)
