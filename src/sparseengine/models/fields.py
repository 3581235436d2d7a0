"""Reading a model config: each wrong or missing field is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseengine.errors import ConfigError, UnsupportedError

_ARCHITECTURE_OF_TYPE = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral": "MinistralForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # what `layer_types` may hold


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


def optional_real(config: Mapping[str, Any], name: str) -> float:
    """A number > 0; 0.0 for an absent or null field."""
    return 0.0 if config.get(name) is None else real(config, name)


def require_equal(config: Mapping[str, Any], name: str, *values: object) -> None:
    """The field is absent or has one of the supported values."""
    found = config.get(name, values[0])
    if found not in values:
        supported = " or ".join(map(repr, values))
        raise UnsupportedError(f"model config: {name} {found!r} is not supported, only {supported}")


def require_divides(config: Mapping[str, Any], kv_heads: int, heads: int) -> None:
    """Query heads are shared out evenly over KV heads."""
    if heads % kv_heads:
        raise ConfigError(
            f"model config: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{kv_heads}"
        )


def refuse_sliding_window(config: Mapping[str, Any]) -> None:
    """For families without one: a window that is in use would silently be ignored."""
    window = config.get("sliding_window")
    used = window is not None and config.get("use_sliding_window", True)
    kinds = set(config.get("layer_types") or ())
    if used or kinds - {FULL}:
        raise UnsupportedError(
            f"model config: sliding_window {window!r} (layer_types {sorted(kinds)}) is not "
            "supported; hf_overrides={'sliding_window': None, 'layer_types': None} runs the model "
            "with full attention in every layer"
        )


def layer_types(config: Mapping[str, Any], default: Sequence[str]) -> tuple[str, ...]:
    """FULL or SLIDING for every layer: `layer_types`, else `default`."""
    types = tuple(config.get("layer_types") or default)
    num_layers = count(config, "num_hidden_layers")
    if len(types) != num_layers:
        raise ConfigError(
            f"model config: layer_types has {len(types)} entries for num_hidden_layers {num_layers}"
        )
    for name in types:
        if name not in (FULL, SLIDING):
            raise UnsupportedError(
                f"model config: layer_types holds {name!r}, only {FULL!r} and {SLIDING!r} are "
                "supported"
            )
    return types


def windows(
    config: Mapping[str, Any], types: Sequence[str], window: int | None
) -> tuple[int | None, ...]:
    """The window of every layer, None where it attends to everything.

    A window that no text of `max_position_embeddings` outgrows counts as none.
    """
    if SLIDING in types and window is None:
        raise ConfigError(
            f"model config: layer_types holds {SLIDING!r}, but no window is in use: sliding_window "
            f"is {config.get('sliding_window')!r} and use_sliding_window is "
            f"{config.get('use_sliding_window')!r}"
        )
    slides = window is not None and window < count(config, "max_position_embeddings")
    return tuple(window if slides and name == SLIDING else None for name in types)
