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

_WINDOW = 4096  # what a config without the field means


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-MoE: softmax router, no shared expert; some layers may be dense."""

    examples: ClassVar[str] = "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B"
    head_dim: ClassVar[int | None] = None

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        """`use_sliding_window` puts the window into every layer: `max_window_layers` is unused."""
        window = None
        used = fields.flag(config, "use_sliding_window", default=False)
        if used and config.get("sliding_window", _WINDOW) is not None:
            window = fields.count(config, "sliding_window", default=_WINDOW)
        kind = fields.FULL if window is None else fields.SLIDING
        types = [kind] * fields.count(config, "num_hidden_layers")
        fields.require_equal(config, "layer_types", None, types)
        return fields.windows(config, types, window)

    def make_mlp(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        if not _is_sparse(layer, config):
            return super().make_mlp(layer, config, spec, device)
        inner = fields.count(config, "moe_intermediate_size")
        normalise = fields.flag(config, "norm_topk_prob", default=False)
        router = softmax_router(config, normalise)
        return MoE(spec.hidden_size, inner, router, dtype=spec.dtype, device=device)


def _is_sparse(layer: int, config: Config) -> bool:
    step = fields.count(config, "decoder_sparse_step", default=1)
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def softmax_router(config: Config, normalise: bool) -> RouterSpec:
    """The plain router of a config that says num_experts or, as newer ones, num_local_experts."""
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts, top_k = fields.count(config, name), fields.count(config, "num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(
            f"model config: num_experts_per_tok {top_k} is larger than {name} {experts}"
        )
    return RouterSpec(num_experts=experts, top_k=top_k, normalise=normalise)
