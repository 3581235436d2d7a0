"""What was kept and what was read, as plain integers, for requests that ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseengine.core.cache import CacheManager
from sparseengine.core.method import LayerStep
from sparseengine.core.params import DENSE_PREFILL
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec
from sparseengine.core.view import BlockMask, Keep, Selection
from sparseengine.engine.digests import DroppedMass

Positions = NDArray[np.int64]
MAX_POSITIONS = 1 << 22  # in one record: some 25 MB of JSON


@dataclass(slots=True)
class Retained:
    """Positions in storage after `computed` tokens were run: positions[layer][kv_head]."""

    event: str  # "prefill" or "evict"
    computed: int
    positions: dict[int, list[list[int]]]
    resident_bytes: int


@dataclass(slots=True)
class Read:
    """What one decode step read: positions[layer][kv_head] of layers with a selection only.

    bytes_read counts K, V and the page summaries that the selection was made from; digests of what
    was evicted, and the keys that are read again to weigh them, too.
    """

    position: int
    positions: dict[int, list[list[int]]]
    bytes_read: int


@dataclass(slots=True)
class SparseOutput:
    """`CompletionOutput.sparse`: JSON-serialisable, positions are indices in the logical text.

    `retained` has one entry when the prompt is done and one per eviction after it; `reads` one per
    decode step; a layer is missing in `reads[i].positions` when everything stored was read.
    `prefill_density`: of the pairs of a block of queries and a block of keys before it, the part
    that was read, over layers and prompt chunks with a pattern; None: there was none.
    `dropped_mass`: one estimate per decode step, of requests that ask for it. Those that ask for
    nothing else have neither `retained` nor `reads`.
    `found_budget`: of requests with `kv_error`, what it came to: mean tokens that a row of the
    layers acted on held when the prompt had been cut; None: it has not been.
    `dense_bytes`: what dense storage of the same tokens would hold. `windows`: tokens that layers
    with a window hold at most, by layer. `truncated`: `retained` and `reads` end early, at
    `MAX_POSITIONS`; the numbers beside them go on.
    """

    method: str
    budget: int | None
    prompt_tokens: int
    resident_bytes: int
    retained: list[Retained] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    prefill: str = DENSE_PREFILL
    prefill_density: float | None = None
    dropped_mass: list[DroppedMass] | None = None
    found_budget: float | None = None
    dense_bytes: int = 0
    windows: dict[int, int] = field(default_factory=dict)
    truncated: bool = False

    @property
    def bytes_read_per_step(self) -> list[int]:
        return [r.bytes_read for r in self.reads]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that shares the lists of positions."""
        found: dict[str, Any] = _plain(self)
        return found

    def added_to(self, before: SparseOutput | None) -> SparseOutput:
        """The whole record, where this is what a `RecordReader` found new.

        A prompt that ends (again) starts the lists anew. The lists of `before` are used up.
        """
        if before is None or (self.retained and self.retained[0].event == "prefill"):
            return self
        before.retained += self.retained
        before.reads += self.reads
        return replace(self, retained=before.retained, reads=before.reads)


@dataclass(slots=True)
class RecordReader:
    """Follows one growing record: each call returns what is new since the last one."""

    retained: int = 0
    reads: int = 0
    last: Retained | None = None

    def news(self, record: SparseOutput) -> SparseOutput:
        """The record with the new entries alone."""
        seen = record.retained[: self.retained]
        if self.last is not None and (not seen or seen[-1] is not self.last):
            self.retained = self.reads = 0  # replayed or resumed: the record has begun anew
        found = replace(
            record, retained=record.retained[self.retained :], reads=record.reads[self.reads :]
        )
        self.retained, self.reads = len(record.retained), len(record.reads)
        self.last = record.retained[-1] if record.retained else None
        return found


@dataclass(slots=True)
class _Entry:
    """Positions of one recorded request's rows, and its output so far."""

    rows: dict[int, list[Positions]]
    out: SparseOutput
    evicted: bool = False
    reading: dict[int, list[list[int]]] = field(default_factory=dict)
    bytes_read: int = 0
    blocks: tuple[int, int] = (0, 0)  # of keys for queries: those read, all
    positions: int = 0  # how many `out` holds

    def has_room(self, positions: Mapping[int, list[list[int]]], limit: int) -> bool:
        """Whether `out` takes so many more positions; once it does not, it takes none."""
        self.positions += sum(len(row) for rows in positions.values() for row in rows)
        self.out.truncated = self.out.truncated or self.positions > limit
        return not self.out.truncated


class Recorder:
    """Follows the rows of recorded requests on the host: appends, keeps and selections.

    It keeps its own positions, so that its answer does not depend on what the cache believes; tests
    compare the two. Copies decisions to the host, so steps with recorded requests synchronise.
    """

    def __init__(self, model: ModelSpec, cache: CacheManager) -> None:
        self._model = model
        self._cache = cache
        self._token_bytes = token_bytes(model)
        self.max_positions = MAX_POSITIONS
        self._entries: dict[int, _Entry] = {}
        # by request and layer: tokens that the cut's masks retain, and how many masks there are
        self._found: dict[int, dict[int, tuple[Tensor, int]]] = {}
        self._budgets: dict[int, float] = {}  # by request: the mean of these, on the host

    def is_recording(self, plan: StepPlan) -> bool:
        return any(c.request.sparse.record for c in plan.chunks)

    def on_select(self, at: LayerStep, selection: Selection | None) -> None:
        """Called at every layer that stores KV, before attention."""
        index = None if selection is None else selection.index.tolist()
        for i, chunk in enumerate(at.plan.chunks):
            if not chunk.request.sparse.record or chunk.purpose is not Purpose.DECODE:
                continue
            entry = self._entry(chunk.request)
            rows = self._rows_now(entry, at.layer, at.spec, chunk)
            if index is None or selection is None:
                entry.bytes_read += sum(len(r) for r in rows) * _token_bytes(at)
                continue
            size = at.page_size if selection.unit == "page" else 1
            read = []
            for head, row in enumerate(rows):
                columns = index[i][head if len(index[i]) > 1 else 0]
                slots = [s for c in columns if c >= 0 for s in range(c * size, c * size + size)]
                read.append([int(row[s]) for s in slots if s < len(row)])
            entry.bytes_read += sum(len(r) for r in read) * _token_bytes(at)
            if any(len(a) < len(b) for a, b in zip(read, rows, strict=True)):
                entry.reading[at.layer] = read
                # what was read was chosen by the summaries of all pages
                pages = sum(-(-len(r) // at.page_size) for r in rows)
                entry.bytes_read += pages * at.page_aux_bytes

    def on_digests(self, at: LayerStep, chunk: Chunk, rows: Sequence[int]) -> None:
        """A decode also read its digest rows, of so many entries, and the kept keys once more."""
        if not chunk.request.sparse.record:
            return
        entry = self._entry(chunk.request)
        held = sum(len(r) for r in self._rows_now(entry, at.layer, at.spec, chunk))
        heads = at.spec.kv_heads // len(rows)
        entry.bytes_read += sum(rows) * heads * _token_bytes(at)
        entry.bytes_read += held * at.spec.stored_dims[0] * at.k.element_size()

    def on_masks(self, at: LayerStep, masks: Mapping[int, BlockMask]) -> None:
        """What prompt chunks read at a layer."""
        for i, mask in masks.items():
            chunk = at.plan.chunks[i]
            if chunk.request.sparse.record:
                entry = self._entry(chunk.request)
                heads, rows, columns = mask.mask.shape
                n = len(chunk.tokens)
                last = [min((r + 1) * mask.block - mask.offset, n) - 1 for r in range(rows)]
                seen = [
                    min((length - n + q) // mask.block + 1, columns)
                    for length in at.lens(i)
                    for q in last
                ]
                possible = sum(seen) * heads // len(at.lens(i))
                read, every = entry.blocks
                entry.blocks = read + int(mask.mask.sum()), every + possible
                entry.out.prefill_density = entry.blocks[0] / max(1, entry.blocks[1])

    def on_stored(self, plan: StepPlan) -> None:
        """The forward is done: this step's tokens are in their rows (replays are not)."""
        for chunk in plan.chunks:
            if not chunk.request.sparse.record or chunk.purpose is Purpose.REPLAY:
                continue
            entry = self._entry(chunk.request)
            for layer, rows in entry.rows.items():
                new = np.arange(chunk.start, chunk.stop)
                entry.rows[layer] = [np.concatenate([r, new]) for r in rows]
            is_decode = chunk.purpose is Purpose.DECODE
            if is_decode and entry.has_room(entry.reading, self.max_positions):
                entry.out.reads.append(Read(chunk.start, entry.reading, entry.bytes_read))
            entry.reading, entry.bytes_read = {}, 0

    def on_cuts_by_error(self, plan: StepPlan, keeps: Sequence[Keep]) -> None:
        """What was found for prompts that end here, on the device; the last cut of each counts."""
        prompts = {
            c.request.id
            for c in plan.chunks
            if c.request.sparse.kv_error is not None and c.purpose is not Purpose.DECODE
        }
        for keep in keeps if prompts else ():
            if keep.request in prompts and keep.layer is not None:
                total = torch.stack([m.sum() for m in keep.masks]).sum()
                found = self._found.setdefault(keep.request, {})
                found[keep.layer] = (total, len(keep.masks))

    def found_budget(self, request_id: int) -> float | None:
        """Mean over all rows that a cut by an error has left; waits for the device once."""
        found = self._found.pop(request_id, None)
        if found:
            totals = torch.stack([total for total, _ in found.values()]).tolist()
            heads = [self._model.layers[layer].kv_heads for layer in found]
            masks = [count for _, count in found.values()]
            tokens = sum(t * h // m for t, h, m in zip(totals, heads, masks, strict=True))
            self._budgets[request_id] = tokens / sum(heads)
        return self._budgets.get(request_id)

    def on_keeps(self, keeps: Sequence[Keep]) -> None:
        """Retain decisions, before the cache applies them."""
        for keep in keeps:
            entry = self._entries.get(keep.request)
            if entry is None:
                continue
            masks = [np.asarray(m.cpu().numpy(), dtype=bool) for m in keep.masks]
            for layer in self._model.sparse_layers if keep.layer is None else (keep.layer,):
                rows = entry.rows[layer]
                per_head = masks if len(masks) > 1 else masks * len(rows)
                entry.rows[layer] = [r[m] for r, m in zip(rows, per_head, strict=True)]
            entry.evicted = True

    def on_step_end(self, plan: StepPlan) -> None:
        """The step is over: note what is left after the prompt and after each eviction.

        How many of their newest tokens WINDOW layers still hold is the cache's business.
        """
        for chunk in plan.chunks:
            entry = self._entries.get(chunk.request.id)
            if entry is None:
                continue
            for layer, rows in entry.rows.items():
                if self._model.layers[layer].kind is LayerKind.WINDOW:
                    held = self._cache.lens(chunk.request.id, layer)
                    entry.rows[layer] = [r[len(r) - n :] for r, n in zip(rows, held, strict=True)]
            usage = self._cache.usage(chunk.request.id)
            entry.out.resident_bytes = usage.bytes
            is_replay = chunk.purpose is Purpose.REPLAY
            stop = chunk.start if is_replay else chunk.stop
            entry.out.dense_bytes = stop * self._token_bytes
            if is_replay and entry.evicted and entry.out.retained:
                entry.out.retained.pop()  # replays belong to the prompt, which ends now
            if chunk.ends_prompt or entry.evicted:
                positions = {la: [r.tolist() for r in rows] for la, rows in entry.rows.items()}
                event = "prefill" if chunk.ends_prompt or is_replay else "evict"
                if entry.has_room(positions, self.max_positions):
                    noted = Retained(event, stop, positions, usage.bytes)
                    entry.out.retained.append(noted)
            entry.evicted = False

    def fork(self, source: Request, request: Request) -> None:
        """An n > 1 sibling starts from its parent's rows and history."""
        budget = self.found_budget(source.id)
        if budget is not None:
            self._budgets[request.id] = budget
        parent = self._entries.get(source.id)
        if parent is not None and request.sparse.record:
            entry = self._entry(request)
            entry.rows = {la: list(rows) for la, rows in parent.rows.items()}
            entry.out.retained = list(parent.out.retained)
            entry.out.prefill_density = parent.out.prefill_density
            entry.out.resident_bytes = parent.out.resident_bytes
            entry.out.dense_bytes = parent.out.dense_bytes
            entry.out.truncated, entry.positions = parent.out.truncated, parent.positions

    def forget(self, request_id: int) -> None:
        """Preempted, aborted or taken: a resumed request is recorded anew."""
        self._entries.pop(request_id, None)
        self._found.pop(request_id, None)
        self._budgets.pop(request_id, None)

    def result(self, request_id: int) -> SparseOutput | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.out

    def _entry(self, request: Request) -> _Entry:
        if request.id not in self._entries:
            found = np.arange(request.computed)  # stored already when it was admitted
            specs = self._model.layers
            rows = {la: [found] * specs[la].kv_heads for la in self._model.kv_layers}
            out = self._new_output(request, 0)
            out.windows = {
                la: specs[la].window or 0 for la in rows if specs[la].kind is LayerKind.WINDOW
            }
            self._entries[request.id] = _Entry(rows, out)
        return self._entries[request.id]

    def blank(self, request: Request) -> SparseOutput:
        """The facts about a request that was not recorded."""
        resident = self._cache.usage(request.id).bytes if request.computed else 0
        return self._new_output(request, resident)

    @staticmethod
    def _new_output(request: Request, resident_bytes: int) -> SparseOutput:
        return SparseOutput(
            request.sparse.method,
            request.budget,
            request.prompt_len,
            resident_bytes,
            prefill=request.sparse.prefill,
        )

    @staticmethod
    def _rows_now(entry: _Entry, layer: int, spec: LayerSpec, chunk: Chunk) -> list[Positions]:
        new = np.arange(chunk.start, chunk.stop)
        rows = [np.concatenate([r, new]) for r in entry.rows[layer]]
        if spec.kind is LayerKind.WINDOW and spec.window is not None:
            rows = [r[r > chunk.start - spec.window] for r in rows]
        return rows


def _token_bytes(at: LayerStep) -> int:
    """Bytes of one token of one KV head at this layer."""
    return sum(at.spec.stored_dims) * at.k.element_size()


def _plain(value: Any) -> Any:
    """Records and lists of records as mappings; lists of numbers, maybe long, as they are."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [_plain(v) for v in value]
    return value


def token_bytes(model: ModelSpec) -> int:
    """Bytes that dense storage takes for a token, all layers together."""
    layers = [model.layers[i] for i in model.kv_layers]
    return sum(s.kv_heads * sum(s.stored_dims) for s in layers) * model.dtype.itemsize
