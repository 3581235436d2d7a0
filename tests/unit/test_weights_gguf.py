"""GGUF: every format, metadata to config, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from fixtures.gguf_writer import write_gguf
from fixtures.tiny import VOCAB, DenseContext, reference_model
from sparseengine.config import ModelConfig
from sparseengine.errors import ConfigError
from sparseengine.models import load_model, model_spec
from sparseengine.weights.gguf_file import FORMATS, Skipped, read_header
from sparseengine.weights.source import open_model

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 1}


def transformers_tensors(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    return load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_every_format_equals_transformers_bit_for_bit(
    family: str, kind: str, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_float_file_equal_the_model(family: str, tied: bool, tmp_path: Path) -> None:
    """Config from metadata and the undone Q/K row order are both right."""
    model = reference_model(family, tie_word_embeddings=tied)
    source = open_model(ModelConfig(model=str(write_gguf(tmp_path / "m.gguf", model, family))))
    spec = model_spec(source.hf_config, torch.float32)
    ours, ids = load_model(source, spec), torch.arange(40) % VOCAB
    with torch.inference_mode():
        context = DenseContext(spec.layers[0].softmax_scale)
        found = ours.logits(ours(ids, torch.arange(40), context))
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


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
        patch.setattr(gguf_writer, "gguf_name", lambda n: names.get(n) or original(n))
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
    path = write_gguf(tmp_path / "m.gguf", model, "llama", kind=GGMLQuantizationType.Q5_0)
    with pytest.raises(ConfigError, match=r"tensor token_embd.weight has the GGUF format Q5_0"):
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
