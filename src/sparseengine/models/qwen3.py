"""Qwen3 dense: the Llama block with an RMS norm over each head of Q and K."""

from __future__ import annotations

from typing import ClassVar

from sparseengine.models.decoder import Config
from sparseengine.models.llama import LlamaForCausalLM
from sparseengine.models.qwen2 import qwen_windows


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 without experts; heads have 128 channels unless the config says otherwise."""

    examples: ClassVar[str] = "Qwen3-8B, Qwen3-0.6B"
    absent: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    qk_norm: ClassVar[bool] = True
    head_dim: ClassVar[int | None] = 128

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        return qwen_windows(config)
