"""Finding a model: folders, files, pulled names, hub ids, dummies, tokenizers, EOS lists."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.engines import make_tokenizer, save_checkpoint
from fixtures.gguf_writer import write_gguf
from fixtures.tiny import reference_model, save_tiny
from sparseengine import LLM, SamplingParams
from sparseengine.config import ModelConfig
from sparseengine.errors import ConfigError
from sparseengine.models import load_model, model_spec
from sparseengine.weights import hub
from sparseengine.weights.dummy import _PATTERN_SIZE, DummyFill, shape_config, shape_names
from sparseengine.weights.hf_config import override
from sparseengine.weights.source import ModelSource, open_model


def open_named(model: str | Path, **config: Any) -> ModelSource:
    return open_model(ModelConfig(model=str(model), **config))


def refuse(message: str, model: str | Path, **config: Any) -> str:
    """open_model raises this one-paragraph ConfigError."""
    with pytest.raises(ConfigError, match=message) as caught:
        open_named(model, **config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def test_nothing_and_nowhere(tmp_path: Path) -> None:
    refuse("no model given.*smollm2-135m", "")
    refuse("is not there: no such file or folder", tmp_path / "absent")
    refuse("is not there.*did you mean 'smollm2-135m'", "smollm2-135")
    refuse("is not there", "./missing/folder")
    refuse("is not there", "some/model.gguf")


def test_broken_folders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuse("neither a config.json nor a .gguf", tmp_path / "empty")
    refuse("is a file, but not a .gguf", folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse("holds no weights.*pytorch_model.bin would have to be converted", folder)
    (folder / "a.safetensors").touch()
    (folder / "b.safetensors").touch()
    refuse(r"several safetensors files \(a.safetensors, b.safetensors\)", folder)
    (folder / "config.json").write_text("{")
    refuse("cannot read .*config.json", folder)
    (folder / "config.json").write_text("[]")
    refuse("must hold a JSON object, not list", folder)


def test_missing_shards_and_a_broken_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    refuse("misses 1 of 2 weight files .*: two.safetensors", folder)
    index.write_text("{}")
    refuse("has no weight_map", folder)


def test_truncated_safetensors_name_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        source = open_named(folder)
        with pytest.raises(ConfigError, match=r"model.safetensors .* is truncated or damaged"):
            load_model(source, model_spec(source.hf_config, torch.float32))


def test_gguf_folders(tmp_path: Path) -> None:
    model = reference_model("llama")
    write_gguf(tmp_path / "one.gguf", model, "llama")
    assert open_named(tmp_path).path == tmp_path / "one.gguf"
    assert open_named(tmp_path, load_format="gguf").load_format == "gguf"
    write_gguf(tmp_path / "two.gguf", model, "llama")
    refuse("several GGUF files; name one of them: one.gguf, two.gguf", tmp_path)
    save_tiny(tmp_path)
    assert open_named(tmp_path).load_format == "safetensors"
    (tmp_path / "one.gguf").unlink()
    (tmp_path / "two.gguf").unlink()
    refuse("holds no .gguf file", tmp_path, load_format="gguf")


def test_hub_id_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = open_named("owner/some-model", revision="abc")
    assert (asked["repo"], asked["revision"]) == ("owner/some-model", "abc")
    assert "*.safetensors" in asked["allow_patterns"]
    assert source.path == folder
    load_model(source, model_spec(source.hf_config, torch.float32))


def test_the_hub_is_asked_for_what_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client's own filter decides over a repository as they are published."""
    from huggingface_hub.utils import filter_repo_objects

    published = {
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt"),
        *("chat_template.jinja", "merges.txt"),
    }
    spare = {
        *("README.md", "pytorch_model.bin", "consolidated.safetensors", "model-Q4_0.gguf"),
        *("original/params.json", "original/consolidated.00.pth", "onnx/config.json"),
    }
    fetched: set[str] = set()

    def download(repo: str, **options: Any) -> str:
        found = filter_repo_objects(
            published | spare,
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
        fetched.update(found)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_named("owner/some-model")
    assert fetched == published


def test_hub_failure_is_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(repo: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nmany\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refuse("'a/b' is no local folder, and fetching it .* failed: no connection", "a/b")


def test_pulled_name_is_a_model(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "pull", lambda name: folder)
    monkeypatch.chdir(tmp_path)
    assert open_named("smollm2-135m").path == folder


def test_overrides_and_generation_config(folder: Path, tmp_path: Path) -> None:
    source = open_named(folder, hf_overrides={"max_position_embeddings": 77})
    assert source.hf_config["max_position_embeddings"] == 77
    own = {"temperature": 0.6, "eos_token_id": [1, 106, 50]}
    (folder / "generation_config.json").write_text(json.dumps(own))
    assert open_named(folder).generation_config == own
    assert open_named(folder, generation_config="vllm").generation_config == {}
    other = tmp_path / "other"
    other.mkdir()
    refuse("neither 'auto', 'vllm' nor a folder", folder, generation_config=str(other))
    (other / "generation_config.json").write_text('{"top_k": 5}')
    assert open_named(folder, generation_config=str(other)).generation_config == {"top_k": 5}


def test_generation_config_gives_the_defaults_of_sampling(tmp_path: Path) -> None:
    """For calls without sampling_params, as vLLM does; given ones are left alone."""
    folder = save_checkpoint(tmp_path)
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "min_p": None}
    own |= {"max_new_tokens": 5, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(own))
    options: dict[str, Any] = {"quiet": True, "max_model_len": 64}
    with LLM(str(folder), **options) as llm:
        found = llm.default_sampling_params()
        assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.9, 20)
        assert (found.repetition_penalty, found.min_p) == (1.1, 0.0)
        (output,) = llm.generate([[5, 6, 7]], use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 5
        asked = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        (output,) = llm.generate([[5, 6, 7]], asked, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 9
    with LLM(str(folder), generation_config="vllm", **options) as llm:
        assert llm.default_sampling_params() == SamplingParams()


def test_overrides_are_merged_into_nested_fields(folder: Path) -> None:
    source = open_named(folder, hf_overrides={"rope_parameters": {"rope_theta": 5e5}})
    assert source.hf_config["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "default"}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        # A key of a nested dictionary, at any depth; lists and null replace.
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 3}}}, {"a": {"b": {"c": 3, "d": 2}}}),
        ({"a": {"b": 1}, "c": [1]}, {"a": None, "c": [2]}, {"a": None, "c": [2]}),
        ({}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        # A number of the old rule, or a new rule that keeps the base frequency alone.
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            {"rope_parameters": {"factor": 2.0}},
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            {"rope_parameters": YARN},
            {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        ),
        # The overrides' spelling wins whichever one the config has.
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_parameters": YARN},
            {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            {"rope_scaling": YARN},
            {"rope_theta": 5e5, "rope_scaling": YARN},
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            {"rope_theta": 1e6},
            {"rope_theta": 1e6, "rope_scaling": LLAMA3},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_scaling": YARN},
            {"rope_theta": 5e5, "rope_scaling": YARN},
        ),
        # One rotation per layer type keeps its form.
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            {"rope_parameters": {"full_attention": YARN}},
            {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 1e6}}},
        ),
    ],
)
def test_what_an_override_becomes(
    config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = json.dumps([config, overrides])
    assert override(config, overrides) == expected
    assert json.dumps([config, overrides]) == before, "its arguments are left alone"


@pytest.mark.parametrize(
    ("quantisation", "shown"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, r"gptq \(4 bits\)"),
        ({"quant_method": "awq", "bits": 4}, r"awq \(4 bits\)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes \(4 bits\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"bitsandbytes \(8 bits\)"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r"compressed-tensors \(pack-quantized\)",
        ),
        ({"bits": 3}, r"unnamed \(3 bits\)"),
    ],
)
def test_a_quantised_checkpoint_names_its_format(
    folder: Path, quantisation: dict[str, Any], shown: str
) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": quantisation}))
    refuse(rf"is a quantised checkpoint of the format {shown}, which is not supported yet", folder)
    file.write_text(json.dumps({**config, "text_config": {"quantization_config": quantisation}}))
    refuse(f"of the format {shown}", folder)
    open_named(folder, load_format="dummy")  # of a dummy only the sizes matter


def test_quantisation_in_a_file_of_its_own(folder: Path) -> None:
    for name, shown in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        (folder / name).write_text('{"bits": 4, "w_bit": 4}')
        refuse(rf"of the format {shown} \(4 bits\)", folder)
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([1, 106, 50], 2, (1, 106, 50, 2)),
        (None, [1, 106, 50], (1, 106, 50)),
        (7, 7, (7,)),
        (None, 3, (3,)),
        (None, None, ()),
    ],
)
def test_every_listed_eos_stops(
    folder: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_named(folder, hf_overrides={"eos_token_id": config}).eos_token_ids == expected


def test_stored_dtype_in_both_spellings(folder: Path) -> None:
    for name in ("dtype", "torch_dtype"):
        overrides = {"dtype": None, "torch_dtype": None, name: "bfloat16"}
        assert open_named(folder, hf_overrides=overrides).stored_dtype is torch.bfloat16
    none = open_named(folder, hf_overrides={"dtype": None})
    assert none.stored_dtype is None


def test_tokenizer_of_a_folder_and_elsewhere(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .*; `tokenizer` may name"):
        open_named(folder).load_tokenizer()
    other = tmp_path / "tokenizer"
    make_tokenizer().save_pretrained(other)
    text = "the quick brown fox"
    ids = open_named(folder, tokenizer=str(other)).load_tokenizer()(text).input_ids
    assert ids == make_tokenizer()(text).input_ids


def test_chat_templates_in_files_of_their_own(folder: Path) -> None:
    """Current checkpoints have chat_template.jinja, some older ones chat_template.json."""
    make_tokenizer().save_pretrained(folder)
    assert not open_named(folder).load_tokenizer().chat_template
    (folder / "chat_template.json").write_text('{"chat_template": "J {{ messages[0].content }}"}')
    assert open_named(folder).load_tokenizer().chat_template.startswith("J ")
    (folder / "chat_template.jinja").write_text("F {{ messages[0].content }}")
    assert open_named(folder).load_tokenizer().chat_template.startswith("F ")


def test_dummy_shapes() -> None:
    assert set(shape_names()) >= {"qwen3-8b", "qwen3-0.6b", "llama-3.1-8b", "smollm2-135m"}
    sizes = {"qwen3-8b": 36, "qwen3-0.6b": 28, "llama-3.1-8b": 32, "smollm2-135m": 30}
    for name, layers in sizes.items():
        source = open_named("", load_format="dummy", hf_config=name)
        spec = model_spec(source.hf_config, torch.bfloat16)
        assert len(spec.layers) == layers
        assert source.load_tokenizer() is None
        assert source.eos_token_ids
    assert open_named("qwen3-8b", load_format="dummy").hf_config == shape_config("qwen3-8b")
    refuse("needs a shape: .*qwen3-8b", "", load_format="dummy")
    refuse(
        "unknown model shape 'qwen3-80b'; did you mean 'qwen3-8b'", "qwen3-80b", load_format="dummy"
    )


def test_dummy_of_a_folder_needs_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = open_named(folder, load_format="dummy")
    load_model(source, model_spec(source.hf_config, torch.float32))


def test_dummy_weights_are_seeded_small_and_everywhere() -> None:
    small = {"num_hidden_layers": 2, "vocab_size": 500}

    def build(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        source = open_named(
            "", load_format="dummy", hf_config="qwen3-0.6b", hf_overrides=small, seed=seed
        )
        model = load_model(source, model_spec(source.hf_config, dtype))
        return {n: p.to_dense() if p.is_mkldnn else p for n, p in model.named_parameters()}

    first, again, other = build(0), build(0), build(1)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert not torch.equal(tensor, other[name]), name
            assert 0.019 < tensor.std().item() < 0.021, name
            assert len(torch.unique(tensor, dim=0)) == len(tensor), f"{name}: rows repeat"
    halves = build(0, torch.bfloat16)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(halves[embedding], first[embedding].bfloat16())


def test_dummy_parameters_continue_one_pattern() -> None:
    """Doubling what is there gives the same values as repeating the pattern would."""
    fill, at = DummyFill(0), 0
    for count in (5, _PATTERN_SIZE - 5, 3 * _PATTERN_SIZE + 17, 1000, 9 * _PATTERN_SIZE + 3, 17):
        found = torch.empty(count)
        fill("weight", found)
        assert torch.equal(found, fill._pattern[(torch.arange(count) + at) % _PATTERN_SIZE])
        at = (at + count) % _PATTERN_SIZE


def test_dummy_experts_are_filled_and_differ() -> None:
    overrides = {"num_hidden_layers": 2, "vocab_size": 100, "num_experts": 16, "hidden_size": 256}
    source = open_named("", load_format="dummy", hf_config="qwen3-30b-a3b", hf_overrides=overrides)
    model = load_model(source, model_spec(source.hf_config, torch.bfloat16))
    for experts in (layer.mlp.experts for layer in model.model.layers):
        for stack in (experts.gate_up_proj, experts.down_proj):
            assert 0.019 < stack.float().std().item() < 0.021
            assert len(torch.unique(stack.flatten(1)[:, :64], dim=0)) == 16


def test_a_dummy_is_filled_at_memory_speed() -> None:
    """An 8B model must not take minutes: 50 million parameters a second, packing included."""
    overrides = {"num_hidden_layers": 1, "vocab_size": 1000}
    source = open_named("", load_format="dummy", hf_config="qwen3-8b", hf_overrides=overrides)
    spec = model_spec(source.hf_config, torch.bfloat16)
    start = time.perf_counter()
    model = load_model(source, spec)
    count = sum(p.numel() for p in model.parameters())
    assert time.perf_counter() - start < max(4.0, count / 50e6)


def test_loading_streams(folder: Path) -> None:
    """Tensors come one at a time: asking for the first opens no later file."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for part, held in parts.items():
        save_file({n: tensors[n] for n in held}, folder / part)
    (folder / "model.safetensors").unlink()
    weight_map = {n: part for part, held in parts.items() for n in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = open_named(folder)
    (folder / "two.safetensors").write_bytes(b"broken")
    stream = source.tensors()
    assert {next(stream)[0] for _ in range(5)} == set(names[:5])
    with pytest.raises(ConfigError, match=r"two\.safetensors"):
        next(stream)
