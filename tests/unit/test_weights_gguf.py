"""GGUF: every format, metadata to config, and damaged files."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from fixtures.gguf_writer import write_gguf
from fixtures.tiny import VOCAB, DenseContext, reference_model
from golden.paged import paged_logits
from sparseengine.config import ModelConfig
from sparseengine.errors import ConfigError
from sparseengine.models import load_model, model_spec
from sparseengine.weights import hub
from sparseengine.weights.gguf_file import FORMATS, Skipped, read_header
from sparseengine.weights.source import open_model

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 1}


def transformers_tensors(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    return load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_format_equals_transformers_bit_for_bit(kind: str, tmp_path: Path) -> None:
    family = "llama"
    model = reference_model(family, **WIDE)
    path = write_gguf(tmp_path / "m.gguf", model, family, kind=GGMLQuantizationType[kind])
    stored = {t.format for t in read_header(path).tensors}
    assert stored == {kind, "F32"}
    expected = transformers_tensors(path, model)
    found = dict(open_model(ModelConfig(model=str(path))).tensors())
    assert found.keys() == expected.keys() == model.state_dict().keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name
        assert tensor.isfinite().all(), name


GEMMA = {
    "hidden_act": None,
    "query_pre_attn_scalar": 16,
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 7,
}
SMALL = {
    "llama": ("Llama", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 9.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", GEMMA),
}


def small_model(family: str, **overrides: Any) -> torch.nn.Module:
    """A random transformers model of a GGUF family, biases and norms included."""
    import transformers

    name, extra = SMALL[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": family.startswith("gemma"),
    }
    values = {k: v for k, v in {**sizes, **extra, **overrides}.items() if v is not None}
    # "eager": the fused attention of transformers 5.2 knows no soft cap
    config = getattr(transformers, f"{name}Config")(**values, attn_implementation="eager")
    torch.manual_seed(0)
    causal = name.removesuffix("Text") + "ForCausalLM"
    model: torch.nn.Module = getattr(transformers, causal)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + 0.1)
    return model


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One matrix per expert and projection, as published checkpoints store them."""
    found = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".experts.")
        if not owner:
            found[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[leaf]
        for part, stacked in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            for expert, matrix in enumerate(stacked):
                found[f"{owner}.experts.{expert}.{part}.weight"] = matrix
    return found


@pytest.mark.parametrize("family", sorted(SMALL))
def test_names_and_values_of_every_family(family: str, tmp_path: Path) -> None:
    """What the converter renamed, reordered, stacked and shifted is undone."""
    model = small_model(family)
    path = write_gguf(tmp_path / "m.gguf", model, family)
    expected = split_experts(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = dict(open_model(ModelConfig(model=str(path))).tensors())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", sorted(SMALL))
def test_config_of_every_family(family: str, tmp_path: Path) -> None:
    """transformers reads our config and finds the model's own, field by field."""
    model = small_model(family)
    source = open_model(ModelConfig(model=str(write_gguf(tmp_path / "m.gguf", model, family))))
    config = source.hf_config
    assert config["architectures"] == [type(model).__name__]
    assert config["model_type"] == model.config.model_type
    ours = type(model.config)(**config).to_dict()
    for name, value in model.config.to_dict().items():
        if name not in _NOT_IN_GGUF:
            wanted = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert ours[name] == wanted, name


_NOT_IN_GGUF = {
    *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
    *("_name_or_path", "dtype", "router_aux_loss_coef", "max_window_layers"),
}


def test_gemma_files_name_what_llama_cpp_knows_by_heart(tmp_path: Path) -> None:
    model = small_model("gemma3")
    fields = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 5000.0,
        "gemma3.attention.sliding_window_pattern": 3,
    }
    path = write_gguf(tmp_path / "m.gguf", model, "gemma3", fields=fields)
    config = open_model(ModelConfig(model=str(path))).hf_config
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    assert [kind == "full_attention" for kind in config["layer_types"]] == [
        *(False, False, True, False, False, True, False)
    ]
    # The largest Gemma 3 (62 layers) scales its queries by hidden size / heads, here 64 / 8.
    large = small_model("gemma3", num_hidden_layers=62, hidden_size=64, intermediate_size=8)
    path = write_gguf(tmp_path / "large.gguf", large, "gemma3")
    assert open_model(ModelConfig(model=str(path))).hf_config["query_pre_attn_scalar"] == 8


def test_yarn_and_old_linear_scaling(tmp_path: Path) -> None:
    model = reference_model("llama")
    fields = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    path = write_gguf(tmp_path / "yarn.gguf", model, "llama", fields=fields)
    scaling = open_model(ModelConfig(model=str(path))).hf_config["rope_scaling"]
    assert scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "attention_factor": pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0)),
    }
    old = {"llama.rope.scale_linear": 2.0}
    path = write_gguf(tmp_path / "old.gguf", model, "llama", fields=old)
    scaling = open_model(ModelConfig(model=str(path))).hf_config["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 2.0}


def test_experts_under_the_llama_name_are_refused(tmp_path: Path) -> None:
    fields = {"llama.expert_count": 8}
    path = write_gguf(tmp_path / "m.gguf", reference_model("llama"), "llama", fields=fields)
    with pytest.raises(ConfigError, match=r"with 8 experts \(Mixtral\) is not supported"):
        open_model(ModelConfig(model=str(path)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_float_file_equal_the_model(family: str, tied: bool, tmp_path: Path) -> None:
    """Config from metadata and the undone Q/K row order are both right."""
    model = small_model(family, tie_word_embeddings=tied)
    source = open_model(ModelConfig(model=str(write_gguf(tmp_path / "m.gguf", model, family))))
    spec = model_spec(source.hf_config, torch.float32)
    ours, ids = load_model(source, spec), torch.arange(40) % VOCAB
    with torch.inference_mode():
        context = DenseContext(spec.layers[0].softmax_scale)
        found = ours.logits(ours(ids, torch.arange(40), context))
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_logits_of_a_gemma_file_equal_the_model(family: str, tmp_path: Path) -> None:
    """Windows, both rotations, query scaling and soft caps follow from the metadata."""
    model = small_model(family)
    path, ids = write_gguf(tmp_path / "m.gguf", model, family), list(range(40))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(paged_logits(path, ids, [25, 15]), expected, rtol=0, atol=1e-4)


def test_metadata_becomes_a_config(tmp_path: Path) -> None:
    model = reference_model("qwen3", tie_word_embeddings=True)
    fields = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 256,
        "tokenizer.ggml.eot_token_id": 7,
    }
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(folder / "m.gguf", model, "qwen3", fields=fields)
    source = open_model(ModelConfig(model=str(folder)))
    config = source.hf_config
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["head_dim"], config["vocab_size"]) == (16, VOCAB)
    assert config["tie_word_embeddings"] is True
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    assert source.eos_token_ids == (2, 7)
    assert source.header is not None
    assert source.header.metadata["tokenizer.ggml.tokens"] == Skipped(VOCAB)


def test_rope_frequencies_tensor_becomes_factors(tmp_path: Path) -> None:
    """llama.cpp writes Llama 3 scaling as a tensor; it is used, not reported as unexpected."""
    model = reference_model("llama")
    model.register_buffer("extra", torch.tensor([1.0, 1.0, 4.0, 8.0]))
    names = {"extra": "rope_freqs.weight"}
    from fixtures import gguf_writer

    original = gguf_writer.gguf_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_writer, "gguf_name", lambda n, _: names.get(n) or original(n))
        path = write_gguf(tmp_path / "m.gguf", model, "llama")
    source = open_model(ModelConfig(model=str(path)))
    assert source.hf_config["rope_scaling"]["factors"] == [1.0, 1.0, 4.0, 8.0]
    load_model(source, model_spec(source.hf_config, torch.float32))


def test_truncated_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", reference_model("llama"), "llama").read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in (0, 3, 10, 23, 24, 60, 200, 1000, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="truncated") as caught:
            open_model(ModelConfig(model=str(broken)))
        assert str(broken) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_other_damage_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference_model("llama"), "llama")
    whole = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ConfigError, match="not a GGUF file"):
        open_model(ModelConfig(model=str(broken)))
    broken.write_bytes(whole[:4] + struct.pack("<I", 99) + whole[8:])
    with pytest.raises(ConfigError, match="version 99"):
        open_model(ModelConfig(model=str(broken)))
    first_type = 24 + 8 + len("general.architecture")
    broken.write_bytes(whole[:first_type] + struct.pack("<I", 77) + whole[first_type + 4 :])
    with pytest.raises(ConfigError, match="unknown value type 77"):
        open_model(ModelConfig(model=str(broken)))


def test_unknown_family_names_the_nearest(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", reference_model("llama"), "qwen33")
    with pytest.raises(ConfigError, match=r"'qwen33' is not supported; did you mean 'qwen3'"):
        open_model(ModelConfig(model=str(path)))


def test_unsupported_format_names_the_tensor(tmp_path: Path) -> None:
    model = reference_model("llama", **WIDE)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", kind=GGMLQuantizationType.IQ1_M)
    with pytest.raises(ConfigError, match=r"tensor token_embd.weight has the GGUF format IQ1_M"):
        open_model(ModelConfig(model=str(path)))


def test_missing_field_and_missing_tensor_are_named(tmp_path: Path) -> None:
    model = reference_model("llama")
    skip = ("model.layers.1.mlp.up_proj.weight",)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", skip=skip)
    source = open_model(ModelConfig(model=str(path)))
    with pytest.raises(ConfigError, match=r"lacks 1 tensor .*: model.layers.1.mlp.up_proj.weight"):
        load_model(source, model_spec(source.hf_config, torch.float32))
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_cound"))
    with pytest.raises(ConfigError, match=r"GGUF field llama.block_count is missing"):
        open_model(ModelConfig(model=str(path)))


# ── Gemma's tokenizer ─────────────────────────────────────────────────────────────────────────────

PIECES = {
    **dict.fromkeys(["<pad>", "<eos>", "<bos>", "<unk>"], 3),
    **dict.fromkeys(["\n\n", "  "], 4),
    **dict.fromkeys([f"<0x{byte:02X}>" for byte in range(256)], 6),
    **dict.fromkeys(["▁f", "ox", "▁fo", "▁fox", "▁", "f", "o", "x", "\n"], 1),
}


def write_gemma_tokenizer(path: Path, **fields: Any) -> Path:
    """A GGUF file without tensors, with a vocabulary as llama.cpp writes Gemma's."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(PIECES))
    writer.add_token_types(list(PIECES.values()))
    for name, number in (("bos", 2), ("eos", 1), ("unknown", 3), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_bool("tokenizer.ggml.add_bos_token", fields.get("add_bos", True))
    if "template" in fields:
        writer.add_chat_template(fields["template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gemma_tokenizer_merges_what_the_vocabulary_ranks_first(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_gemma_tokenizer(tmp_path / "m.gguf", template="T{{ messages }}")
    hub.convert_tokenizer(path, tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    names = tokenizer.convert_ids_to_tokens
    assert names(tokenizer("f fox").input_ids) == ["<bos>", "f", "▁fox"]
    assert names(tokenizer("x ofox").input_ids) == ["<bos>", "x", "▁", "o", "f", "ox"]
    assert names(tokenizer("fé\n\nx<eos>").input_ids) == [
        *("<bos>", "f", "<0xC3>", "<0xA9>", "\n\n", "x", "<eos>")
    ]
    assert names(tokenizer("x  x", add_special_tokens=False).input_ids) == ["x", "▁▁", "x"]
    for text in ("fox  fox\n\n", " é x"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    found = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert found == (2, 1, 0)
    assert tokenizer.chat_template == "T{{ messages }}"


def test_gemma_tokenizer_without_bos_or_vocabulary(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_gemma_tokenizer(tmp_path / "m.gguf", add_bos=False)
    hub.convert_tokenizer(path, tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer")("fox").input_ids[0] != 2
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.token_type", b"x" * 25))
    with pytest.raises(ConfigError, match="holds no vocabulary"):
        hub.convert_tokenizer(path, tmp_path / "none")


def test_a_tensor_listed_twice_is_named(tmp_path: Path) -> None:
    """Two entries of one name, as a broken converter may write them."""
    path = write_gguf(tmp_path / "m.gguf", reference_model("llama"), "llama")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    source = open_model(ModelConfig(model=str(path)))
    with pytest.raises(ConfigError, match=r"the tensor model.layers.0.mlp.up_proj.weight twice"):
        load_model(source, model_spec(source.hf_config, torch.float32))
