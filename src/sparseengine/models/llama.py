"""Llama family: RMS norm, rotary grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparseengine.core.context import StepContext
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec
from sparseengine.models import fields
from sparseengine.nn.attention import Attention
from sparseengine.nn.embedding import Embedding
from sparseengine.nn.linear import Linear
from sparseengine.nn.mlp import SwiGLU
from sparseengine.nn.norm import RMSNorm
from sparseengine.nn.rope import RotaryEmbedding, Rotation, rope_spec


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        layer: int,
        config: Mapping[str, Any],
        spec: ModelSpec,
        *,
        qk_norm: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        eps, bias = fields.real(config, "rms_norm_eps"), bool(config.get("attention_bias"))
        hidden, dtype = spec.hidden_size, spec.dtype
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = Attention(
            layer,
            spec.layers[layer],
            hidden,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=eps if qk_norm else None,
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        inner, mlp_bias = fields.count(config, "intermediate_size"), bool(config.get("mlp_bias"))
        self.mlp = SwiGLU(hidden, inner, mlp_bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, ctx)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class LlamaModel(nn.Module):
    """Everything below the output head; parameter names are the checkpoint's after `model.`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        spec: ModelSpec,
        *,
        qk_norm: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, dtype = spec.hidden_size, spec.dtype
        self.embed_tokens = Embedding(spec.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, config, spec, qk_norm=qk_norm, device=device)
            for layer in range(len(spec.layers))
        )
        eps = fields.real(config, "rms_norm_eps")
        self.norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.rope = RotaryEmbedding(rope_spec(config, spec.layers[0].head_dim), device=device)

    def forward(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        hidden = self.embed_tokens(ids)
        rotation = self.rope(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, ctx)
            ctx.layer_end(hidden)
        out: Tensor = self.norm(hidden)
        return out


class LlamaForCausalLM(nn.Module):
    """Llama 2 and 3, SmolLM2, and Mistral without a sliding window.

    `merged` maps the last name of a checkpoint's projection to (our module, which part of it).
    """

    merged: ClassVar[Mapping[str, tuple[str, int]]] = {
        "q_proj": ("qkv_proj", 0),
        "k_proj": ("qkv_proj", 1),
        "v_proj": ("qkv_proj", 2),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    qk_norm: ClassVar[bool] = False

    def __init__(
        self, config: Mapping[str, Any], spec: ModelSpec, *, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.spec = spec
        self.tied = fields.flag(config, "tie_word_embeddings", default=False)
        self.model = LlamaModel(config, spec, qk_norm=self.qk_norm, device=device)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, dtype=spec.dtype, device="meta")
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        else:
            self.lm_head.to_empty(device=device)

    @classmethod
    def build_spec(cls, config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
        """The model's sizes. Raises ConfigError for a missing field or an unsupported feature."""
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

    def forward(self, ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """ids, positions int64 [T] -> hidden [T, hidden], after the last norm."""
        hidden: Tensor = self.model(ids, positions, ctx)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> float32 [N, vocab]."""
        logits: Tensor = self.lm_head(hidden).float()
        return logits
