"""Llama family: RMS norm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from sparseengine.core.specs import ModelSpec
from sparseengine.models import fields
from sparseengine.models.decoder import CausalLM, Config, DecoderLayer
from sparseengine.models.dense import dense_spec
from sparseengine.nn.attention import Attention
from sparseengine.nn.mlp import SwiGLU


class LlamaForCausalLM(CausalLM):
    """Llama 2 and 3 and SmolLM2.

    `merged`: the checkpoint holds Q, K, V (and gate, up) as one. `absent`: flags of a config that
    ask for what the family does not have.
    """

    examples: ClassVar[str] = "Llama-3.1-8B, Llama-2-7B, SmolLM2"
    qk_norm: ClassVar[bool] = False
    merged: ClassVar[bool] = False
    absent: ClassVar[tuple[str, ...]] = ()
    head_dim: ClassVar[int | None] = None  # when the config does not say; None: hidden / heads

    @classmethod
    def build_spec(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        fields.require_equal(config, "hidden_act", "silu")
        for name in cls.absent:
            fields.require_equal(config, name, False, None)
        return dense_spec(config, dtype, windows=cls.windows(config), head_dim=cls.head_dim)

    @classmethod
    def windows(cls, config: Config) -> tuple[int | None, ...]:
        """The window of every layer, None for full attention."""
        fields.refuse_sliding_window(config)
        return (None,) * fields.count(config, "num_hidden_layers")

    @classmethod
    def biases(cls, config: Config) -> tuple[bool, bool]:
        """Whether Q, K, V and the output projection have biases."""
        bias = fields.flag(config, "attention_bias", default=False)
        return bias, bias

    def make_layer(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        qkv_bias, out_bias = self.biases(config)
        attention = Attention(
            layer,
            spec.layers[layer],
            spec.hidden_size,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm_eps=fields.real(config, "rms_norm_eps") if self.qk_norm else None,
            merged=self.merged,
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
        inner = fields.count(config, "intermediate_size")
        bias = fields.flag(config, "mlp_bias", default=False)
        return SwiGLU(
            spec.hidden_size, inner, bias, merged=self.merged, dtype=spec.dtype, device=device
        )
