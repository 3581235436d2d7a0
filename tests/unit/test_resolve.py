"""Resolution: every choice with its source; what cannot run is refused before weights are read."""

from __future__ import annotations

import json

import pytest
import torch

import sparseengine.resolve as resolving
from fixtures.tiny import save_tiny
from sparseengine.config import EngineConfig, ModelConfig, SparseConfig, config_from_kwargs
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec, Ragged
from sparseengine.errors import ConfigError, UnsupportedError
from sparseengine.provenance import Source
from sparseengine.resolve import explain, resolve


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3"))


def test_auto_values_are_filled_with_their_source(model) -> None:
    found = resolve(config_from_kwargs(model=model))
    assert found.device == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert found.max_model_len == found.spec.max_position == 1024
    length = found.provenance["model.max_model_len"]
    assert (length.value, length.source) == (1024, Source.MODEL)
    assert length.shadowed[0].value is None
    assert found.provenance["runtime.device"].source is Source.DEVICE
    backend = found.provenance["runtime.attention_backend"]
    assert backend.value in {r.selected for r in found.routes}
    assert found.methods == ("full",)
    assert len(found.routes) == len(found.spec.layers)


def test_asked_values_stay_with_who_asked(model) -> None:
    found = resolve(config_from_kwargs(model=model, max_model_len=512, dtype="bfloat16"))
    assert found.max_model_len == 512
    assert found.dtype == found.spec.dtype == torch.bfloat16
    assert found.provenance["model.max_model_len"].source is Source.API
    assert found.provenance["model.dtype"].source is Source.API


def test_auto_that_was_asked_for_says_so(model) -> None:
    found = resolve(config_from_kwargs(model=model, max_model_len="auto"))
    assert "asked: None" in found.provenance["model.max_model_len"].origin


def test_configs_built_by_hand_resolve(model) -> None:
    config = EngineConfig(
        model=ModelConfig(model=model),
        sparse=SparseConfig(method="vanilla", enable_methods=("adakv",)),
    )
    found = resolve(config)
    assert found.methods == ("full", "adakv")
    assert found.provenance["model.model"].source is Source.API


def test_the_cache_plan_is_the_union_and_follows_the_page_size(model) -> None:
    plain = resolve(config_from_kwargs(model=model, block_size=32))
    assert {g.page_size for g in plain.groups} == {32}
    assert all(g.ragged is not Ragged.HEAD for g in plain.groups)
    both = resolve(config_from_kwargs(model=model, enable_methods="full,snapkv"))
    assert {g.ragged for g in both.groups} == {Ragged.HEAD}
    assert sorted(i for g in both.groups for i in g.layers) == list(both.spec.kv_layers)


def test_the_default_method_gets_budget_and_knobs(model) -> None:
    config = config_from_kwargs(
        model=model, sparse_method="snapkv", kv_budget=0.5, sparse_config={"window": 8}
    )
    sparse = resolve(config).sparse
    assert (sparse.method, sparse.ratio, dict(sparse.knobs)) == ("snapkv", 0.5, {"window": 8})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": 1025}, "max_model_len=1025 is above the model's limit of 1024"),
        ({"sparse_method": "snapvk"}, "'snapvk'.*'snapkv'"),
        ({"enable_methods": "full,qest"}, "'qest'.*'quest'"),
        ({"sparse_method": "snapkv", "sparse_config": {"windw": 1}}, "'windw'.*'window'"),
        ({"sparse_method": "snapkv", "sparse_config": {"window": 0}}, "window=0"),
        ({"kv_budget": 0.5}, "budget|ratio"),
        ({"attention_backend": "tritn"}, "'tritn'.*'triton'"),
    ],
)
def test_what_is_wrong_is_named(model, given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config_from_kwargs(model=model, **given))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named(model) -> None:
    with pytest.raises(ConfigError, match=r"device='cuda'.*no CUDA device"):
        resolve(config_from_kwargs(model=model, device="cuda"))


def test_no_model_is_named() -> None:
    with pytest.raises(ConfigError, match="--model"):
        resolve(EngineConfig())


def test_a_backend_that_cannot_run_gives_its_reasons(model) -> None:
    if torch.cuda.is_available():
        config = config_from_kwargs(model=model, attention_backend="cpu", device="cuda")
    else:
        config = config_from_kwargs(model=model, attention_backend="triton", device="cpu")
    with pytest.raises(UnsupportedError) as caught:
        resolve(config)
    assert caught.value.reasons
    assert all(reason in str(caught.value) for reason in caught.value.reasons)


def test_a_method_that_the_model_cannot_carry_gives_its_reasons(model, monkeypatch) -> None:
    latent = LayerSpec(kind=LayerKind.LATENT, q_heads=4, kv_heads=1, head_dim=16, value_dim=12)

    def all_latent(hf_config, dtype) -> ModelSpec:
        return ModelSpec(
            layers=(latent, latent), vocab_size=10, hidden_size=8, max_position=64, dtype=dtype
        )

    monkeypatch.setattr(resolving, "model_spec", all_latent)
    with pytest.raises(UnsupportedError) as caught:
        resolve(config_from_kwargs(model=model, sparse_method="adakv"))
    assert "adakv" in str(caught.value)
    assert caught.value.reasons


def test_explain_is_json_and_complete(model) -> None:
    config = config_from_kwargs(
        model=model, sparse_method="snapkv", kv_budget=64, enable_methods="quest"
    )
    data = explain(resolve(config), prompt_len=500, max_tokens=20)
    json.dumps(data, allow_nan=False)
    assert [m["name"] for m in data["methods"]] == ["snapkv", "quest"]
    demand = data["methods"][0]["demand"]
    assert (demand["prompt_tokens"], demand["budget_tokens"]) == (500, 64)
    assert demand["steady_tokens"] < demand["peak_tokens"]
    assert data["values"]["sparse.budget"]["value"] == 64
    assert sum(len(r["layers"]) for r in data["routes"]) == 3
