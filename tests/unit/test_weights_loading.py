"""No parameter left behind: every wrong checkpoint is an error that names the tensor."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fixtures.tiny import save_tiny
from sparseengine.config import ModelConfig
from sparseengine.errors import ConfigError, UnsupportedError
from sparseengine.models import load_model, model_spec
from sparseengine.weights.source import open_model

Edit = Callable[[dict[str, Tensor]], object]
UP = "model.layers.1.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(folder: Path, **config: Any) -> nn.Module:
    source = open_model(ModelConfig(model=str(folder), **config))
    return load_model(source, model_spec(source.hf_config, torch.float32))


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def shard(folder: Path) -> dict[str, str]:
    """Rewrite as two indexed shards; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: names[i % 2] for i, name in enumerate(tensors)}
    for part in names:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == part}, folder / part)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def test_indexed_shards_load_like_one_file(folder: Path) -> None:
    single = load(folder)
    shard(folder)
    sharded = load(folder)
    embedded = [m.model.embed_tokens.weight for m in (single, sharded)]
    assert torch.equal(*embedded)
    merged = [m.model.layers[2].mlp.gate_up_proj.weight.to_dense() for m in (single, sharded)]
    assert torch.equal(*merged)


def test_merged_weights_are_stacked_in_order(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    parts = [tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    found = load(folder).model.layers[0].self_attn.qkv_proj.weight.to_dense()
    assert torch.equal(found, torch.cat(parts))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(UP))
    with pytest.raises(ConfigError, match=f"lacks 1 tensor that the model needs: {UP}"):
        load(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"lacks 9 tensors .*model.layers.3.*and 4 more"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.0.extra.weight": torch.ones(2)}))
    with pytest.raises(ConfigError, match=r"holds 1 tensor .* no place for: model.layers.0.extra"):
        load(folder)


def test_old_exporters_frequencies_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.ones(4)}))
    load(folder)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({UP: torch.ones(95, 64)}))
    with pytest.raises(ConfigError, match=rf"{UP} has shape \(95, 64\).* asks for \(96, 64\)"):
        load(folder)


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    weight_map = shard(folder)
    other = next(p for p in set(weight_map.values()) if p != weight_map[UP])
    tensors = load_file(folder / other)
    save_file({**tensors, UP: torch.zeros(96, 64)}, folder / other)
    with pytest.raises(ConfigError, match=f"holds the tensor {UP} twice"):
        load(folder)


def test_untied_without_a_head_is_an_error_that_names_it(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(HEAD))
    with pytest.raises(ConfigError, match=rf"{HEAD}; tie_word_embeddings is false in its config"):
        load(folder)
    tied = load(folder, hf_overrides={"tie_word_embeddings": True})
    embedding = tied.model.embed_tokens.weight
    assert torch.equal(tied.logits(torch.eye(64)), embedding.T)


def test_tied_shares_the_embedding(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    assert HEAD not in load_file(folder / "model.safetensors")
    model = load(folder)
    assert torch.equal(model.logits(torch.eye(64)), model.model.embed_tokens.weight.T)


def test_tied_with_a_stored_head(tmp_path: Path) -> None:
    """A copy of the embedding is fine; another matrix would silently be ignored."""
    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    load(folder)
    edit_tensors(folder, lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
    with pytest.raises(ConfigError, match=f"true, but {HEAD} differs from {EMBEDDING}"):
        load(folder)


def test_biases_are_parameters_like_any_other(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, attention_bias=True)
    name = "model.layers.2.self_attn.k_proj.bias"
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(ConfigError, match=name):
        load(folder)
    edit_config(folder, attention_bias=False)
    with pytest.raises(ConfigError, match=r"holds 11 tensors .*self_attn.*bias"):
        load(folder)


def test_weights_are_cast_to_the_wanted_dtype(folder: Path) -> None:
    source = open_model(ModelConfig(model=str(folder)))
    assert source.stored_dtype is torch.float32
    model = load_model(source, model_spec(source.hf_config, torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="differs from the spec"):
        load_model(source, model_spec(source.hf_config, torch.bfloat16), dtype=torch.float32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["LlamaForCausalLN"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "did you mean 'Qwen3ForCausalLM'"),
        ({"architectures": None, "model_type": "gpt2"}, "names no architecture.*'gpt2'"),
        ({"hidden_size": None}, "hidden_size must be a whole number >= 1, got None"),
        ({"vocab_size": 0}, "vocab_size must be a whole number >= 1, got 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be .* got '3'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is no multiple of .* 3"),
    ],
)
def test_config_errors_name_the_field(folder: Path, values: dict[str, Any], message: str) -> None:
    edit_config(folder, **values)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_wrong_epsilon_and_tie_flag_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="rms_norm_eps must be a number > 0, got 0"):
        load(folder, hf_overrides={"rms_norm_eps": 0})
    with pytest.raises(ConfigError, match="tie_word_embeddings must be true or false, got 'no'"):
        load(folder, hf_overrides={"tie_word_embeddings": "no"})


def test_unsupported_features_are_refused_with_a_reason(folder: Path) -> None:
    edit_config(folder, hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="hidden_act 'gelu' is not supported, only 'silu'"):
        load(folder)
    edit_config(folder, hidden_act="silu", sliding_window=512)
    with pytest.raises(UnsupportedError, match="sliding_window 512"):
        load(folder)
    load(folder, hf_overrides={"sliding_window": None})


def test_mistral_is_llama_and_model_type_is_enough(folder: Path) -> None:
    edit_config(folder, architectures=["MistralForCausalLM"], model_type="mistral")
    load(folder)
    edit_config(folder, architectures=None, model_type="llama")
    load(folder)


def test_head_dim_is_explicit_or_derived() -> None:
    base = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 9,
        "max_position_embeddings": 32,
    }
    llama = {**base, "architectures": ["LlamaForCausalLM"]}
    assert model_spec(llama, torch.float32).layers[1].head_dim == 16
    assert model_spec({**llama, "head_dim": 24}, torch.float32).layers[0].value_dim == 24
    qwen = {**base, "architectures": ["Qwen3ForCausalLM"]}
    assert model_spec(qwen, torch.float32).layers[0].head_dim == 128
    assert model_spec(llama, torch.float32).layers[0].kv_heads == 4


def test_at_most_two_tensors_are_alive_while_loading(folder: Path) -> None:
    """The one being copied and the next one being read: the host holds no second model."""
    source = open_model(ModelConfig(model=str(folder)))
    spec = model_spec(source.hf_config, torch.float32)
    alive: list[weakref.ref[Tensor]] = []
    peak = 0

    class Counted:
        name, load_format, hf_config, seed = source.name, "safetensors", source.hf_config, 0

        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            nonlocal peak
            for name, tensor in source.tensors():
                alive[:] = [r for r in alive if r() is not None]
                alive.append(weakref.ref(tensor))
                peak = max(peak, len(alive))
                yield name, tensor
                del tensor

    load_model(Counted(), spec)
    assert 1 <= peak <= 2
