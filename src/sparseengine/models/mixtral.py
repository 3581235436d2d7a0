"""Mixtral: the Mistral block with experts in every layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from sparseengine.core.specs import ModelSpec
from sparseengine.models import fields
from sparseengine.models.decoder import Config
from sparseengine.models.mistral import MistralForCausalLM
from sparseengine.models.qwen3_moe import softmax_router
from sparseengine.nn.moe import MoE

_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class MixtralForCausalLM(MistralForCausalLM):
    """Mixtral 8x7B and 8x22B: softmax over all experts, the chosen ones' weights normalised."""

    examples: ClassVar[str] = "Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1"

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        given = config.get("sliding_window") is not None
        window = fields.count(config, "sliding_window") if given else None
        return fields.windows(config, cls.types(config, window), window)

    @classmethod
    def rename(cls, name: str) -> str:
        """`block_sparse_moe.experts.0.w1.weight` is `mlp.experts.0.gate_proj.weight`."""
        head, block, tail = name.partition(".block_sparse_moe.")
        if not block:
            return name
        return f"{head}.mlp." + ".".join(_NAMES.get(part, part) for part in tail.split("."))

    def make_mlp(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        inner = fields.count(config, "intermediate_size")
        router = softmax_router(config, normalise=True)
        return MoE(spec.hidden_size, inner, router, dtype=spec.dtype, device=device)
