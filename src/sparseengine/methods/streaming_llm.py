"""StreamingLLM (arXiv:2309.17453): attention sinks and a recent window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseengine.core.method import LayerStep, Traits
from sparseengine.core.plan import Chunk, Demand, Purpose, Request, StepPlan
from sparseengine.core.specs import ModelSpec
from sparseengine.core.view import Keep
from sparseengine.methods.families import Method
from sparseengine.methods.knobs import MethodConfig, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLMConfig(MethodConfig):
    """Knobs of StreamingLLM."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "kvpress": {"sink": 4, "block_tokens": 0, "page_aligned": False},
            "sparse-vllm": {"sink": 64},
        }
    )

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


class StreamingLLM(Method):
    """Retains the first tokens and the newest ones (arXiv:2309.17453); keys keep their positions.

    The budget is what a row retains after each eviction, sinks included. Evict-after: a block of
    the prompt (or a generated token) attends to what was retained before it and to itself, then the
    row is cut. Blocks end at multiples of `block_tokens`, so that chunk size changes nothing.

        | sinks, whole pages | evicted: whole pages | recent, newest last |

    A row of N tokens retains the largest n <= budget with n = N modulo the page size; the mask is
    token-exact if `page_aligned` is off or the budget has no room for sink pages and one page more
    (sinks then take at most half of it). Deviation: positions are kept, where the authors re-rotate
    by slot; so lengths beyond the model's trained length are not made usable.
    """

    name = "streaming_llm"
    config_class = StreamingLLMConfig
    traits = Traits(family="eviction", sharing="chain", takes="retained", decode_hooks=True)
    default_budget = 1024

    def __init__(self, config: Any, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._pending: dict[int, tuple[int, int]] = {}

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

    def observe(self, at: LayerStep) -> None:
        """Note row lengths once per step: all acting rows of a request are alike."""
        if not self.layers or at.layer != self.layers[0]:
            return
        for i, chunk in enumerate(at.plan.chunks):
            if self.is_due(chunk):
                self._pending[chunk.request.id] = (at.lens(i)[0], at.page_size)

    def replayed(self, plan: StepPlan, lens: Sequence[int]) -> None:
        for chunk, length in zip(plan.chunks, lens, strict=True):
            if self.layers:
                self._pending[chunk.request.id] = (length, self.page_size)

    def evict(self, plan: StepPlan) -> Sequence[Keep]:
        keeps: list[Keep] = []
        for chunk in plan.chunks:
            length, page = self._pending.pop(chunk.request.id, (0, 1))
            budget = chunk.request.budget
            if budget is None or length <= budget:
                continue
            keeps.append(Keep(chunk.request.id, None, (self.mask(length, budget, page),)))
        return keeps

    def shrink(
        self, request: Request, target_tokens: int, rows: Sequence[LayerStep]
    ) -> Sequence[Keep]:
        """Cut the recent window."""
        at = next((at for at in rows if self.acts_on(at.layer)), None)
        if at is None or at.lens(0)[0] <= target_tokens:
            return ()
        mask = self.mask(at.lens(0)[0], target_tokens, at.page_size)
        return (Keep(request.id, None, (mask,)),)

    def mask(self, length: int, budget: int, page: int) -> Tensor:
        """What stays of a row longer than the budget: host bool [length]."""
        sink_slots = -(-self.config.sink // page) * page
        if self.config.page_aligned and budget >= sink_slots + page:
            drop = -(-(length - budget) // page) * page
        else:
            sink_slots, drop = min(self.config.sink, budget // 2), length - budget
        mask = torch.ones(length, dtype=torch.bool)
        mask[sink_slots : sink_slots + drop] = False
        return mask

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
