"""Config: sources and priority, names, values, files, digests, and the environment reader."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from sparseengine import env
from sparseengine.config import (
    BY_PATH,
    SECTIONS,
    EngineConfig,
    collect,
    config_from_kwargs,
    origins_of,
)
from sparseengine.errors import ConfigError
from sparseengine.provenance import Affects, Source, read_budget, read_size


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_every_field_has_a_row_in_the_table():
    sections = {name: type(getattr(EngineConfig(), name)) for name in SECTIONS}
    paths = {f"{name}.{f.name}" for name, section in sections.items() for f in fields(section)}
    assert paths - set(BY_PATH) == {"sparse.ratio"}  # --kv-budget with a point


def test_defaults_equal_the_dataclasses():
    assert collect() == EngineConfig()
    assert all(v.source is Source.DEFAULT for v in collect().origins.values())


def test_vllm_names_arrive_where_they_belong():
    config = config_from_kwargs(
        model="m",
        max_model_len="12K",
        max_num_seqs=7,
        kv_cache_memory_bytes="2GiB",
        enable_methods=["full", "snapkv"],
        sparse_config={"window": 8},
        hf_overrides='{"rope_theta": 1.0}',
        enforce_eager=True,
        method="snapkv",
    )
    assert config.model.model == "m"
    assert config.model.max_model_len == 12288
    assert config.scheduler.max_num_seqs == 7
    assert config.cache.kv_cache_memory_bytes == 2 << 30
    assert config.sparse.enable_methods == ("full", "snapkv")
    assert config.sparse.knobs == {"window": 8}
    assert config.model.hf_overrides == {"rope_theta": 1.0}
    assert config.runtime.enforce_eager is True
    assert config.sparse.method == "snapkv"


@pytest.mark.parametrize(
    ("given", "budget", "ratio"),
    [
        (512, 512, None),
        ("512", 512, None),
        ("2K", 2048, None),
        (1, 1, None),
        (0.25, None, 0.25),
        ("0.25", None, 0.25),
        (".5", None, 0.5),
        ("1.0", None, 1.0),
    ],
)
def test_an_integer_budget_is_tokens_and_one_with_a_point_a_ratio(given, budget, ratio):
    sparse = config_from_kwargs(kv_budget=given).sparse
    assert (sparse.budget, sparse.ratio) == (budget, ratio)


@pytest.mark.parametrize("bad", [0, -1, "0", 1.5, "1.5", 0.0, float("nan"), "many", True])
def test_impossible_budgets_are_refused_with_the_knob(bad):
    with pytest.raises(ConfigError, match=r"kv_budget: .*kept fraction in \(0, 1\]"):
        config_from_kwargs(kv_budget=bad)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_modle_len": 1}, "unknown engine argument 'max_modle_len'.*'max_model_len'"),
        ({"dtype": "float64"}, "dtype: 'float64' is not allowed.*float32, bfloat16"),
        ({"block_size": 12}, "block_size: 12 is not allowed.*power of two"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not allowed.*1 or more"),
        ({"seed": 1.5}, "seed: 1.5 is not allowed.*integer"),
        ({"seed": True}, "seed: True is not allowed.*integer"),
        ({"gpu_memory_utilization": 1.2}, r"in \(0, 1\]"),
        ({"gpu_memory_utilization": float("nan")}, "finite"),
        ({"hf_overrides": "{"}, "JSON object"),
        ({"hf_overrides": [1]}, "JSON object"),
        ({"enable_methods": 3}, "list of names"),
        ({"enforce_eager": "maybe"}, "true or false"),
        ({"max_model_len": "12Q"}, "such as '4096', '12K'"),
        ({"device": "tpu"}, "auto, cpu, cuda"),
        ({"model": "a", "model_path": "b"}, "set the same value"),
    ],
)
def test_wrong_values_name_the_value_and_what_is_possible(given, message):
    with pytest.raises(ConfigError, match=message):
        config_from_kwargs(**given)


def test_stronger_sources_win_and_losers_are_kept(tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("device: cuda\nmax-num-seqs: 3\n")
    monkeypatch.setenv("SPARSEENGINE_DEVICE", "auto")
    config = collect(cli={"device": "cpu"}, file=file)
    value = config.origins["runtime.device"]
    assert (value.value, value.source, value.origin) == ("cpu", Source.CLI, "--device")
    assert [g.source for g in value.shadowed] == [Source.FILE, Source.ENV, Source.DEFAULT]
    assert str(file) in value.shadowed[0].origin
    assert value.shadowed[1].origin == "SPARSEENGINE_DEVICE"
    assert config.origins["scheduler.max_num_seqs"].source is Source.FILE
    assert "over 'cuda'" in str(value)


def test_the_environment_is_below_the_file_and_above_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEENGINE_DEVICE", "cpu")
    assert collect().runtime.device == "cpu"
    assert config_from_kwargs(device="auto").runtime.device == "auto"
    monkeypatch.setenv("SPARSEENGINE_DEVICE", "")
    assert collect().origins["runtime.device"].source is Source.DEFAULT


def test_a_wrong_value_is_reported_even_if_it_would_lose(monkeypatch):
    monkeypatch.setenv("SPARSEENGINE_DEVICE", "abacus")
    with pytest.raises(ConfigError, match="SPARSEENGINE_DEVICE: 'abacus'"):
        config_from_kwargs(device="cpu")


@pytest.mark.parametrize("as_json", [False, True])
def test_files_take_sections_and_flag_names(tmp_path, as_json):
    data = {
        "model": {"model": "m", "max_model_len": "4K"},
        "cache": {"block-size": 32},
        "max-num-seqs": 5,
        "sparse": {"method": "quest", "ratio": 0.5, "knobs": {"a": 1}},
    }
    file = tmp_path / "c.yaml"
    text = (
        json.dumps(data)
        if as_json
        else (
            "model:\n  model: m\n  max_model_len: 4K\ncache:\n  block-size: 32\nmax-num-seqs: 5\n"
            "sparse:\n  method: quest\n  ratio: 0.5\n  knobs: {a: 1}\n"
        )
    )
    file.write_text(text)
    config = collect(file=file)
    assert (config.model.model, config.model.max_model_len) == ("m", 4096)
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 5)
    assert (config.sparse.method, config.sparse.ratio) == ("quest", 0.5)
    assert config.sparse.knobs == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache: {blok_size: 3}", "unknown key 'blok_size' in section cache.*'block_size'"),
        ("modl: x", "unknown key in .*'modl'.*'model'"),
        ("- a\n- b", "must hold names and values"),
        ("a: [", "not YAML or JSON"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        collect(file=file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        collect(file=tmp_path / "none.yaml")


def test_configs_built_by_hand_count_as_api():
    from sparseengine.config import SchedulerConfig, SparseConfig

    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=4), sparse=SparseConfig(ratio=0.5))
    origins = origins_of(config)
    assert origins["scheduler.max_num_seqs"].source is Source.API
    assert origins["sparse.budget"].value == 0.5
    assert origins["scheduler.mix"].source is Source.DEFAULT


def test_digests_change_with_what_they_stand_for():
    plain = config_from_kwargs(model="m")
    assert plain.digest(Affects.LAYOUT) == config_from_kwargs(model="m").digest(Affects.LAYOUT)
    for kind, change in (
        (Affects.LAYOUT, {"block_size": 32}),
        (Affects.NUMERICS, {"attention_backend": "reference"}),
    ):
        changed = config_from_kwargs(model="m", **change)
        assert changed.digest(kind) != plain.digest(kind)
        assert changed.digest(Affects.GRAPH) == plain.digest(Affects.GRAPH)


def test_sizes():
    assert [read_size(t) for t in ("12k", "12K", "1.5K", "2GiB", "3M", 7)] == [
        12_000,
        12_288,
        1536,
        2 << 30,
        3 << 20,
        7,
    ]
    assert read_budget("1e-1") == 0.1
    with pytest.raises(ValueError, match="whole"):
        read_size("0.3K")


def test_misspelt_variables_are_reported_with_the_nearest(monkeypatch):
    monkeypatch.setenv("SPARSEENGINE_DEVISE", "cpu")
    with pytest.warns(UserWarning, match="SPARSEENGINE_DEVISE.*'SPARSEENGINE_DEVICE'"):
        collect()


def test_at_most_twelve_variables_and_each_sets_a_parameter():
    assert len(env.VARIABLES) <= 12
    assert all(v.path is None or v.path in BY_PATH for v in env.VARIABLES)


def test_cache_dir_follows_its_variable_then_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert env.cache_dir() == tmp_path / "x" / "sparseengine"
    monkeypatch.setenv("SPARSEENGINE_CACHE_DIR", str(tmp_path / "own"))
    assert env.cache_dir() == tmp_path / "own"
