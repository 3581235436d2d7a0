"""No parameter left behind: every wrong checkpoint is an error that names the tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fixtures.tiny import VOCAB, save_tiny
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


def shard(folder: Path, count: int = 2) -> dict[str, str]:
    """Rewrite as indexed shards; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    names = [f"model-0000{i + 1}-of-0000{count}.safetensors" for i in range(count)]
    weight_map = {name: names[i % count] for i, name in enumerate(tensors)}
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
    with pytest.raises(
        ConfigError, match=f"holds the tensor {UP} twice: in .*1-of.* and in .*2-of"
    ):
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


# ── experts: one matrix each, or all of a layer in one tensor ─────────────────────────────────────


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A tiny Qwen3-MoE with a matrix per expert, as it is published."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[],
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    edit_tensors(tmp_path / "experts", lambda t: apart(t, 4))
    return tmp_path / "experts"


def apart(tensors: dict[str, Tensor], count: int) -> None:
    """Split the stacks where a version of transformers has saved them so."""
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        owner, _, leaf = name.rpartition(".")
        stack = tensors.pop(name)
        for expert in range(count):
            if leaf == "down_proj":
                tensors[f"{owner}.{expert}.down_proj.weight"] = stack[expert]
                continue
            gate, up = stack[expert].chunk(2)
            tensors[f"{owner}.{expert}.gate_proj.weight"] = gate
            tensors[f"{owner}.{expert}.up_proj.weight"] = up


def stacked(tensors: dict[str, Tensor], layer: int) -> None:
    """The layout that transformers may save: gate over up, all experts in one tensor."""
    owner = f"model.layers.{layer}.mlp.experts"
    taken = [
        [tensors.pop(f"{owner}.{i}.{part}_proj.weight") for part in ("gate", "up", "down")]
        for i in range(4)
    ]
    tensors[f"{owner}.gate_up_proj"] = torch.stack([torch.cat(t[:2]) for t in taken])
    tensors[f"{owner}.down_proj"] = torch.stack([t[2] for t in taken])


def stacks_of(model: nn.Module) -> list[Tensor]:
    return [s for m in model.model.layers for s in m.mlp.experts.parameters()]  # type: ignore


def test_experts_load_alike_from_either_layout(experts: Path) -> None:
    alone = stacks_of(load(experts))
    edit_tensors(experts, lambda t: stacked(t, 1))
    mixed = stacks_of(load(experts))
    assert len(alone) == 4
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))
    first = load_file(experts / "model.safetensors")["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert torch.equal(alone[0][2, 16:], first)


def test_experts_stored_in_both_layouts_are_refused(experts: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    held = load_file(experts / "model.safetensors")[name]
    edit_tensors(experts, lambda t: (stacked(t, 1), t.update({name: held})))
    with pytest.raises(ConfigError, match=r"holds the tensor model.layers.1.mlp.experts.* twice"):
        load(experts)


def test_a_missing_expert_and_a_wrong_stack_are_named(experts: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    edit_tensors(experts, lambda t: (stacked(t, 0), t.pop(name)))
    with pytest.raises(ConfigError, match=f"lacks 1 tensor that the model needs: {name}"):
        load(experts)
    edit_tensors(experts, lambda t: t.update({STACK: t[STACK][:, :-1]}))
    with pytest.raises(
        ConfigError, match=rf"{STACK} has shape \(4, 31, 32\), .* asks for \(4, 32, 32\)"
    ):
        load(experts)


STACK = "model.layers.0.mlp.experts.gate_up_proj"


# ── quantised tensors that no config announces ────────────────────────────────────────────────────


def test_quantised_tensors_without_a_config_are_recognised(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({f"{UP}_scale": torch.ones(1)}))
    with pytest.raises(ConfigError, match="these names belong to a quantised checkpoint"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_tensor_of_a_quantised_dtype_is_named(folder: Path, dtype: torch.dtype) -> None:
    edit_tensors(folder, lambda t: t.update({UP: t[UP].to(dtype)}))
    with pytest.raises(ConfigError, match=f"tensor {UP} is stored as {dtype}, which belongs"):
        load(folder)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────

MEASURE = """
import sys
from pathlib import Path

import torch

from sparseengine.config import ModelConfig
from sparseengine.models import load_model, model_spec
from sparseengine.weights.source import open_model


def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


for folder in sys.argv[1:]:  # the first one loads every library
    source = open_model(ModelConfig(model=folder))
    spec = model_spec(source.hf_config, torch.float32)
    before = held("VmRSS")
    model = load_model(source, spec)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(weights, held("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_host_never_holds_a_second_model(folder: Path, tmp_path: Path) -> None:
    """The peak while loading six shards: the model and at most one of them."""
    large = save_tiny(
        tmp_path / "large",
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        vocab_size=4096,
        num_attention_heads=12,
        head_dim=64,
    )
    shard(large, count=6)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(large)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    weights, peak = map(int, done.stdout.splitlines()[-1].split())
    largest = max(f.stat().st_size for f in large.glob("*.safetensors"))
    assert weights > 100e6
    assert largest < 0.25 * weights
    noise = 4 << 20  # what the allocator keeps
    assert peak < weights + largest + noise, f"{peak / weights:.2f} times the model"


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
