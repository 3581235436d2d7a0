"""Token ids to text as they come, and stop strings.

The text so far never holds a character that is still incomplete, and the parts emitted add up to
the decode of all token ids. A stop string is found wherever it ends first, also within one token's
text; while the text's tail could still become one, exactly that tail is held back.

Tokenizers that fall back to bytes decode a run of byte tokens as a whole: an invalid byte at its
end turns characters that were shown already into U+FFFD. Those stay as they were shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Text of one completion. `backend` is the `tokenizers.Tokenizer` behind the tokenizer.

    text: what may be shown by now; it only grows, and is final after `finish`.
    """

    def __init__(
        self,
        backend: Any,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._backend = backend
        self._stop = tuple(stop)
        self._skip = skip_special_tokens
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._whole = ""  # all complete text
        self._searched = 0  # stop strings end past here
        self.text = ""

    def push(self, token: int) -> str | None:
        """Add a token; returns the stop string that its text completes, if any."""
        self._ids.append(token)
        return self._extend(self._stream.step(self._backend, token) or "")

    def finish(self) -> str | None:
        """Emit what was held back: an unfinished character, the start of a stop string."""
        full: str = self._backend.decode(self._ids, skip_special_tokens=self._skip)
        hit = self._extend(full[len(self._whole) :] if full.startswith(self._whole) else "")
        if hit is None:
            self.text = self._whole
        return hit

    def _extend(self, new: str) -> str | None:
        self._whole += new
        if len(self._ids) < self._min_tokens:  # stop strings count only behind min_tokens
            self._searched = len(self._whole)
        hit = self._find(self._searched)
        if hit is not None:
            stop, end = hit
            self.text = self._whole = self._whole[: end if self._include_stop else end - len(stop)]
            return stop
        self._searched = len(self._whole)
        self.text = self._whole[: len(self._whole) - self._held()]
        return None

    def _find(self, searched: int) -> tuple[str, int] | None:
        """The stop string that ends first behind `searched`; the longest of those."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = self._whole.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                found = (at + len(stop), at, stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[2], best[0])

    def _held(self) -> int:
        """Length of the longest tail that is a proper prefix of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(self._whole)), 0, -1):
            tail = self._whole[-n:]
            if any(len(s) > n and s.startswith(tail) for s in self._stop):
                return n
        return 0
