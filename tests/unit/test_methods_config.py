"""Knobs, budgets, registry and refusals of methods."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sparseengine.cli.methods import detail
from sparseengine.core.method import SparseMethod
from sparseengine.core.params import SparseParams
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec, Ragged
from sparseengine.errors import ConfigError, RequestError, UnsupportedError
from sparseengine.methods import (
    METHODS,
    check_model,
    check_storage,
    describe_methods,
    make_method,
    resolve_budget,
)

FULL = LayerSpec(kind=LayerKind.FULL, q_heads=4, kv_heads=2, head_dim=8, value_dim=8)
WINDOW = LayerSpec(kind=LayerKind.WINDOW, q_heads=4, kv_heads=2, head_dim=8, value_dim=8, window=16)


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(layers=layers, vocab_size=8, hidden_size=8, max_position=1 << 20)


FOUR = model(*[FULL] * 4)


def test_names_and_aliases() -> None:
    assert METHODS.canonical("dense") == METHODS.canonical("vanilla") == "full"
    for name in METHODS:
        assert METHODS.get(name).name == name
    with pytest.raises(ConfigError, match="did you mean 'snapkv'"):
        make_method("snap_kv", {}, FOUR)


@pytest.mark.parametrize("name", list(METHODS))
def test_an_unknown_knob_names_the_nearest(name: str) -> None:
    with pytest.raises(RequestError, match="unknown knob 'no_such'"):
        make_method(name, {"no_such": 1}, FOUR)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("snapkv", {"windw": 8}, "did you mean 'window'"),
        ("full", {"window": 8}, "it takes none"),
        ("snapkv", {"window": 0}, r"window=0 is not allowed; it must be an integer in \[1, 1024\]"),
        ("snapkv", {"window": 8.0}, "window=8.0"),
        ("snapkv", {"window": True}, "window=True"),
        ("snapkv", {"window": "8"}, "window='8'"),
        ("snapkv", {"kernel": 4}, "must be odd"),
        ("snapkv", {"pooling": "median"}, "one of 'max', 'avg'"),
        ("snapkv", {"preset": "kvpres"}, "did you mean 'kvpress'"),
        ("adakv", {"alpha": 1.5}, r"a number in \[0.0, 1.0\]"),
        ("adakv", {"alpha": float("nan")}, "alpha=nan"),
        ("adakv", {"scorer": "snapk"}, "scorer='snapk' is not allowed"),
        ("adakv", {"scorer": "quest"}, "does not score tokens"),
        ("adakv", {"scorer": "adakv"}, "does not score tokens"),
        ("adakv", {"scorer": 3}, "scorer=3"),
        ("adakv", {"scorer": "knorm", "window": 8}, "adakv with scorer=knorm: unknown knob"),
        ("streaming_llm", {"page_aligned": 1}, "True or False"),
        ("knorm", {"skip_layers": [0, -1]}, "skip_layers"),
        ("knorm", {"skip_layers": 3}, "a list of integers"),
        ("quest", {"min_pages": 0}, "min_pages=0"),
        ("snapkv", {"block_tokens": 31}, "at least window=32"),
        ("pyramidkv", {"block_tokens": 64}, "it must be 0"),
    ],
)
def test_bad_knobs_say_what_is_allowed(name: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_method(name, knobs, FOUR)


def test_knobs_from_json_become_what_the_config_holds() -> None:
    method = make_method("knorm", json.loads('{"skip_layers": [3], "recent": 7}'), FOUR)
    assert method.config.skip_layers == (3,)
    assert method.config.recent == 7
    assert make_method("adakv", {"alpha": 1}, FOUR).config.alpha == 1.0


@pytest.mark.parametrize("name", list(METHODS))
def test_every_preset_of_every_method_is_shown_and_can_be_had(name: str) -> None:
    (row,) = [r for r in describe_methods() if r["name"] == name]
    presets = METHODS.get(name).config_class.presets
    assert row["presets"] == {k: dict(v) for k, v in presets.items()}
    for preset, knobs in presets.items():
        config = METHODS.get(name).config_class.from_knobs(name, {"preset": preset})
        assert {k: getattr(config, k) for k in knobs} == dict(knobs)
        assert preset in detail(row)
    with pytest.raises(RequestError, match="unknown preset 'papers'") as error:
        make_method(name, {"preset": "papers"}, FOUR)
    assert all(repr(preset) in str(error.value) for preset in presets)


def test_presets_of_adakv_are_its_own_and_its_scorers() -> None:
    config = make_method("adakv", {"preset": "kvpress", "alpha": 0.5}, FOUR).config
    assert (config.alpha, config.form) == (0.5, "floor")
    assert (config.scorer_config.window, config.scorer_config.sink) == (64, 0)
    for wrong in (["kvpress"], 3, None):
        with pytest.raises(RequestError, match="unknown preset"):
            make_method("adakv", {"preset": wrong}, FOUR)
    config = make_method("adakv", {"preset": "longbench"}, FOUR).config
    assert (config.alpha, config.scorer_config.kernel) == (0.2, 7)


def test_presets_load_published_settings_and_knobs_win() -> None:
    config = make_method("snapkv", {"preset": "kvpress", "window": 16}, FOUR).config
    assert (config.window, config.kernel, config.pooling, config.sink) == (16, 5, "avg", 0)


@pytest.mark.parametrize(
    ("name", "given", "prompt_len", "budget"),
    [
        ("full", {}, 100, None),
        ("snapkv", {"budget": 7}, 100, 7),
        ("snapkv", {"ratio": 0.1}, 999, 99),
        ("snapkv", {"ratio": 0.001}, 10, 1),
        ("snapkv", {"ratio": 1}, 10, 10),
        ("snapkv", {}, 1000, 250),
        ("quest", {}, 9000, 1024),
        ("quest", {"ratio": 0.5}, 100, 50),
        ("streaming_llm", {}, 10, 1024),
    ],
)
def test_budgets_are_resolved_to_tokens(
    name: str, given: dict[str, Any], prompt_len: int, budget: int | None
) -> None:
    assert resolve_budget(METHODS.get(name), SparseParams(name, **given), prompt_len) == budget


@pytest.mark.parametrize("given", [{"budget": 5}, {"ratio": 0.5}])
def test_a_budget_for_dense_attention_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="not allowed with method 'full'"):
        resolve_budget(METHODS.get("full"), SparseParams("full", **given), 100)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_model_without_layers_to_act_on_is_refused(name: str) -> None:
    window_only = model(WINDOW, WINDOW)
    if name == "full":
        check_model(make_method(name, {}, window_only), window_only)
        return
    with pytest.raises(UnsupportedError, match="acts on layers of kind"):
        check_model(make_method(name, {}, window_only), window_only)


@pytest.mark.parametrize("name", ["knorm", "quest"])
def test_knobs_that_leave_every_layer_dense_are_refused(name: str) -> None:
    two = model(FULL, FULL)
    with pytest.raises(UnsupportedError, match="leave every layer of this model dense"):
        check_model(make_method(name, {}, two), two)


def test_a_running_cache_refuses_knobs_that_need_other_storage() -> None:
    started = make_method("snapkv", {}, FOUR).cache_plan()
    check_storage(make_method("snapkv", {"sink": 9}, FOUR), started)
    check_storage(make_method("full", {}, FOUR), started)
    check_storage(make_method("adakv", {}, FOUR), started)
    with pytest.raises(RequestError, match="window_queries_64"):
        check_storage(make_method("snapkv", {"window": 64}, FOUR), started)
    with pytest.raises(RequestError, match="rows per HEAD"):
        check_storage(make_method("knorm", {}, FOUR), make_method("full", {}, FOUR).cache_plan())


@pytest.mark.parametrize("name", list(METHODS))
def test_plans_cover_every_layer_and_leave_other_kinds_plain(name: str) -> None:
    recurrent = LayerSpec(kind=LayerKind.RECURRENT, state=((4,),))
    spec = model(WINDOW, FULL, recurrent, FULL, FULL)
    plan = make_method(name, {}, spec, page_size=8).cache_plan()
    assert sorted(i for g in plan for i in g.layers) == [0, 1, 3, 4]
    assert {g.page_size for g in plan} == {8}
    (window,) = (g for g in plan if 0 in g.layers)
    assert window.aux == ()
    assert window.ragged is Ragged.REQUEST


def demand(name: str, spec: ModelSpec, prompt: int, out: int, budget: int, **knobs: Any) -> Any:
    return make_method(name, knobs, spec).demand(prompt, out, budget)


def test_demand_is_what_a_row_takes_at_worst_and_in_decode() -> None:
    assert demand("full", FOUR, 1000, 10, 1) == (1010, 1010)
    assert demand("quest", FOUR, 1000, 10, 64) == (1010, 1010)
    assert demand("snapkv", FOUR, 1000, 10, 200) == (1000, 210)
    assert demand("snapkv", FOUR, 200, 10, 200) == (210, 210)
    assert demand("snapkv", FOUR, 201, 500, 200) == (700, 700), "decode is the worst moment"
    assert demand("adakv", FOUR, 1000, 10, 200) == (1000, 225), "a ragged row may waste a page"
    assert demand("keydiff", FOUR, 1000, 10, 200, block_tokens=64) == (264, 210)
    assert demand("streaming_llm", FOUR, 9000, 500, 256) == (1280, 257)
    assert demand("streaming_llm", FOUR, 9000, 500, 256, block_tokens=0) == (9000, 257)
    assert demand("streaming_llm", FOUR, 100, 20, 256) == (120, 120)


def test_demand_counts_layers_that_stay_dense() -> None:
    assert demand("knorm", FOUR, 1600, 0, 160) == (1600, (2 * 1600 + 2 * 160) // 4)
    half = model(FULL, WINDOW)
    assert demand("snapkv", half, 1600, 0, 160) == (1600, 160), "windows are the cache's business"


def test_descriptions_come_from_the_code_and_are_json() -> None:
    found = {entry["name"]: entry for entry in json.loads(json.dumps(describe_methods()))}
    assert set(found) == set(METHODS)
    assert found["full"]["aliases"] == ["dense", "vanilla"]
    assert found["snapkv"]["traits"]["query_aware"] is True
    assert found["snapkv"]["default"] == {"ratio": 0.25}
    assert found["quest"]["takes"] == "read"
    for entry in found.values():
        assert entry["summary"].endswith((".", "."))
        for knob in entry["knobs"]:
            assert knob["doc"]
            assert knob["allowed"]


@pytest.mark.parametrize("name", list(METHODS))
def test_documented_defaults_build(name: str) -> None:
    (entry,) = (e for e in describe_methods() if e["name"] == name)
    knobs = {k["name"]: k["default"] for k in entry["knobs"] if k["name"] != "preset"}
    method = make_method(name, knobs, FOUR)
    assert isinstance(method, SparseMethod)
    assert method.config == make_method(name, {}, FOUR).config


def test_random_numbers_are_even_and_differ_between_layers() -> None:
    from sparseengine.methods.random import hash_uniform

    values = torch.arange(100_000)
    numbers = hash_uniform(values, 7)
    assert torch.equal(numbers, hash_uniform(values, 7))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 50, 0, 1)
    assert counts.min() > 1800
    assert counts.max() < 2200
    other = hash_uniform(values, 8)
    correlation = torch.corrcoef(torch.stack([numbers, other]))[0, 1]
    assert abs(float(correlation)) < 0.02
