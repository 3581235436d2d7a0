"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparseengine.engine.outputs import Logprob, Logprobs

_LOWEST = -9999.0  # JSON knows no infinity


def _finite(value: float) -> float:
    return max(value, _LOWEST)


@dataclass(slots=True)
class CompletionLogprobs:
    """The completions endpoint's: parallel lists over prompt (with echo) and output tokens.

    Offsets count characters of the text shown; a token whose character is still incomplete stands
    where that character will.
    """

    as_ids: bool
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_prompt(self, ids: Sequence[int], rows: Sequence[Logprobs | None], decode: Any) -> None:
        """The first token of a prompt has no probability."""
        for token, row in zip(ids, rows, strict=True):
            if row is None:
                self._add(self._name(token, decode([token])), None, None)
            else:
                self._add_row(token, row)

    def add(self, ids: Sequence[int], rows: Sequence[Logprobs]) -> None:
        for token, row in zip(ids, rows, strict=True):
            self._add_row(token, row)

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        found = {
            "text_offset": self.text_offset,
            "token_logprobs": self.token_logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top_logprobs,
        }
        self.text_offset, self.token_logprobs, self.tokens, self.top_logprobs = [], [], [], []
        return found

    def _add_row(self, token: int, row: Logprobs) -> None:
        top: dict[str, float] = {}
        for other, entry in sorted(row.items(), key=lambda item: item[1].rank):
            top.setdefault(self._name(other, entry.decoded_token or ""), _finite(entry.logprob))
        own = row[token]
        self._add(self._name(token, own.decoded_token or ""), _finite(own.logprob), top)

    def _add(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self.offset)
        self.offset += len(text)

    def _name(self, token: int, text: str) -> str:
        return f"token_id:{token}" if self.as_ids else text


def chat_logprobs(
    ids: Sequence[int], rows: Sequence[Logprobs] | None, top: int, *, as_ids: bool
) -> list[dict[str, Any]]:
    """The chat endpoint's `logprobs.content` for some tokens."""
    found = []
    for token, row in zip(ids, rows or (), strict=True):
        ranked = sorted(row.items(), key=lambda item: item[1].rank)[:top]
        found.append(
            {
                **_entry(token, row[token], as_ids),
                "top_logprobs": [_entry(t, p, as_ids) for t, p in ranked],
            }
        )
    return found


def _entry(token: int, value: Logprob, as_ids: bool) -> dict[str, Any]:
    text = value.decoded_token or ""
    return {
        "token": f"token_id:{token}" if as_ids else text,
        "logprob": _finite(value.logprob),
        "bytes": list(text.encode("utf-8")),
    }


def prompt_rows(rows: Sequence[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: per token a mapping of ids."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(t): {
                "logprob": _finite(p.logprob),
                "rank": p.rank,
                "decoded_token": p.decoded_token,
            }
            for t, p in row.items()
        }
        for row in rows
    ]
