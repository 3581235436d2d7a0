"""Qwen3 with experts: the Qwen3 block, its feed-forward routed in most or all layers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError
from sparseengine.models import fields
from sparseengine.models.decoder import Config
from sparseengine.models.qwen3 import Qwen3ForCausalLM
from sparseengine.nn.moe import MoE, RouterSpec


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-MoE: softmax router, no shared expert; some layers may be dense."""

    examples: ClassVar[str] = "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B"

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        fields.refuse_sliding_window(config)
        return (None,) * fields.count(config, "num_hidden_layers")

    def make_mlp(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        if not _is_sparse(layer, config):
            return super().make_mlp(layer, config, spec, device)
        inner = fields.count(config, "moe_intermediate_size")
        return MoE(spec.hidden_size, inner, _router(config), dtype=spec.dtype, device=device)


def _is_sparse(layer: int, config: Config) -> bool:
    step = fields.count(config, "decoder_sparse_step", default=1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _router(config: Config) -> RouterSpec:
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts, top_k = fields.count(config, name), fields.count(config, "num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(
            f"model config: num_experts_per_tok {top_k} is larger than {name} {experts}"
        )
    normalise = fields.flag(config, "norm_topk_prob", default=False)
    return RouterSpec(num_experts=experts, top_k=top_k, normalise=normalise)
