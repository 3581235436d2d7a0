"""Gemma 2: windows in every other layer, soft caps, norms around attention and feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from sparseengine.core.specs import ModelSpec
from sparseengine.models import fields
from sparseengine.models.decoder import Config
from sparseengine.models.dense import dense_spec
from sparseengine.models.gemma import GemmaForCausalLM


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2; queries are scaled by `query_pre_attn_scalar` ** -0.5."""

    examples: ClassVar[str] = "Gemma-2-9B, Gemma-2-27B, Gemma-2-2B"
    defaults: ClassVar[Mapping[str, Any]] = {
        **GemmaForCausalLM.defaults,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }
    caps: ClassVar[Mapping[str, float]] = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    sandwich: ClassVar[bool] = True

    @classmethod
    def filled(cls, config: Config) -> Config:
        """A cap that is null is none; one that is absent has its default."""
        return super().filled({**cls.caps, **config})

    @classmethod
    def spec_of(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        types = cls.layer_types(config)
        return dense_spec(
            config,
            dtype,
            windows=fields.windows(config, types, fields.count(config, "sliding_window")),
            scale=fields.real(config, "query_pre_attn_scalar") ** -0.5,
            softcap=fields.optional_real(config, "attn_logit_softcapping"),
        )

    @classmethod
    def layer_types(cls, config: Config) -> tuple[str, ...]:
        """Which layers slide: the first, the third and so on unless the config says otherwise."""
        num_layers = fields.count(config, "num_hidden_layers")
        default = [fields.FULL if i % 2 else fields.SLIDING for i in range(num_layers)]
        return fields.layer_types(config, default)
