"""DeepSeek-V2 and V3: latent attention, and experts after the first dense layers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from sparseengine.core.specs import ModelSpec
from sparseengine.errors import UnsupportedError
from sparseengine.models import fields
from sparseengine.models.decoder import CausalLM, Config, DecoderLayer
from sparseengine.nn.latent import LatentAttention, LatentDims
from sparseengine.nn.mlp import SwiGLU
from sparseengine.nn.moe import MoE, RouterSpec
from sparseengine.nn.rope import RopeSpec, mla_scale_factor, rope_spec


def latent_dims(config: Config) -> LatentDims:
    """Sizes of the attention block. q_lora_rank null or absent: queries are not compressed."""
    compressed = config.get("q_lora_rank") is not None
    return LatentDims(
        heads=fields.count(config, "num_attention_heads"),
        nope=fields.count(config, "qk_nope_head_dim"),
        rope=fields.count(config, "qk_rope_head_dim"),
        value=fields.count(config, "v_head_dim"),
        kv_rank=fields.count(config, "kv_lora_rank"),
        q_rank=fields.count(config, "q_lora_rank") if compressed else None,
    )


class DeepseekV3ForCausalLM(CausalLM):
    """DeepSeek-V3 and R1: sigmoid router with a correction bias and group limits."""

    examples: ClassVar[str] = "DeepSeek-V3, DeepSeek-R1"

    @classmethod
    def build_spec(cls, config: Config, dtype: torch.dtype) -> ModelSpec:
        fields.require_equal(config, "hidden_act", "silu")
        layer = latent_dims(config).layer(mla_scale_factor(config))
        return ModelSpec(
            layers=(layer,) * fields.count(config, "num_hidden_layers"),
            vocab_size=fields.count(config, "vocab_size"),
            hidden_size=fields.count(config, "hidden_size"),
            max_position=fields.count(config, "max_position_embeddings"),
            dtype=dtype,
            architecture=fields.architecture(config),
        )

    @classmethod
    def rope_specs(cls, config: Config, spec: ModelSpec) -> tuple[RopeSpec, ...]:
        """Queries and the shared key rotate all of their qk_rope_head_dim channels.

        A partial_rotary_factor that a config may have says how those follow from the whole head.
        """
        parameters = dict(config.get("rope_parameters") or {})
        parameters.pop("partial_rotary_factor", None)
        whole = {**config, "rope_parameters": parameters, "partial_rotary_factor": None}
        interleaved = fields.flag(config, "rope_interleave", default=True)
        rope = rope_spec(whole, latent_dims(config).rope, interleaved)
        return (rope,) * len(spec.layers)

    @classmethod
    def ignores(cls, name: str, spec: ModelSpec) -> bool:
        """Draft layers are stored after the model's own; they are not run."""
        _, found, rest = name.partition("model.layers.")
        index = rest.partition(".")[0]
        drafted = bool(found) and index.isdigit() and int(index) >= len(spec.layers)
        return drafted or super().ignores(name, spec)

    def make_layer(
        self, layer: int, config: Config, spec: ModelSpec, device: torch.device | str
    ) -> nn.Module:
        attention = LatentAttention(
            layer,
            latent_dims(config),
            spec.hidden_size,
            scale=spec.layers[layer].softmax_scale,
            bias=fields.flag(config, "attention_bias", default=False),
            dtype=spec.dtype,
            device=device,
        )
        if self.has_experts(layer, config):
            return DecoderLayer(
                config, spec, attention, self._experts(config, spec, device), device
            )
        inner = fields.count(config, "intermediate_size")
        bias = fields.flag(config, "mlp_bias", default=False)
        mlp = SwiGLU(spec.hidden_size, inner, bias, dtype=spec.dtype, device=device)
        return DecoderLayer(config, spec, attention, mlp, device)

    def has_experts(self, layer: int, config: Config) -> bool:
        """Whether a layer's feed-forward block is routed."""
        if config.get("n_routed_experts") is None:
            return False
        first = config.get("first_k_dense_replace") or 0
        every = fields.count(config, "moe_layer_freq", default=1)
        return layer >= first and layer % every == 0

    def router(self, config: Config) -> RouterSpec:
        """How a routed layer chooses its experts."""
        return RouterSpec(
            num_experts=fields.count(config, "n_routed_experts"),
            top_k=fields.count(config, "num_experts_per_tok"),
            scoring="sigmoid",
            correction_bias=True,
            num_groups=fields.count(config, "n_group", default=1),
            top_groups=fields.count(config, "topk_group", default=1),
            group_score="top2_sum",
            normalise=fields.flag(config, "norm_topk_prob", default=True),
            scale=float(config.get("routed_scaling_factor") or 1.0),
            epsilon=1e-20,
        )

    def _experts(self, config: Config, spec: ModelSpec, device: torch.device | str) -> MoE:
        inner = fields.count(config, "moe_intermediate_size")
        return MoE(
            spec.hidden_size,
            inner,
            self.router(config),
            shared_size=inner * (config.get("n_shared_experts") or 0),
            dtype=spec.dtype,
            device=device,
        )


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2 and V2-Lite: softmax router, greedy or limited to the groups of best experts."""

    examples: ClassVar[str] = "DeepSeek-V2, DeepSeek-V2-Lite"

    def router(self, config: Config) -> RouterSpec:
        method = config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedError(
                f"model config: topk_method {method!r} is not supported; 'greedy' and "
                "'group_limited_greedy' are"
            )
        if config.get("norm_topk_prob"):
            raise UnsupportedError(
                "model config: norm_topk_prob true is not supported with this architecture: the "
                "authors' code and transformers weigh its experts differently"
            )
        limited = method == "group_limited_greedy"
        return RouterSpec(
            num_experts=fields.count(config, "n_routed_experts"),
            top_k=fields.count(config, "num_experts_per_tok"),
            num_groups=fields.count(config, "n_group", default=1) if limited else 1,
            top_groups=fields.count(config, "topk_group", default=1) if limited else 1,
            masked_score=0.0,
            scale=float(config.get("routed_scaling_factor") or 1.0),
        )
