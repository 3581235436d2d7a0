"""Llama family: RMS norm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec
from sparseengine.models import fields
from sparseengine.models.decoder import CausalLM, Config, DecoderLayer
from sparseengine.nn.attention import Attention
from sparseengine.nn.mlp import SwiGLU


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3, SmolLM2, and Mistral without a sliding window."""

    qk_norm: ClassVar[bool] = False

    @classmethod
    def build_spec(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        fields.require_equal(config, "hidden_act", "silu")
        fields.refuse_sliding_window(config)
        heads = fields.count(config, "num_attention_heads")
        kv_heads = fields.count(config, "num_key_value_heads", default=heads)
        hidden = fields.count(config, "hidden_size")
        head_dim = fields.count(config, "head_dim", default=cls.default_head_dim(hidden, heads))
        fields.require_divides(config, kv_heads, heads)
        layer = LayerSpec(
            kind=LayerKind.FULL,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
        )
        return ModelSpec(
            layers=(layer,) * fields.count(config, "num_hidden_layers"),
            vocab_size=fields.count(config, "vocab_size"),
            hidden_size=hidden,
            max_position=fields.count(config, "max_position_embeddings"),
            dtype=dtype,
            architecture=fields.architecture(config),
        )

    @classmethod
    def default_head_dim(cls, hidden_size: int, num_heads: int) -> int:
        """Channels per head when the config does not say."""
        return hidden_size // num_heads

    def make_layer(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        bias = bool(config.get("attention_bias"))
        attention = Attention(
            layer,
            spec.layers[layer],
            spec.hidden_size,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=fields.real(config, "rms_norm_eps") if self.qk_norm else None,
            dtype=spec.dtype,
            device=device,
        )
        return DecoderLayer(
            config, spec, attention, self.make_mlp(layer, config, spec, device), device
        )

    def make_mlp(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        """The feed-forward block of a layer."""
        inner, bias = fields.count(config, "intermediate_size"), bool(config.get("mlp_bias"))
        return SwiGLU(spec.hidden_size, inner, bias, dtype=spec.dtype, device=device)
