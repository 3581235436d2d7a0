"""What methods may ask of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any


class Words:
    """A `Vocabulary` over a fast tokenizer of transformers; ids at or above `size` do not exist."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer = tokenizer
        self._size = size

    def encode(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return tuple(i for i in ids if i < self._size)

    @cached_property
    def _texts(self) -> list[str]:
        """What each token adds to a text, special tokens nothing."""
        count = min(self._size, len(self._tokenizer))
        backend = self._tokenizer.backend_tokenizer
        return list(backend.decode_batch([[i] for i in range(count)], skip_special_tokens=True))

    def ending_in(self, marks: Sequence[str]) -> frozenset[int]:
        ends = tuple(marks)
        return frozenset(i for i, text in enumerate(self._texts) if text.endswith(ends))

    def answer_header(self) -> tuple[int, ...]:
        if not getattr(self._tokenizer, "chat_template", None):
            return ()
        asked = [{"role": "user", "content": "?"}]
        render = self._tokenizer.apply_chat_template
        short = render(asked, tokenize=False, add_generation_prompt=False)
        long = render(asked, tokenize=False, add_generation_prompt=True)
        return self.encode(long[len(short) :]) if long.startswith(short) else ()
