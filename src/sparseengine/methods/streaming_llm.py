"""StreamingLLM (arXiv:2309.17453): attention sinks and a recent window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparseengine.cache.tensors import upload
from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Chunk, Demand, Purpose, Request, StepPlan
from sparseengine.core.specs import (
    AuxSpec,
    CacheGroup,
    LayerKind,
    LayerSpec,
    ModelSpec,
    Per,
    Ragged,
    Rotary,
)
from sparseengine.core.view import Keep
from sparseengine.errors import RequestError, UnsupportedError
from sparseengine.methods.families import DENSE_DOC, Method
from sparseengine.methods.knobs import MethodConfig, knob

_MOST_SINKS = 64  # whose keys are kept as they were written, with pos_shift
_KEYS = "sink_keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig(MethodConfig):
    """Knobs of rows that hold sinks and a recent window."""

    dense_layers: int = knob(0, DENSE_DOC, low=0, high=4096)
    sink: int = knob(4, "first tokens that are always retained", low=0, high=1 << 20)
    block_tokens: int = knob(
        1024,
        "evict after every block of this many prompt tokens, which bounds memory; 0 attends to the "
        "whole prompt and evicts when it ends",
        low=0,
        high=1 << 20,
    )
    page_aligned: bool = knob(
        True,
        "evict whole pages only, so that no data moves: sinks are rounded up to a page, and up to "
        "a page less than the budget is retained",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLMConfig(SinkConfig):
    """Knobs of StreamingLLM."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "paper": {"sink": 4, "pos_shift": True, "page_aligned": False},
            "authors": {"sink": 4, "pos_shift": True, "page_aligned": False, "block_tokens": 0},
            "kvpress": {"sink": 4, "block_tokens": 0, "page_aligned": False},
            "sparse-vllm": {"sink": 64},
        }
    )

    pos_shift: bool = knob(
        False,
        "attend to keys at their positions inside the cache, as the paper does, so that no "
        f"distance is longer than a row; at most {_MOST_SINKS} sinks",
    )

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        if self.pos_shift and self.sink > _MOST_SINKS:
            raise RequestError(
                f"sparse knob sink={self.sink} is not allowed with pos_shift=True; it must be at "
                f"most {_MOST_SINKS}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A row of `length` tokens loses `drop` of them, behind its first `sinks`.

    before: tokens that it had lost earlier. keys: by layer, [Hkv, sinks, D], what the sinks' keys
    become.
    """

    length: int
    sinks: int
    drop: int
    before: int = 0
    keys: Mapping[int, Tensor] = field(default_factory=dict)

    def mask(self) -> Tensor:
        """What stays: host bool [length]."""
        mask = torch.ones(self.length, dtype=torch.bool)
        mask[self.sinks : self.sinks + self.drop] = False
        return mask


class StreamingLLM(Method):
    """Retains the first tokens and the newest ones (arXiv:2309.17453).

    The budget is what a row retains after each eviction, sinks included. Evict-after: a block of
    the prompt (or a generated token) attends to what was retained before it and to itself, then the
    row is cut. Blocks end at multiples of `block_tokens`, so that chunk size changes nothing.

        | sinks, whole pages | evicted: whole pages | recent, newest last |

    A row of N tokens retains the largest n <= budget with n = N modulo the page size; the mask is
    token-exact if `page_aligned` is off or the budget has no room for sink pages and one page more
    (sinks then take at most half of it).

    Positions: by default keys keep those of the text, where the paper and the authors number what
    is in the cache 0, 1, 2 ...; a text beyond the model's trained length does not become usable.
    `pos_shift` (presets `paper`, `authors`) attends as they do. Neighbours in the text are as far
    from each other either way, so it is the sinks that move: with each eviction their keys are
    turned by all that has been evicted behind them, always from the keys as they were written, so
    that rounding does not add up. No distance is then longer than a row, that is budget + block.
    Longer texts than the model's limit need that limit raised (`max_position_embeddings`), with
    budget + block within the trained length. Each such request keeps a second copy of its sinks'
    keys (room for 64 per layer); between evictions decoding costs nothing. Not for rotations that
    depend on the text's length. Digests of evicted tokens keep the positions of the text.

    Deviations: whole pages are evicted unless `page_aligned` is off; the budget is 1024 by default,
    the authors' 4 + 2000. Preset `authors` attends to a whole prompt before the first eviction,
    preset `paper` to blocks of 1024 tokens.
    """

    name = "streaming_llm"
    config_class = StreamingLLMConfig
    traits = Traits(family="eviction", sharing="chain", takes="retained", decode_hooks=True)
    default_budget = 1024

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._pending: dict[int, _Cut] = {}
        self._why_not = _why_not_shift(model, self.layers)
        self._shifts = getattr(config, "pos_shift", False)
        if self._shifts and self._why_not is not None:
            raise UnsupportedError(
                f"method {self.name!r} with pos_shift=True cannot run on this model",
                [self._why_not],
            )

    def aux(self) -> tuple[AuxSpec, ...]:
        """Room for the sinks' keys; it takes memory for requests with pos_shift alone."""
        if self._why_not is not None:
            return ()
        room = -(-_MOST_SINKS // self.page_size) * self.page_size
        shape = ("kv_heads", room, "head_dim")
        return (AuxSpec(name=_KEYS, per=Per.REQUEST, shape=shape, dtype=self.model.dtype),)

    def cache_plan(self) -> tuple[CacheGroup, ...]:
        """One row per request, or per layer where some layers stay dense."""
        groups = super().cache_plan()
        if not self.dense_layers():
            return groups
        return tuple(replace(g, ragged=Ragged.LAYER) for g in groups)

    def prefill_block(self) -> int | None:
        return self.config.block_tokens or None

    def is_due(self, chunk: Chunk) -> bool:
        """Whether the row is cut after this chunk: at block ends, the prompt's end, in decode."""
        if chunk.purpose is Purpose.DECODE:
            return True
        if chunk.purpose is not Purpose.PREFILL or chunk.stop > chunk.request.prompt_len:
            return False
        block = self.prefill_block()
        return chunk.ends_prompt or (block is not None and chunk.stop % block == 0)

    def weigh(self, plan: StepPlan, layers: Callable[[], Iterable[LayerStep]]) -> None:
        """Note which rows are cut; all acting rows of a request are alike."""
        first = next((at for at in layers() if self.acts_on(at.layer)), None)
        if first is None:
            return
        due: dict[int, _Cut] = {}
        for i, chunk in enumerate(plan.chunks):
            budget = chunk.request.budget
            if budget is None or chunk.stop <= budget or not self.is_due(chunk):
                continue
            length = first.lens(i)[0]
            if length > budget:
                due[i] = replace(
                    self.cut(length, budget, first.page_size), before=chunk.stop - length
                )
        if due and self._shifts:
            rows = [at for at in layers() if self.acts_on(at.layer)]
            due = {i: replace(cut, keys=self._shifted(rows, i, cut)) for i, cut in due.items()}
        self._pending.update((plan.chunks[i].request.id, cut) for i, cut in due.items())

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        keeps: list[Keep] = []
        for chunk in plan.chunks:
            cut = self._pending.pop(chunk.request.id, None)
            if cut is not None:
                keeps.extend(self._keeps(chunk.request.id, cut))
        return keeps

    def shrink(
        self, request: Request, target_tokens: int, rows: Sequence[LayerStep]
    ) -> Sequence[Keep]:
        """Cut the recent window; with pos_shift, only to targets with room for all sinks."""
        mine = [at for at in rows if self.acts_on(at.layer)]
        length = mine[0].lens(0)[0] if mine else 0
        if length <= target_tokens:
            return ()
        page = mine[0].page_size
        cut = self.cut(length, target_tokens, page)
        if self._shifts:
            if request.budget and cut.sinks != self.cut(length, request.budget, page).sinks:
                return ()
            cut = replace(cut, before=mine[0].plan.chunks[0].stop - length)
            cut = replace(cut, keys=self._shifted(mine, 0, cut))
        return self._keeps(request.id, cut)

    def _keeps(self, request: int, cut: _Cut) -> list[Keep]:
        masks = (cut.mask(),)
        if not self.dense_layers():
            return [Keep(request, None, masks, cut.keys)]
        keys = cut.keys
        return [
            Keep(request, layer, masks, {layer: keys[layer]} if layer in keys else {})
            for layer in self.layers
        ]

    def cut(self, length: int, budget: int, page: int) -> _Cut:
        """What a row longer than the budget loses."""
        sinks = -(-self.config.sink // page) * page
        if self.config.page_aligned and budget >= sinks + page:
            drop = -(-(length - budget) // page) * page
        else:
            sinks, drop = min(self.config.sink, budget // 2), length - budget
        return _Cut(length=length, sinks=sinks, drop=drop)

    def _shifted(self, rows: Sequence[LayerStep], chunk: int, cut: _Cut) -> dict[int, Tensor]:
        """The sinks' keys as if all that was evicted behind them had never been.

        By layer, [Hkv, sinks, D]. Before the first eviction they are as they were written.
        """
        if not cut.sinks:
            return {}
        written: dict[tuple[Rotary, LayerSpec], list[tuple[int, Tensor]]] = {}
        for at in rows:
            keys = at.request_aux(_KEYS, chunk)[:, : cut.sinks]
            if not cut.before:
                keys.copy_(at.gather("keys", chunk, first=cut.sinks))
            alike = self.model.rotaries[at.layer], at.spec
            written.setdefault(alike, []).append((at.layer, keys))
        found: dict[int, Tensor] = {}
        for (rotary, spec), items in written.items():
            stack = torch.stack([keys for _, keys in items])  # [n, Hkv, sinks, D]
            begin = spec.value_dim if spec.kind is LayerKind.LATENT else 0
            turned = turned_on(stack, rotary, cut.before + cut.drop, begin)
            found.update(zip((layer for layer, _ in items), turned.unbind(0), strict=True))
        return found

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """A row is never longer than the budget, the block it attends to and a generated token."""
        total = prompt_len + max_tokens
        if budget is None:
            return Demand(total, total)
        block = self.prefill_block()
        worst = prompt_len if block is None else min(prompt_len, budget + block)
        steady = self.mean_rows(min(total, budget + 1), total)
        return Demand(max(self.mean_rows(worst, prompt_len), steady), steady)

    def forget(self, request_id: int) -> None:
        self._pending.pop(request_id, None)


def _why_not_shift(model: ModelSpec, layers: Sequence[int]) -> str | None:
    """Why keys cannot be moved to other positions; None if they can."""
    if not model.rotaries:
        return "it does not rotate keys by their positions"
    for layer in layers:
        if model.rotaries[layer].by_length:
            return f"the rotations of layer {layer} depend on the text's length"
        if not model.rotaries[layer].inv_freq:
            return f"layer {layer} does not rotate keys by their positions"
    return None


def turned_on(keys: Tensor, rotary: Rotary, distance: int, begin: int = 0) -> Tensor:
    """Rotated keys [..., D] moved `distance` positions on; channels from `begin` on are rotated.

    Rotations add up, so the positions themselves are not needed. Angles in float64.
    """
    wide = torch.float64 if keys.dtype is torch.float64 else torch.float32
    angles = np.array(rotary.inv_freq, np.float64) * distance
    both = upload(np.stack([np.cos(angles), np.sin(angles)]), keys.device).to(wide)
    cos, sin = both[0], both[1]
    half = len(rotary.inv_freq)
    part = keys[..., begin : begin + 2 * half].to(wide)
    if rotary.interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., :half], part[..., half:]
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, -1).flatten(-2) if rotary.interleaved else torch.cat(turned, -1)
    rest = keys[..., :begin], joined.to(keys.dtype), keys[..., begin + 2 * half :]
    return torch.cat(rest, -1)
