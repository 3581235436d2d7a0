"""An answer as a row of blocks (reasoning, text, tool calls), for formats that show it that way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparseengine.server.output import Event, ReasoningDelta
from sparseengine.server.tools import CallStart, ContentDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, kw_only=True)
class Block:
    """`text` is the arguments of a call. `id` and `name` are a call's."""

    index: int
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a block; `text` is what a delta adds."""

    what: Literal["open", "delta", "close"]
    block: Block
    text: str = ""


class Blocks:
    """Folds events into blocks. At most one block is open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def add(self, event: Event) -> list[Change]:
        if isinstance(event, CallStart):
            return self._begin("call", id=event.id, name=event.name)
        found: list[Change] = []
        if isinstance(event, (ReasoningDelta, ContentDelta)):
            kind: Kind = "reasoning" if isinstance(event, ReasoningDelta) else "text"
            if self._open is None or self._open.kind != kind:
                found = self._begin(kind)
        block = self._open
        assert block is not None, "arguments without a call"
        block.text += event.text
        found.append(Change("delta", block, event.text))
        return found

    def finish(self) -> list[Change]:
        """The answer is over."""
        block, self._open = self._open, None
        return [] if block is None else [Change("close", block)]

    def _begin(self, kind: Kind, *, id: str = "", name: str = "") -> list[Change]:
        found = self.finish()
        self._open = Block(index=len(self.all), kind=kind, id=id, name=name)
        self.all.append(self._open)
        return [*found, Change("open", self._open)]
