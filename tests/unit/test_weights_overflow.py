"""Weights of one dtype in another; float16 that overflows ends that request, with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.engines import save_checkpoint
from sparseengine import LLM, SamplingParams
from sparseengine.cli.main import main
from sparseengine.config import ModelConfig
from sparseengine.models import load_model, model_spec
from sparseengine.weights.source import open_model

LOUD = 77  # a token whose embedding does not fit float16
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint with one value that float16 cannot hold."""
    folder = save_checkpoint(tmp_path_factory.mktemp("loud"))
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    tensors["model.embed_tokens.weight"][LOUD] *= 1e6
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def generate(folder: Path, dtype: str) -> list[Any]:
    prompts = [[5, 6, 7], [5, LOUD, 7], [8, 9]]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), dtype=dtype, quiet=True, max_model_len=64) as llm:
        return [o.outputs[0] for o in llm.generate(prompts, greedy, use_tqdm=False)]


def test_an_overflow_ends_its_request_and_no_other(loud: Path) -> None:
    outputs = generate(loud, "float16")
    assert [c.finish_reason for c in outputs] == ["length", "error", "length"]
    assert [len(c.token_ids) for c in outputs] == [6, 0, 6]
    assert "not finite" in outputs[1].stop_reason
    assert "float16" in outputs[1].stop_reason
    assert "--dtype" in outputs[1].stop_reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wider_dtype_is_the_remedy(loud: Path, dtype: str) -> None:
    assert [c.finish_reason for c in generate(loud, dtype)] == ["length"] * 3


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_names_it_and_fails(
    loud: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    ids = ["--prompt-token-ids", f"5,{LOUD},7"]
    options = ["--dtype", "float16", "--max-tokens", "4", "--max-model-len", "64", "--quiet"]
    flags = ["--json"] if as_json else []
    assert main(["generate", str(loud), *ids, *options, *flags]) == 1
    shown = capsys.readouterr()
    assert "error: prompt 1 of 1 ended: the model's logits are not finite" in shown.err
    assert "float16" in shown.err
    if as_json:
        assert json.loads(shown.out)[0]["outputs"][0]["finish_reason"] == "error"
    options[1] = "float32"
    assert main(["generate", str(loud), *ids, *options, *flags]) == 0


@pytest.mark.parametrize("wanted", sorted(DTYPES))
@pytest.mark.parametrize("stored", sorted(DTYPES))
def test_any_stored_dtype_loads_in_any_other(stored: str, wanted: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    tensors = {n: t.to(DTYPES[stored]) for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source = open_model(ModelConfig(model=str(folder)))
    model = load_model(source, model_spec(source.hf_config, DTYPES[wanted]))
    expected = tensors["model.embed_tokens.weight"].to(DTYPES[wanted])
    assert torch.equal(model.model.embed_tokens.weight, expected)
    assert {p.dtype for p in model.parameters()} == {DTYPES[wanted]}


@pytest.mark.parametrize("family", ["qwen3-0.6b", "smollm2-135m"])
def test_dummy_weights_do_not_overflow_float16(family: str) -> None:
    """Real widths, where sums are longest; two layers show the growth of one."""
    overrides = {"num_hidden_layers": 2, "vocab_size": 2000}
    with LLM(
        family,
        load_format="dummy",
        dtype="float16",
        hf_overrides=overrides,
        quiet=True,
        max_model_len=64,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, ignore_eos=True)
        (found,) = llm.generate([[1, 2, 3, 4]], params, use_tqdm=False)
    assert found.outputs[0].finish_reason == "length"
    assert all(math.isfinite(p.logprob) for row in found.outputs[0].logprobs for p in row.values())
