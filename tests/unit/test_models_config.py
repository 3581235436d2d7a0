"""What configs of dense families mean, and what of them is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseengine.core.specs import LayerKind, ModelSpec
from sparseengine.errors import ConfigError, UnsupportedError
from sparseengine.models import MODELS, model_spec

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
S, F = "sliding_attention", "full_attention"
DENSE = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral": "MinistralForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def spec_of(model_type: str, **config: Any) -> ModelSpec:
    return model_spec({"model_type": model_type, **SIZES, **config}, torch.float32)


def windows(model_type: str, **config: Any) -> list[int | None]:
    spec = spec_of(model_type, **config)
    for layer in spec.layers:
        assert (layer.kind is LayerKind.WINDOW) is (layer.window is not None)
    return [layer.window for layer in spec.layers]


def ropes(model_type: str, **config: Any) -> list[tuple[str, float]]:
    fields = {"model_type": model_type, **SIZES, **config}
    spec = model_spec(fields, torch.float32)
    family = MODELS.get(spec.architecture)(fields, spec, device="meta")
    specs = [rope.spec for rope in family.model.ropes]
    return [(specs[i].rope_type, specs[i].theta) for i in family.model.rope_of]


@pytest.mark.parametrize("model_type", DENSE)
def test_model_type_names_the_architecture(model_type: str) -> None:
    assert spec_of(model_type).architecture == DENSE[model_type]
    assert MODELS.get(DENSE[model_type]).examples


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("mistral", {"sliding_window": 8}, [8] * 6),
        ("mistral", {"sliding_window": None}, [None] * 6),
        ("mistral", {"max_position_embeddings": 8192}, [4096] * 6),
        ("ministral", {"sliding_window": 8, "layer_types": [S, F] * 3}, [8, None] * 3),
        ("phi3", {"sliding_window": 8}, [8] * 6),
        ("phi3", {"sliding_window": None}, [None] * 6),
        ("qwen2", {"sliding_window": 8}, [None] * 6),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            [None] * 4 + [8] * 2,
        ),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, [None] * 6),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": [F, S] * 3},
            [None, 8] * 3,
        ),
        ("gemma2", {"sliding_window": 8}, [8, None] * 3),
        ("gemma3_text", {"sliding_window": 8}, [8] * 5 + [None]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, None] * 3),
        ("gemma3_text", {"sliding_window": 8, "layer_types": [F] * 5 + [S]}, [None] * 5 + [8]),
    ],
)
def test_which_layers_slide(
    model_type: str, config: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows(model_type, **config) == expected


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "gemma2", "gemma3_text"])
def test_a_window_that_no_text_outgrows_is_none(model_type: str) -> None:
    """Phi-4-mini's is 262,144 for 131,072 positions: its layers are full, sparse methods act."""
    assert windows(model_type, sliding_window=1024) == [None] * 6
    assert 1023 in windows(model_type, sliding_window=1023)


def test_scales_and_caps_of_gemma() -> None:
    second = spec_of("gemma2", query_pre_attn_scalar=144).layers[0]
    assert (second.softmax_scale, second.softcap) == (1 / 12, 50.0)
    assert spec_of("gemma2", attn_logit_softcapping=None).layers[0].softcap == 0.0
    third = spec_of("gemma3_text").layers[0]
    assert (third.softmax_scale, third.softcap, third.head_dim) == (1 / 16, 0.0, 256)


def test_rotations_of_gemma3_in_both_spellings() -> None:
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    new = {
        "rope_parameters": {
            F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            S: {"rope_type": "default", "rope_theta": 2e4},
        },
        "layer_types": [S, S, F] * 2,
    }
    local, full = ("default", 2e4), ("linear", 5e5)
    assert ropes("gemma3_text", **old) == ropes("gemma3_text", **new) == [local, local, full] * 2
    bare = [("default", 1e4)] * 5 + [("default", 1e6)]
    assert ropes("gemma3_text") == bare
    # The rotation follows the kind of layer even where the window is too wide to matter.
    assert ropes("gemma3_text", sliding_window=1024) == bare


def test_gemma3_with_few_fields_has_the_published_sizes() -> None:
    """The language part of google/gemma-3-4b-it names six fields; the rest is its class's."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    spec = model_spec(config, torch.bfloat16)
    assert (spec.hidden_size, spec.vocab_size, spec.max_position) == (2560, 262208, 131072)
    layers = [(s.kind, s.q_heads, s.kv_heads, s.head_dim, s.window) for s in spec.layers]
    local = (LayerKind.WINDOW, 8, 4, 256, 1024)
    assert layers[:6] == [local] * 5 + [(LayerKind.FULL, 8, 4, 256, None)]
    assert len(layers) == 34
    longer = model_spec({**config, "max_position_embeddings": 262144}, torch.bfloat16)
    assert longer.max_position == 262144


def test_early_phi3_configs_call_longrope_by_other_names() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for name in ("su", "yarn", "longrope"):
        assert ropes("phi3", rope_scaling={"type": name, **factors}) == [("longrope", 1e4)] * 6


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'.*only 'silu'"),
        ("llama", {"sliding_window": 8}, "sliding_window 8"),
        ("mistral", {"layer_types": [F] * 6, "sliding_window": 8}, "layer_types"),
        ("mistral", {"attention_bias": True}, "attention_bias True"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias True"),
        ("qwen3", {"layer_types": [F] * 5 + ["linear_attention"]}, "'linear_attention'"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias True"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act 'relu'.*'gelu_pytorch_tanh' or 'gelu'"),
        ("gemma", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ],
)
def test_features_that_are_not_there_are_refused_by_name(
    model_type: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        spec_of(model_type, **config)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("qwen2", {"layer_types": [S] * 6, "sliding_window": 8}, "no window is in use.*is None"),
        ("gemma3_text", {"layer_types": [S] * 5}, "layer_types has 5 entries.*num_hidden_layers 6"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a number"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number >= 1, got 0"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters holds \['rope"),
    ],
)
def test_impossible_fields_are_named(model_type: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ropes(model_type, **config)
