"""PyramidKV (arXiv:2406.02069): lower layers attend broadly and get more of the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

from sparseengine.core.method import LayerStep
from sparseengine.core.plan import Demand
from sparseengine.errors import RequestError
from sparseengine.methods.allocate import Allocation
from sparseengine.methods.budgets import exact_pyramid, is_flat_pyramid, pyramid_ends
from sparseengine.methods.knobs import knob
from sparseengine.methods.pending import Pending
from sparseengine.methods.snapkv import SnapKV, SnapKVConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidKVConfig(SnapKVConfig):
    """Knobs of PyramidKV: SnapKV's, and the pyramid's."""

    beta: int = knob(
        20, "steepness: the last layer gets 1 / beta of the mean; 1 is uniform", low=1, high=1 << 20
    )
    form: str = knob(
        "exact",
        "exact: budgets sum to layers * budget; steps: the authors' integer steps, whose sum is up "
        "to a step per layer off; kvpress: its rounding, and its uniform fallback",
        choices=("exact", "steps", "kvpress"),
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "authors": {"window": 8, "kernel": 7, "pooling": "max", "sink": 0, "form": "steps"},
            "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "sink": 0, "form": "kvpress"},
        }
    )

    def __post_init__(self) -> None:
        SnapKVConfig.__post_init__(self)
        if self.block_tokens:
            raise RequestError(
                f"sparse knob block_tokens={self.block_tokens} is not allowed; it must be 0: the "
                "pyramid is built over whole prompts"
            )


class PyramidKV(SnapKV):
    """SnapKV's scores under budgets that fall linearly over the layers (arXiv:2406.02069).

    The window is retained everywhere; of the C = budget - window other tokens, the last layer gets
    C // beta and the first one 2C less that, in equal steps between. A first layer that would get
    the whole prompt gets what there is, and the last one the difference. All layers get the budget
    if it is no longer than the window or the prompt is shorter than 2C.

        layer 0  ##################
        layer 1  ############        mean: the budget
        layer 2  ######

    Budgets count layers that the method acts on and depend on the prompt's length. Rows differ in
    content per KV head and in length per layer. Deviations: the authors' integer steps miss the
    total, so shares are rounded by largest remainder and sum to layers * budget exactly
    (form="steps" is theirs); one choice per KV head; sinks are forced, and take from the window
    where a layer's share is smaller than they are.
    """

    name = "pyramidkv"
    config_class = PyramidKVConfig

    def budgets_of(self, length: int, budget: int) -> tuple[int, ...]:
        """Tokens retained of a prompt longer than the budget, one per acting layer."""
        config = self.config
        pick = {"exact": exact_pyramid, "steps": stepped_pyramid, "kvpress": kvpress_pyramid}
        return pick[config.form](len(self.layers), length, budget, config.window, config.beta)

    def why_not(self, allocation: Allocation) -> str | None:
        if allocation.kind == "adakv" and allocation.scope == "layer":
            return None  # heads of a layer share what the pyramid gives it
        return super().why_not(allocation)

    def _row_budgets(self, prompt_len: int, budget: int, allocation: Allocation) -> tuple[int, ...]:
        return self.budgets_of(prompt_len, budget)

    def weighed(self, at: LayerStep, chunk: int, budget: int) -> Pending:
        found = super().weighed(at, chunk, budget)
        return found if self.allocation is None else replace(found, budget=budget)

    def layer_budget(self, layer: int, length: int, budget: int) -> int:
        if self.allocation is not None:
            return budget  # see `_row_budgets`
        return self.budgets_of(length, budget)[self.layers.index(layer)]

    def demand(self, prompt_len: int, max_tokens: int, budget: int | None) -> Demand:
        """Steady: the mean over layers of whole pages, for short rows and long ones round alike."""
        total = prompt_len + max_tokens
        if self.allocation is not None and self.layers:
            return super().demand(prompt_len, max_tokens, budget)
        if budget is None or prompt_len <= budget or not self.layers:
            return Demand(total, total)
        rows = [n + max_tokens for n in self.budgets_of(prompt_len, budget)]
        if len(set(rows)) == 1:
            steady = rows[0]
        else:
            heads = [self.model.layers[i].kv_heads for i in self.layers]
            pages = sum(h * -(-n // self.page_size) for h, n in zip(heads, rows, strict=True))
            steady = -(-pages * self.page_size // sum(heads))
        return Demand(max(prompt_len, steady), steady)


@lru_cache(maxsize=4096)
def stepped_pyramid(
    layers: int, length: int, budget: int, window: int, beta: int
) -> tuple[int, ...]:
    """Budgets per layer in integer steps, as the authors have them."""
    spare = budget - window
    if is_flat_pyramid(layers, length, spare):
        return (budget,) * layers
    most, least = pyramid_ends(length, window, spare, beta)
    step = (most - least) // (layers - 1)
    return tuple(most - i * step + window for i in range(layers))


@lru_cache(maxsize=4096)
def kvpress_pyramid(
    layers: int, length: int, budget: int, window: int, beta: int
) -> tuple[int, ...]:
    """Budgets per layer as kvpress has them: the window is a floor and not apart."""
    least = budget / beta
    most = 2 * budget - least
    if most >= length - window:
        most = float(length - window)
        least = 2 * budget - most
    if layers < 2 or not length >= most >= least >= window:
        return (budget,) * layers
    step = (most - least) / (layers - 1)
    return tuple(round(most - i * step) for i in range(layers))
