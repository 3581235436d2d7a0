"""Qwen3 dense: the Llama block with an RMS norm over each head of Q and K."""

from __future__ import annotations

from typing import ClassVar

from sparseengine.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 without experts; heads have 128 channels unless the config says otherwise."""

    qk_norm: ClassVar[bool] = True

    @classmethod
    def default_head_dim(cls, hidden_size: int, num_heads: int) -> int:
        return 128
