"""DuoAttention (arXiv:2410.10819): a few heads retrieve; the others need sinks and a window."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Demand, StepPlan
from sparseengine.core.specs import LayerKind, ModelSpec, Ragged
from sparseengine.core.view import Keep
from sparseengine.errors import RequestError
from sparseengine.methods.calibration import (
    calibration_knob,
    damaged,
    read_calibration,
    refuse_both,
)
from sparseengine.methods.families import Method
from sparseengine.methods.knobs import knob
from sparseengine.methods.streaming_llm import SinkConfig, StreamingLLM

_LARGEST_FILE = 4 << 20
Gates = dict[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DuoAttentionConfig(SinkConfig):
    """Knobs of DuoAttention."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"sink": 64, "retrieval": 0.5},
        }
    )

    sink: int = knob(64, "first tokens that streaming heads always retain", low=0, high=1 << 20)
    retrieval: float = knob(
        0.5,
        "share of the model's KV heads that retain everything: those with the largest gates",
        low=0.0,
        high=1.0,
    )
    pattern: str = knob(
        "",
        "file of gates, a number per KV head, for every layer of the model: JSON lists, or lines "
        "of a .tsv file as the authors publish them; without one a built-in pattern spreads "
        "retrieval heads evenly, which nothing was learned for",
    )
    calibration: str = calibration_knob()


class DuoAttention(Method):
    """Retrieval heads retain everything, streaming heads sinks and a window (arXiv:2410.10819).

    Gates, learned once per model, say how much a KV head loses without the middle of the text. The
    `retrieval` share of all heads with the largest gates (ties: the smaller layer, then the smaller
    head) is left alone. Every other head is a row of StreamingLLM:

        retrieval head   | everything                                              |
        streaming head   | sinks, whole pages |   evicted   | recent, newest last  |

    The budget is what a row of a streaming head retains, sinks included, so the mean row is longer:
    by default 64 sinks and 256 recent tokens for half of the heads, and all tokens for the rest.
    Streaming rows are cut after every block of the prompt, at its end and while decoding; the
    freed pages are other requests' at once. `dense_layers` leaves whole layers alone, whatever
    their gates.

    Gates come from a pattern file (the authors' learned ones, say) or from a calibration, which
    estimates them without training. Without either, the heads are NOT those that retrieve: the
    built-in pattern takes the same share of every layer, head (layer modulo heads) first. It has
    the memory and the speed of a learned pattern, not its quality.

    Deviations: a block of the prompt attends to all that was retained before it and to itself,
    where the authors mask to the window inside a block, too; heads keep their order, where the
    authors sort them by kind; streaming rows lose whole pages unless `page_aligned` is off; layers
    with one latent row have no heads to tell apart and stay dense. Tensor parallelism would need to
    know which of the pattern's heads a rank holds.
    """

    name = "duo_attention"
    config_class = DuoAttentionConfig
    traits = Traits(
        family="eviction",
        sharing="chain",
        takes="retained",
        decode_hooks=True,
        tp="reduce",
        kinds=frozenset({LayerKind.FULL}),
    )
    ragged = Ragged.HEAD
    default_budget = 320

    def __init__(self, config: Any, model: ModelSpec) -> None:
        gates = _gates_of(config, model)
        self.streaming = streaming_heads(gates, config.retrieval)
        self._row = StreamingLLM(config, model)  # what happens to one row of a streaming head
        super().__init__(config, model)
        self._pending: dict[int, tuple[Tensor, int]] = {}

    def dense_layers(self) -> frozenset[int]:
        others = frozenset(range(len(self.model.layers))) - self.streaming.keys()
        return super().dense_layers() | others

    def prefill_block(self) -> int | None:
        return self._row.prefill_block()

    def weigh(self, plan: StepPlan, layers: Callable[[], Iterable[LayerStep]]) -> None:
        """Note which requests' streaming rows are cut; they are all alike."""
        first = next((at for at in layers() if self.acts_on(at.layer)), None)
        if first is None:
            return
        head = min(self.streaming[first.layer])
        for i, chunk in enumerate(plan.chunks):
            budget = chunk.request.budget
            if budget is None or chunk.stop <= budget or not self._row.is_due(chunk):
                continue
            length = first.lens(i)[head]
            if length > budget:
                cut = self._row.cut(length, budget, first.page_size).mask()
                self._pending[chunk.request.id] = (cut, chunk.stop)

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        keeps: list[Keep] = []
        for chunk in plan.chunks:
            request = chunk.request
            if request.id not in self._pending:
                continue
            cut, everything = self._pending.pop(request.id)
            whole = torch.ones(everything, dtype=torch.bool)
            for layer in self.layers:
                streams = self.streaming[layer]
                heads = range(self.model.layers[layer].kv_heads)
                masks = tuple(cut if h in streams else whole for h in heads)
                keeps.append(Keep(request.id, layer, masks))
        return keeps

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Over all heads: streaming rows as StreamingLLM bounds them, the others in full."""
        total = prompt_len + max_tokens
        if budget is None:
            return Demand(total, total)
        block = self.prefill_block()
        worst = prompt_len if block is None else min(prompt_len, budget + block)
        steady = self._mean(min(total, budget + 1), total)
        return Demand(max(self._mean(worst, prompt_len), steady), steady)

    def _mean(self, streaming_tokens: int, other_tokens: int) -> int:
        """`mean_rows` with the streaming heads, not layers, as those that hold less."""
        if streaming_tokens == other_tokens:
            return other_tokens
        page = self.page_size
        every = sum(self.model.layers[i].kv_heads for i in self.model.sparse_layers)
        few = sum(len(self.streaming[layer]) for layer in self.layers)
        pages = few * -(-streaming_tokens // page) + (every - few) * -(-other_tokens // page)
        return -(-pages * page // max(every, 1))

    def forget(self, request_id: int) -> None:
        self._pending.pop(request_id, None)


def streaming_heads(gates: Gates, retrieval: float) -> dict[int, frozenset[int]]:
    """The heads of each layer that are not among the `retrieval` share with the largest gates.

    The number of retrieval heads is rounded to the nearest. Layers without a streaming head are
    left out.
    """
    ranked = sorted((-g, layer, h) for layer, row in gates.items() for h, g in enumerate(row))
    count = math.floor(retrieval * len(ranked) + 0.5)
    found: dict[int, set[int]] = {}
    for _, layer, head in ranked[count:]:
        found.setdefault(layer, set()).add(head)
    return {layer: frozenset(heads) for layer, heads in sorted(found.items())}


def _heads(model: ModelSpec) -> dict[int, int]:
    """KV heads of each FULL layer."""
    return {i: s.kv_heads for i, s in enumerate(model.layers) if s.kind is LayerKind.FULL}


def _spread(model: ModelSpec) -> Gates:
    """The built-in pattern: the same share of heads in every layer, another first one in each."""
    return {
        layer: tuple(1 - ((h - at) % count) / count for h in range(count))
        for at, (layer, count) in enumerate(_heads(model).items())
    }


def _gates_of(config: DuoAttentionConfig, model: ModelSpec) -> Gates:
    """Gates of the FULL layers: of a calibration, of a pattern file, or built in."""
    if not config.calibration:
        return _load(config.pattern, model) if config.pattern else _spread(model)
    refuse_both("duo_attention", pattern=config.pattern)
    rows = read_calibration(config.calibration, "duo_attention", model).get("gates")
    if not isinstance(rows, list) or len(rows) != len(model.layers):
        raise damaged(config.calibration)
    try:
        return {layer: _gates(rows[layer], count) for layer, count in _heads(model).items()}
    except (ValueError, OverflowError):
        raise damaged(config.calibration) from None


def _load(path: str, model: ModelSpec) -> Gates:
    """Gates of the FULL layers from a file; raises `RequestError` that says what it must be.

    One message for all that may be wrong, so that it tells nothing of a file that is no pattern.
    """
    heads = _heads(model)
    try:
        file = Path(path)
        if not file.is_file() or file.stat().st_size > _LARGEST_FILE:
            raise ValueError
        rows = _table(file.read_text()) if file.suffix == ".tsv" else json.loads(file.read_text())
        if not isinstance(rows, list) or len(rows) != len(model.layers):
            raise ValueError
        return {layer: _gates(rows[layer], count) for layer, count in heads.items()}
    except (OSError, OverflowError, ValueError, RecursionError):
        raise RequestError(
            f"sparse knob pattern={path!r} is not allowed; it must be a JSON file with "
            f"{len(model.layers)} lists (or a .tsv file with as many lines), one per layer, which "
            f"hold a finite number for each KV head (per layer, other layers' lists being ignored: "
            f"{heads})"
        ) from None


def _table(text: str) -> list[list[float]]:
    """The numbers of each line. Raises ValueError for words."""
    return [[float(number) for number in line.split()] for line in text.splitlines()]


def _gates(row: object, count: int) -> tuple[float, ...]:
    """A layer's gates; raises ValueError unless they are `count` finite numbers."""
    if not isinstance(row, list) or len(row) != count:
        raise ValueError
    if not all(isinstance(g, int | float) and not isinstance(g, bool) for g in row):
        raise ValueError
    gates = tuple(float(g) for g in row)
    if not all(map(math.isfinite, gates)):
        raise ValueError
    return gates
