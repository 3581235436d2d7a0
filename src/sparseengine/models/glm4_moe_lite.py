"""GLM-4.7-Flash: DeepSeek-V3's blocks in other sizes."""

from __future__ import annotations

from typing import ClassVar

from sparseengine.errors import ConfigError
from sparseengine.models.decoder import Config
from sparseengine.models.deepseek import DeepseekV3ForCausalLM

_KINDS = ("dense", "sparse")


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: latent attention; which layers have experts is listed or counted."""

    examples: ClassVar[str] = "GLM-4.7-Flash"

    def has_experts(self, layer: int, config: Config) -> bool:
        """By mlp_layer_types; without it, all layers after the first first_k_dense_replace (1)."""
        kinds = config.get("mlp_layer_types")
        if kinds is None:
            first = config.get("first_k_dense_replace")
            return layer >= (1 if first is None else first)
        if layer >= len(kinds) or kinds[layer] not in _KINDS:
            raise ConfigError(
                f"model config: mlp_layer_types must say 'dense' or 'sparse' for every layer, got "
                f"{kinds!r}"
            )
        sparse: bool = kinds[layer] == "sparse"
        return sparse
