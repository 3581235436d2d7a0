"""Reading a model config: each wrong or missing field is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseengine.errors import ConfigError, UnsupportedError

_ARCHITECTURE_OF_TYPE = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def architecture(config: Mapping[str, Any]) -> str:
    """The first name in `architectures`, or what the model_type implies."""
    names = config.get("architectures") or [
        _ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")))
    ]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(
            "the model config names no architecture: `architectures` is "
            f"{config.get('architectures')!r} and model_type is {config.get('model_type')!r}"
        )
    return names[0]


def count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number >= 1; null counts as absent."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"model config: {name} must be a whole number >= 1, got {value!r}")
    return value


def real(config: Mapping[str, Any], name: str) -> float:
    """A required number > 0."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"model config: {name} must be a number > 0, got {value!r}")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or False."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"model config: {name} must be true or false, got {value!r}")
    return value


def require_equal(config: Mapping[str, Any], name: str, value: str) -> None:
    """The field is absent or has the only supported value."""
    found = config.get(name, value)
    if found != value:
        raise UnsupportedError(f"model config: {name} {found!r} is not supported, only {value!r}")


def require_divides(config: Mapping[str, Any], kv_heads: int, heads: int) -> None:
    """Query heads are shared out evenly over KV heads."""
    if heads % kv_heads:
        raise ConfigError(
            f"model config: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{kv_heads}"
        )


def refuse_sliding_window(config: Mapping[str, Any]) -> None:
    """Full attention only: a window that is in use would silently be ignored."""
    window = config.get("sliding_window")
    used = window is not None and config.get("use_sliding_window", True)
    kinds = set(config.get("layer_types") or ())
    if used or kinds - {"full_attention"}:
        raise UnsupportedError(
            f"model config: sliding_window {window!r} (layer_types {sorted(kinds)}) is not "
            "supported; hf_overrides={'sliding_window': None, 'layer_types': None} runs the model "
            "with full attention in every layer"
        )
