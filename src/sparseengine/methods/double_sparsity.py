"""Double Sparsity (arXiv:2408.07092): a few label channels of each key rank the tokens to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine import ops
from sparseengine.cache.tensors import upload
from sparseengine.core.method import LayerStep, SealedPages
from sparseengine.core.specs import AuxSpec, LayerKind, LayerSpec, ModelSpec, Per
from sparseengine.core.view import Selection
from sparseengine.errors import RequestError
from sparseengine.methods.calibration import (
    calibration_knob,
    damaged,
    read_calibration,
    refuse_both,
)
from sparseengine.methods.knobs import MethodConfig, knob
from sparseengine.methods.tokens import TokenSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleSparsityConfig(MethodConfig):
    """Knobs of Double Sparsity."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "paper": {"group_factor": 8, "sink": 0},
            "authors": {"group_factor": 8, "sink": 0},
            "longbench": {"group_factor": 2, "sink": 0},
        }
    )

    dense_layers: int = knob(2, "first layers of the model that read everything", low=0, high=4096)
    group_factor: int = knob(
        4, "one label channel for this many channels of a key (the paper: 8)", low=1, high=1024
    )
    channels: tuple[int, ...] = knob(
        (),
        "label channels of every head; empty: those of the calibration, or without one the rotary "
        "pairs that turn slowest, of a latent channels at equal distances",
        low=0,
        high=1 << 16,
    )
    sink: int = knob(4, "first tokens that are always read", low=0, high=1 << 20)
    calibration: str = calibration_knob()


class DoubleSparsity(TokenSelection):
    """Reads the tokens whose label channels promise most attention (arXiv:2408.07092).

    A label is a key cut down to r = head_dim // group_factor channels and is stored beside it. A
    decode step multiplies the query's same channels with all labels of the row, normalises each
    query head by a softmax over them, takes the largest of a KV head's query heads, and attends to
    the best tokens, one list per KV head. Nothing is evicted, prefill is dense, the first layers
    are. The budget counts tokens read per KV head, the newest and `sink` (at most half) included; a
    row that is not longer is read whole.

    Deviations: labels are made when a page is full, so the tokens of the open page are read before
    all others, the newest first. A calibration gives each KV head channels of its own. Without one
    they are the same in all heads: those of the slowest rotary pairs (channels i and
    i + head_dim / 2, which is where trained models put content), or `channels`. There are twice as
    many as the paper's because they need not be chosen by data. The authors choose per query head,
    force no sinks, and store labels in 4 bits; ours are in the keys' type.
    """

    name = "double_sparsity"
    config_class = DoubleSparsityConfig

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        dims = [model.layers[i].head_dim for i in self.layers] or [1]
        self._labels = len(set(config.channels)) or max(
            1, min(min(dims), max(dims) // config.group_factor)
        )
        if config.channels and max(config.channels) >= min(dims):
            raise RequestError(
                f"double_sparsity: channels={list(config.channels)} is not allowed; keys of this "
                f"model have channels 0..{min(dims) - 1}"
            )
        self._chosen: dict[tuple[LayerKind, int, torch.device], Tensor] = {}
        self._order = _calibrated(config, model, self._labels) if config.calibration else {}
        self._tables: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def aux(self) -> tuple[AuxSpec, ...]:
        shape = (self.page_size, self._labels)
        return (AuxSpec(name="labels", per=Per.PAGE, shape=shape, dtype=self.model.dtype),)

    def channels(self, spec: LayerSpec, device: torch.device) -> Tensor:
        """The label channels of a layer's keys: int64 [r], ascending."""
        key = (spec.kind, spec.head_dim, device)
        if key not in self._chosen:  # a constant on the device: no copy in a captured step
            chosen = sorted(set(self.config.channels)) or builtin_channels(spec, self._labels)
            self._chosen[key] = torch.tensor(chosen, dtype=torch.int64, device=device)
        return self._chosen[key]

    def table(self, layers: tuple[int, ...], device: torch.device) -> Tensor:
        """Calibrated channels of each KV head of these layers: int64 [layers * Hkv, r]."""
        key = (layers, device)
        if key not in self._tables:
            rows = [row for layer in layers for row in self._order[layer]]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._tables[key]

    def seal(self, pages: SealedPages) -> None:
        """Label the keys of pages that became full: [N, U, P, D] -> [N, U, P, r]."""
        if self._acts.isdisjoint(pages.layers):
            return
        keys, ids = pages.payload[0], pages.pages
        if self._order:
            assert pages.rows is not None, "labels of calibrated channels need the pages' layers"
            rows = upload(pages.rows, keys.device)[:, None]
            units = rows * keys.shape[1] + torch.arange(keys.shape[1], device=keys.device)
            channels = self.table(pages.layers, keys.device)[units][:, :, None]  # [M, U, 1, r]
            channels = channels.expand(-1, -1, keys.shape[2], -1)
            pages.aux["labels"][ids] = keys[ids].gather(-1, channels)
            return
        found = keys[ids[:, None], :, :, self.channels(pages.spec, keys.device)]  # [M, r, U, P]
        pages.aux["labels"][ids] = found.permute(0, 2, 3, 1)

    def _asked(self, at: LayerStep) -> Tensor:
        """The label channels of this step's queries, [S, Hq, r]."""
        if not self._order:
            return at.q[..., self.channels(at.spec, at.q.device)]
        own = self.table((at.layer,), at.q.device)  # [Hkv, r]
        of_heads = own.repeat_interleave(at.spec.group_size, 0)
        return at.q.gather(-1, of_heads.expand(len(at.q), -1, -1))

    def select(self, at: LayerStep) -> Selection | None:
        width = self._width(at) if self.acts_on(at.layer) else None
        if width is None:
            return None
        table, lens = at.packed()  # lens [S, G]
        opened = (lens - 1) // at.page_size * at.page_size
        q = self._asked(at)
        scores = ops.slot_scores(
            q, at.aux("labels"), table, opened, at.spec.softmax_scale, normalise=True
        )
        sinks = (self.budgets(at) // 2).clamp(max=self.config.sink)
        return self._best(at, scores, opened[..., None], sinks, width)


def _calibrated(
    config: DoubleSparsityConfig, model: ModelSpec, count: int
) -> dict[int, list[list[int]]]:
    """The label channels of each KV head, ascending, of every layer that may be labelled."""
    refuse_both("double_sparsity", channels=config.channels)
    rows = read_calibration(config.calibration, "double_sparsity", model).get("channels")
    found = {}
    try:
        for i, spec in enumerate(model.layers):
            if spec.kind in DoubleSparsity.traits.kinds:
                heads = rows[i]  # type: ignore[index]
                whole = list(range(spec.head_dim))
                if len(heads) != spec.kv_heads or any(sorted(order) != whole for order in heads):
                    raise ValueError
                found[i] = [sorted(order[:count]) for order in heads]
    except (IndexError, KeyError, TypeError, ValueError):
        raise damaged(config.calibration) from None
    return found


def builtin_channels(spec: LayerSpec, count: int) -> list[int]:
    """Channels that are chosen without data, ascending.

    Rotary embeddings turn channel i with i + head_dim / 2, slower the larger i is. A latent is not
    rotated but for its last channels: any are as good as others.
    """
    dim = spec.head_dim
    if spec.kind is LayerKind.LATENT:
        return [i * dim // count for i in range(count)]
    half = dim // 2
    order = [c for i in reversed(range(half)) for c in (i, i + half)]
    return sorted([*order, *range(2 * half, dim)][:count])
