"""What GGUF says of each family, in Hugging Face's words: tensor names and config fields.

Sources: llama.cpp's convert_hf_to_gguf.py (which renames, reorders and shifts) and its src/models
(which hold what the files leave out: Gemma's windows, the query scaling of its largest models).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparseengine.errors import ConfigError, nearest

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
# Attention layers of Gemma: every n-th sees the whole text, the others a window.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
# Layers of the models whose queries are scaled by hidden_size / heads instead of head_dim.
_LARGEST = {"gemma2": 46, "gemma3": 62}
_GEMMA_LOCAL_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFields:
    """The metadata of one file, under its family's prefix."""

    path: Path
    family: str
    metadata: Mapping[str, Any]
    tensor_names: Collection[str]
    rope_factors: Sequence[float] | None

    def get(self, name: str, default: Any = None) -> Any:
        """A field; ConfigError names the one that is missing and has no default."""
        value = self.optional(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.path}: GGUF field {self.family}.{name} is missing")
        return value

    def optional(self, name: str) -> Any:
        return self.metadata.get(f"{self.family}.{name}")

    def head_dim(self) -> int:
        hidden, heads = self.get("embedding_length"), self.get("attention.head_count")
        rotated = self.get("rope.dimension_count", hidden // heads)
        return int(self.get("attention.key_length", rotated))

    def has(self, ending: str) -> bool:
        """Whether a tensor's name ends so."""
        return any(name.endswith(ending) for name in self.tensor_names)


def _rope_scaling(fields: GgufFields) -> dict[str, Any] | None:
    if fields.rope_factors is not None:
        # llama.cpp stores Llama 3 scaling as one divisor per frequency instead of its formula.
        return {"rope_type": "factors", "factors": list(fields.rope_factors)}
    old = fields.optional("rope.scale_linear")
    kind = fields.get("rope.scaling.type", "linear" if old else "none")
    if kind == "none":
        return None
    factor = float(fields.get("rope.scaling.factor", old))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    original = fields.optional("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            value = fields.optional(f"rope.scaling.yarn_{name}")
            if value is not None:
                scaling[name] = value
        share = fields.optional("rope.scaling.attn_factor")
        if share is not None and share != 1.0:  # llama.cpp multiplies yarn's own by it
            scaling["attention_factor"] = share * (0.1 * math.log(factor) + 1.0)
    return scaling


def _plain_fields(fields: GgufFields) -> dict[str, Any]:
    return {
        "head_dim": fields.head_dim(),
        "hidden_act": "silu",
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields),
    }


def _llama_fields(fields: GgufFields) -> dict[str, Any]:
    if fields.get("expert_count", 0):
        raise ConfigError(
            f"{fields.path}: GGUF architecture 'llama' with {fields.get('expert_count')} experts "
            "(Mixtral) is not supported; Mixture-of-Experts files of the family qwen3moe are"
        )
    return {
        **_plain_fields(fields),
        "attention_bias": fields.has("attn_q.bias"),
        "mlp_bias": fields.has("ffn_up.bias"),
    }


def _qwen3_fields(fields: GgufFields) -> dict[str, Any]:
    return {**_plain_fields(fields), "attention_bias": fields.has("attn_q.bias")}


def _qwen3_moe_fields(fields: GgufFields) -> dict[str, Any]:
    return {
        **_qwen3_fields(fields),
        "num_experts": fields.get("expert_count"),
        "num_experts_per_tok": fields.get("expert_used_count"),
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp normalises whatever the file says
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma_fields(fields: GgufFields) -> dict[str, Any]:
    layers, head_dim = fields.get("block_count"), fields.head_dim()
    hidden, heads = fields.get("embedding_length"), fields.get("attention.head_count")
    scalar = hidden // heads if layers == _LARGEST[fields.family] else head_dim
    scale = fields.optional("attention.scale")
    pattern = fields.get("attention.sliding_window_pattern", _PATTERNS[fields.family])
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return {
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar if scale is None else scale**-2,
        "sliding_window": fields.get("attention.sliding_window"),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in pattern],
        "attn_logit_softcapping": fields.optional("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional("final_logit_softcapping"),
        "attention_bias": fields.has("attn_q.bias"),
    }


def _gemma2_fields(fields: GgufFields) -> dict[str, Any]:
    return {
        **_gemma_fields(fields),
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields),
    }


def _gemma3_fields(fields: GgufFields) -> dict[str, Any]:
    whole = _rope_scaling(fields) or {"rope_type": "default"}
    local = fields.get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
    return {
        **_gemma_fields(fields),
        "rope_parameters": {
            "full_attention": {**whole, "rope_theta": fields.get("rope.freq_base", 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """How a GGUF architecture maps. `permuted`: rows of Q and K are in llama.cpp's interleaved RoPE
    order. `shifted_norms`: norm weights are stored as 1 + w. `names`: blocks named otherwise."""

    model_type: str
    architecture: str
    config: Callable[[GgufFields], dict[str, Any]] = _llama_fields
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    shifted_norms: bool = False


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(model_type="llama", architecture="LlamaForCausalLM", permuted=True),
    # Qwen2 has biases on Q, K and V alone, and no config field that says so.
    "qwen2": GgufFamily(model_type="qwen2", architecture="Qwen2ForCausalLM", config=_plain_fields),
    "qwen3": GgufFamily(model_type="qwen3", architecture="Qwen3ForCausalLM", config=_qwen3_fields),
    "qwen3moe": GgufFamily(
        model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", config=_qwen3_moe_fields
    ),
    "gemma2": GgufFamily(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        config=_gemma2_fields,
        names=_GEMMA_NAMES,
        shifted_norms=True,
    ),
    "gemma3": GgufFamily(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        config=_gemma3_fields,
        names=_GEMMA_NAMES,
        shifted_norms=True,
    ),
}


def family_of(path: Path, name: str) -> GgufFamily:
    """Raises ConfigError for an architecture without a mapping."""
    if name not in FAMILIES:
        raise ConfigError(
            f"{path}: GGUF architecture {name!r} is not supported; {nearest(name, FAMILIES)}"
        )
    return FAMILIES[name]


def family_config(fields: GgufFields, vocab_size: int) -> dict[str, Any]:
    """The model's config under Hugging Face field names. ConfigError for a missing field."""
    family = family_of(fields.path, fields.family)
    heads = fields.get("attention.head_count")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": fields.get("embedding_length"),
        "intermediate_size": fields.get("feed_forward_length"),
        "num_hidden_layers": fields.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "max_position_embeddings": fields.get("context_length"),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in fields.tensor_names,
        **family.config(fields),
    }
    for key in ("bos", "eos", "padding", "eot"):
        value = fields.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[f"{'pad' if key == 'padding' else key}_token_id"] = value
    if "eot_token_id" in config and "eos_token_id" in config:
        config["eos_token_id"] = sorted({config["eos_token_id"], config.pop("eot_token_id")})
    return config


def hf_name(name: str, family: GgufFamily) -> str:
    """Hugging Face name of a GGUF tensor; an unknown one keeps its name and fails at loading."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    names = {**_BLOCK_NAMES, **family.names}
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
    return name


def expert_names(name: str) -> Callable[[int], str] | None:
    """For a tensor that stacks all experts of a layer: expert number -> Hugging Face name."""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _EXPERT_NAMES:
        return None
    prefix, suffix = f"model.layers.{parts[1]}.mlp.experts", f"{_EXPERT_NAMES[parts[2]]}.{parts[3]}"
    return lambda expert: f"{prefix}.{expert}.{suffix}"
