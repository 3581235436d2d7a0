"""Gemma 3, text: five windowed layers to a full one, each kind with its own rotation; QK norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError
from sparseengine.models import fields
from sparseengine.models.decoder import Config
from sparseengine.models.gemma2 import Gemma2ForCausalLM
from sparseengine.nn.rope import RopeSpec, rope_spec

_THETA = {fields.FULL: 1e6, fields.SLIDING: 1e4}  # of a config without the fields
_PICTURES = ("vision_tower.", "multi_modal_projector.")


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 270M and 1B."""

    examples: ClassVar[str] = "Gemma-3-1B, Gemma-3-270M"
    defaults: ClassVar[Mapping[str, Any]] = {
        **Gemma2ForCausalLM.defaults,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    }
    caps: ClassVar[Mapping[str, float]] = {}
    qk_norm: ClassVar[bool] = True

    @classmethod
    def spec_of(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        # transformers reads the field and applies no cap; no published Gemma 3 sets it.
        fields.require_equal(config, "attn_logit_softcapping", None)
        return super().spec_of(config, dtype)

    @classmethod
    def layer_types(cls, config: Config) -> tuple[str, ...]:
        """Which layers slide: all but every `sliding_window_pattern`-th one."""
        pattern = fields.count(config, "sliding_window_pattern")
        num_layers = fields.count(config, "num_hidden_layers")
        default = [fields.SLIDING if (i + 1) % pattern else fields.FULL for i in range(num_layers)]
        return fields.layer_types(config, default)

    @classmethod
    def rope_specs(cls, config: Config, spec: ModelSpec) -> tuple[RopeSpec, ...]:
        of_type = {
            kind: rope_spec(_rope_of(config, kind), layer.head_dim)
            for layer in spec.layers[:1]
            for kind in (fields.FULL, fields.SLIDING)
        }
        return tuple(of_type[kind] for kind in cls.layer_types(config))


def _rope_of(config: Config, kind: str) -> Config:
    """The config as if all layers were of one kind.

    New configs have a rope dictionary per kind. Old ones have `rope_theta` and `rope_scaling` for
    full layers and `rope_local_base_freq` for the others, which are never scaled.
    """
    nested = config.get("rope_parameters") or {}
    unknown = set(nested) - set(_THETA)
    if unknown:
        raise ConfigError(
            f"model config: rope_parameters holds {sorted(unknown)}; Gemma 3 has one rope "
            f"dictionary for each of {list(_THETA)}"
        )
    rope = dict(nested.get(kind) or {})
    if kind == fields.FULL:
        rope |= config.get("rope_scaling") or {}
    theta = config.get("rope_theta" if kind == fields.FULL else "rope_local_base_freq")
    rope.setdefault("rope_theta", theta or _THETA[kind])
    return {**config, "rope_parameters": rope, "rope_scaling": None}


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language part of Gemma 3 4B, 12B and 27B; pictures are not read."""

    examples: ClassVar[str] = "Gemma-3-27B, Gemma-3-12B, Gemma-3-4B"

    @classmethod
    def filled(cls, config: Config) -> Config:
        """`text_config` holds the language model's fields; those beside it are overrides."""
        outer = {name: value for name, value in config.items() if name != "text_config"}
        return super().filled({**(config.get("text_config") or {}), **outer})

    @classmethod
    def rename(cls, name: str) -> str:
        """Old checkpoints say `language_model.model.`, new ones `model.language_model.`."""
        if name.startswith("language_model."):
            return name.removeprefix("language_model.")
        return name.replace("model.language_model.", "model.", 1)

    @classmethod
    def ignores(cls, name: str, spec: ModelSpec) -> bool:
        pictures = name.removeprefix("model.").startswith(_PICTURES)
        return pictures or super().ignores(name, spec)
