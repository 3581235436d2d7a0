"""How a mixture-of-experts layer chooses experts: facts of the model that ops are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparseengine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """One router: scores of all experts, a choice of `top_k`, and their weights.

    scoring: what turns logits into scores. correction_bias: whether a learned bias is added to the
    scores for the choice (never to the weights). num_groups, top_groups: experts fall into equal
    groups of neighbours, of which only the best by `group_score` stay in the choice; the others'
    experts count as `masked_score` there. normalise: weights are divided by their sum plus
    `epsilon`; then they are multiplied by `scale`.

    The default masked_score never chooses an expert of a dropped group. Releases of transformers
    before 5.24 use 0.0 for routers with a correction bias: that differs only where an expert left
    in the choice scores below zero. Raises ConfigError for numbers that no router can have.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    masked_score: float = float("-inf")
    normalise: bool = False
    scale: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ConfigError(
                f"router: {self.num_experts} experts do not make {self.num_groups} equal groups"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(f"router: top_groups {self.top_groups} is not 1 to {self.num_groups}")
        if not 1 <= self.top_k <= self.choices:
            raise ConfigError(
                f"router: top_k {self.top_k} is not 1 to {self.choices}, the experts of "
                f"{self.top_groups} of {self.num_groups} groups"
            )
        if self.num_groups > 1 and self.group_score == "top2_sum" and self.group_size < 2:
            raise ConfigError("router: groups of one expert have no two best scores")

    @property
    def group_size(self) -> int:
        """Experts per group."""
        return self.num_experts // self.num_groups

    @property
    def choices(self) -> int:
        """Experts that remain when groups have been dropped."""
        return self.group_size * self.top_groups
