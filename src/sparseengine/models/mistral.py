"""Mistral: the Llama block, with a sliding window in every layer or in some."""

from __future__ import annotations

from typing import ClassVar

from sparseengine.models import fields
from sparseengine.models.decoder import Config
from sparseengine.models.llama import LlamaForCausalLM

_WINDOW = 4096  # what a config without the field means


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral 7B, Nemo, Small: one window for all layers, or none (`sliding_window` null)."""

    examples: ClassVar[str] = "Mistral-7B-v0.3, Mistral-Nemo, Mistral-Small-24B"
    absent: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        window = None
        if config.get("sliding_window", _WINDOW) is not None:
            window = fields.count(config, "sliding_window", default=_WINDOW)
        return fields.windows(config, cls.types(config, window), window)

    @classmethod
    def types(cls, config: Config, window: int | None) -> tuple[str, ...]:
        """Which layers slide."""
        kind = fields.FULL if window is None else fields.SLIDING
        default = (kind,) * fields.count(config, "num_hidden_layers")
        fields.require_equal(config, "layer_types", None, list(default))
        return default


class MinistralForCausalLM(MistralForCausalLM):
    """Ministral 8B: `layer_types` says which layers slide."""

    examples: ClassVar[str] = "Ministral-8B-2410"

    @classmethod
    def types(cls, config: Config, window: int | None) -> tuple[str, ...]:
        kind = fields.FULL if window is None else fields.SLIDING
        return fields.layer_types(config, (kind,) * fields.count(config, "num_hidden_layers"))
