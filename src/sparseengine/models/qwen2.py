"""Qwen2: the Llama block with biases on Q, K and V."""

from __future__ import annotations

from typing import ClassVar

from sparseengine.models import fields
from sparseengine.models.decoder import Config
from sparseengine.models.llama import LlamaForCausalLM

_WINDOW, _FULL_LAYERS = 4096, 28  # what a config without the fields means


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """`use_sliding_window` puts the window into the layers from `max_window_layers` on, or into
    those that `layer_types` names."""
    window, used = None, fields.flag(config, "use_sliding_window", default=False)
    if used and config.get("sliding_window", _WINDOW) is not None:
        window = fields.count(config, "sliding_window", default=_WINDOW)
    first = config.get("max_window_layers", _FULL_LAYERS)
    default = [
        fields.SLIDING if window is not None and layer >= first else fields.FULL
        for layer in range(fields.count(config, "num_hidden_layers"))
    ]
    return fields.windows(config, fields.layer_types(config, default), window)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5 without experts."""

    examples: ClassVar[str] = "Qwen2.5-7B, Qwen2-1.5B"
    absent: ClassVar[tuple[str, ...]] = ("mlp_bias",)

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        return qwen_windows(config)

    @classmethod
    def biases(cls, config: Config) -> tuple[bool, bool]:
        return True, False
