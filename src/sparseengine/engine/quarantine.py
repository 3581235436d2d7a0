"""Suspects of a failed step run alone, in turns with the others, until it is known who fails."""

from __future__ import annotations

from dataclasses import dataclass

from sparseengine.core.plan import Chunk, Request

_MOST_STRIKES = 3  # a request that was near that many failures stays alone


@dataclass(slots=True)
class _Record:
    tokens: int  # the text was this long when the step failed
    computed: int
    strikes: int


class Quarantine:
    """Which requests are suspects. Empty unless a step has failed, and then costs nothing."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._others_ran = False

    @property
    def is_active(self) -> bool:
        return bool(self._records)

    def suspect(self, request: Request) -> None:
        old = self._records.get(request.id)
        strikes = 1 if old is None else old.strikes + 1
        self._records[request.id] = _Record(len(request.tokens), request.computed, strikes)

    def choose(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks that may share the next step: no suspect, or one suspect alone."""
        if not self._records:
            return chunks
        others = [c for c in chunks if c.request.id not in self._records]
        if len(others) == len(chunks):
            return chunks
        if others and not self._others_ran:
            self._others_ran = True
            return others
        self._others_ran = False
        order = {request_id: i for i, request_id in enumerate(self._records)}
        alone = [c for c in chunks if c.request.id in order]
        chosen = min(alone, key=lambda c: order[c.request.id])
        self._records[chosen.request.id] = self._records.pop(chosen.request.id)  # to the end
        return [chosen]

    def advanced(self, request: Request) -> None:
        """A step of the request went well; past the point of failure it is free again."""
        record = self._records.get(request.id)
        if record is None or record.strikes >= _MOST_STRIKES:
            return
        if request.computed > record.computed and request.computed >= record.tokens:
            del self._records[request.id]

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
