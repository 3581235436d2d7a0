"""Gemma 1, 2 and 3 (text): shifted norms, scaled embeddings, GeGLU; soft caps and windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparseengine.core.context import StepContext
from sparseengine.core.specs import ModelSpec
from sparseengine.models import fields
from sparseengine.models.decoder import CausalLM, Config, Decoder, attended, enter
from sparseengine.models.dense import dense_spec
from sparseengine.nn.attention import Attention
from sparseengine.nn.mlp import GeGLU
from sparseengine.nn.norm import RMSNorm, ShiftedRMSNorm
from sparseengine.nn.rope import Rotation
from sparseengine.ops.reference.scores import soft_capped


class GemmaDecoder(Decoder):
    """Embeddings are multiplied by sqrt(hidden), rounded to the model's dtype."""

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, hidden]."""
        hidden = super().embed(ids)
        scale = torch.tensor(hidden.shape[-1] ** 0.5, dtype=hidden.dtype).item()
        return hidden * scale


class GemmaLayer(nn.Module):
    """Attention and feed-forward, each between norms; `sandwich`: normed after it, too."""

    def __init__(
        self,
        eps: float,
        spec: ModelSpec,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        sandwich: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()

        def norm() -> ShiftedRMSNorm:
            return ShiftedRMSNorm(spec.hidden_size, eps, dtype=spec.dtype, device=device)

        self.input_layernorm, self.self_attn, self.mlp = norm(), attention, mlp
        self.post_attention_layernorm = norm()  # without a sandwich: the feed-forward's input norm
        self.sandwich = sandwich
        if sandwich:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def forward(
        self, hidden: Tensor, extra: Tensor | None, rotation: Rotation, ctx: StepContext
    ) -> tuple[Tensor, Tensor]:
        """hidden, extra [T, hidden] -> the same, see `DecoderLayer`; extra None is nothing."""
        hidden, normed = enter(self.input_layernorm, hidden, extra)
        hidden, mixed = attended(self.self_attn, hidden, normed, rotation, ctx)
        if not self.sandwich:
            hidden, normed = self.post_attention_layernorm.add(mixed, hidden)
            return hidden, self.mlp(normed)
        mixed = self.post_attention_layernorm(mixed)
        hidden, normed = self.pre_feedforward_layernorm.add(mixed, hidden)
        return hidden, self.post_feedforward_layernorm(self.mlp(normed))


class GemmaForCausalLM(CausalLM):
    """Gemma 1. `defaults` fill fields that a config leaves out, as Gemma's often do."""

    examples: ClassVar[str] = "Gemma-2B, Gemma-7B"
    decoder_class: ClassVar[type[Decoder]] = GemmaDecoder
    defaults: ClassVar[Mapping[str, Any]] = {
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "vocab_size": 256000,
    }
    sandwich: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False

    def __init__(
        self, config: Config, spec: ModelSpec, *, device: torch.device | str = "cpu"
    ) -> None:
        config = self.filled(config)
        self.logit_cap = fields.optional_real(config, "final_logit_softcapping")
        super().__init__(config, spec, device=device)

    @classmethod
    def filled(cls, config: Config) -> Config:
        """The config with `defaults` where it has nothing."""
        given = {name: value for name, value in config.items() if value is not None}
        return {**config, **cls.defaults, **given}

    @classmethod
    def build_spec(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        config = cls.filled(config)
        # The first configs say "gelu" and mean its approximation.
        fields.require_equal(config, "hidden_act", "gelu_pytorch_tanh", "gelu")
        fields.require_equal(config, "hidden_activation", "gelu_pytorch_tanh")
        fields.require_equal(config, "use_bidirectional_attention", False, None)
        return cls.spec_of(config, dtype)

    @classmethod
    def spec_of(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        """The sizes, from a filled config."""
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
            fields.require_equal(config, name, None)
        fields.refuse_sliding_window(config)
        windows = (None,) * fields.count(config, "num_hidden_layers")
        return dense_spec(config, dtype, windows=windows)

    @classmethod
    def default_tied(cls) -> bool:
        return True

    def make_layer(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        eps, bias = (
            fields.real(config, "rms_norm_eps"),
            fields.flag(config, "attention_bias", False),
        )
        attention = Attention(
            layer,
            spec.layers[layer],
            spec.hidden_size,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=eps if self.qk_norm else None,
            norm=ShiftedRMSNorm,
            dtype=spec.dtype,
            device=device,
        )
        inner = fields.count(config, "intermediate_size")
        mlp = GeGLU(spec.hidden_size, inner, dtype=spec.dtype, device=device)
        return GemmaLayer(eps, spec, attention, mlp, sandwich=self.sandwich, device=device)

    def make_norm(self, config: Config, spec: ModelSpec, device: torch.device | str) -> RMSNorm:
        eps = fields.real(config, "rms_norm_eps")
        return ShiftedRMSNorm(spec.hidden_size, eps, dtype=spec.dtype, device=device)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> float32 [N, vocab]; the cap is applied in float32."""
        return soft_capped(super().logits(hidden), self.logit_cap)
