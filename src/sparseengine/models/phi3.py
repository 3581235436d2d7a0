"""Phi-3 and Phi-4: the Llama block, stored with merged projections; LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sparseengine.core.specs import ModelSpec
from sparseengine.models import fields
from sparseengine.models.decoder import Config
from sparseengine.models.llama import LlamaForCausalLM
from sparseengine.nn.rope import RopeSpec, rope_spec

_ORIGINAL = 4096  # original_max_position_embeddings of a config without the field


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 mini and medium, Phi-4 and Phi-4-mini."""

    examples: ClassVar[str] = "Phi-4, Phi-4-mini, Phi-3-mini, Phi-3-medium"
    absent: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias", "lm_head_bias")
    merged: ClassVar[bool] = True

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        num_layers = fields.count(config, "num_hidden_layers")
        if config.get("sliding_window") is None:
            return fields.windows(
                config, fields.layer_types(config, (fields.FULL,) * num_layers), None
            )
        types = (fields.SLIDING,) * num_layers
        fields.require_equal(config, "layer_types", None, list(types))
        return fields.windows(config, types, fields.count(config, "sliding_window"))

    @classmethod
    def rope_specs(cls, config: Config, spec: ModelSpec) -> tuple[RopeSpec, ...]:
        rope = rope_spec(_with_longrope(config), spec.layers[0].head_dim)
        return (rope,) * len(spec.layers)


def _with_longrope(config: Config) -> dict[str, Any]:
    """The same config with today's name of the rule, which early Phi-3 configs call "yarn"."""
    changed = {"original_max_position_embeddings": _ORIGINAL, **config}
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, Mapping) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            changed[name] = {**rope, "rope_type": "longrope"}
    return changed
