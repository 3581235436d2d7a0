"""Calibration: what the calibrators find, the files, the command, and models that do not match."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.driver import Driver, make
from contract.reads import drive, mark, random_layer, spec_of
from contract.toy import VOCAB, Toy, toy_spec
from fixtures.engines import save_checkpoint
from fixtures.tiny_latent import save_latent
from sparseengine.cli.main import main
from sparseengine.config import config_from_kwargs
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.specs import ModelSpec
from sparseengine.errors import ConfigError, RequestError
from sparseengine.llm import LLM
from sparseengine.methods import METHODS
from sparseengine.methods.calibration import CALIBRATORS, Reading, write_calibration
from sparseengine.methods.calibrators.filters import fewest_lost, loss
from sparseengine.weights.fingerprint import fingerprint
from sparseengine.weights.source import open_model

METHODS_WITH = ["omnikv", "duo_attention", "expected_attention", "double_sparsity"]
PRINT = "0123456789abcdef-fedcba9876543210"
PAGE = 4


def known(spec: ModelSpec, fingerprint_: str = PRINT) -> ModelSpec:
    return replace(spec, fingerprint=fingerprint_)


def watched(
    name: str, spec: ModelSpec, layer: tuple[Tensor, Tensor, Tensor], budget: int = 32, **knobs: Any
) -> dict[str, Any]:
    """What a calibrator says of one layer's q, k, v, seen in chunks of uneven sizes."""
    length = len(layer[0])
    settings = METHODS.get(name).config_class.from_knobs(name, knobs)
    reading = Reading(length=length, budget=budget, settings=settings)
    calibrator = CALIBRATORS.get(name)(reading, spec)
    cuts = [0, length // 3, length // 3 + 7, length]
    drive(calibrator, *layer, [b - a for a, b in itertools.pairwise(cuts)], None, 0, attend=False)
    return calibrator.result()[0]


def save(path: Path, name: str, spec: ModelSpec, data: Any) -> str:
    write_calibration(path, name, "a model", spec, {}, data)
    return str(path)


# ── what they find ───────────────────────────────────────────────────────────────────────────────


def test_a_planted_retrieval_head_is_found(tmp_path: Path) -> None:
    """KV head 1 looks up the repeated token's first place, head 0 the newest tokens."""
    length, dim = 256, 16
    spec = known(spec_of(4, 2, dim))
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(length, h, dim, generator=rng) * 0.1 for h in (4, 2, 2))
    names = torch.nn.functional.normalize(torch.randn(length, dim, generator=rng), dim=-1)
    first = torch.arange(length) % 192
    k[:, 1] = names
    q[:, 2:] = 40 * names[first][:, None]  # head 1: the same text, in the first quarter
    turn = torch.arange(length)[:, None] * torch.tensor([0.02])
    place = torch.cat((turn.cos(), turn.sin()), -1)
    k[:, 0, :2], q[:, :2, :2] = 20 * place, 20 * place[:, None]  # head 0: the nearest places
    (gates,) = watched("duo_attention", spec, (q, k, v), budget=64, sink=4)["gates"]
    assert gates[1] > 5 * gates[0]
    path = save(tmp_path / "c.json", "duo_attention", spec, {"gates": [gates]})
    assert make(spec, "duo_attention", calibration=path).streaming == {0: {0}}


HEAD_CHANNELS = ([3, 5, 7, 9, 11, 13, 17, 19], [2, 4, 6, 8, 33, 35, 37, 39])


def _structured(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys differ in 8 channels, others in each head; the slowest pairs are large but constant."""
    rng = torch.Generator().manual_seed(seed)
    k = 0.05 * torch.randn(length, 2, 64, generator=rng)
    k[..., [28, 29, 30, 31, 60, 61, 62, 63]] += 5.0
    for head, channels in enumerate(HEAD_CHANNELS):
        k[:, head, channels] += torch.randn(length, 8, generator=rng)
    q = torch.randn(length, 4, 64, generator=rng)
    return mark(q, k), k


def test_calibrated_channels_recall_more_top_tokens_than_the_default(tmp_path: Path) -> None:
    length, budget = 512, 64
    spec = known(spec_of(4, 2, 64))
    q, k = _structured(length, 7)
    data = watched("double_sparsity", spec, (q, k, k), group_factor=8)
    for head, channels in enumerate(HEAD_CHANNELS):
        assert set(data["channels"][0][head][:8]) == set(channels)
    path = save(tmp_path / "c.json", "double_sparsity", spec, data)

    def recall(**knobs: Any) -> float:
        q, k = _structured(length + 1, 8)
        method = make(
            spec, "double_sparsity", PAGE, dense_layers=0, sink=0, group_factor=8, **knobs
        )
        rows = drive(method, q, k, k, [length, 1], budget, 1, attend=False).reads[-1]
        hits = 0
        for head, row in enumerate(rows):
            scores = (q[length, 2 * head : 2 * head + 2] @ k[:length, head].T).softmax(-1).amax(0)
            hits += len(set(row) & set(scores.topk(32).indices.tolist()))
        return hits / 64

    assert recall(calibration=path) > 0.9
    assert recall() < 0.5


@pytest.mark.parametrize("beside", [[], ["snapkv"], ["pyramidkv"]])
def test_labels_are_of_the_layer_and_head_that_a_page_holds(
    tmp_path: Path, beside: list[str]
) -> None:
    """Alone a page holds all layers and heads, beside evictions one head: the same is chosen."""
    toy = Toy("fwf")
    spec = toy.spec = known(toy_spec("fwf"))
    rng = random.Random(2)
    order = [[rng.sample(range(8), 8) for _ in range(2)] for _ in range(3)]
    path = save(tmp_path / "c.json", "double_sparsity", spec, {"channels": order})
    knobs = {"dense_layers": 0, "calibration": path}
    methods = {"double_sparsity": make(spec, "double_sparsity", **knobs)}
    methods |= {name: make(spec, name) for name in beside}
    driver = Driver(toy, methods)
    prompt = [rng.randrange(VOCAB) for _ in range(60)]
    request = driver.add(0, prompt, 4, "double_sparsity", 16)
    while request.num_generated < 4:
        driver.advance([request], 17)
    method = methods["double_sparsity"]
    for i in (0, 2):
        at = driver.cache.stored_step(i)
        keys, (table, _) = at.gather("keys", 0), at.table()
        labels = at.aux("labels")
        for head in range(2):
            group, unit = min(head, table.shape[1] - 1), min(head, labels.shape[1] - 1)
            found = labels[table[0, group, :15].long(), unit].flatten(0, 1)
            channels = sorted(order[i][head][: method._labels])
            assert torch.equal(found, keys[head, :60, channels])


def test_moments_of_the_same_text_retain_the_same(tmp_path: Path) -> None:
    """8 channels are fewer than the directions kept, so nothing but rounding is lost."""
    q, k, v = random_layer(200, 4, 2, seed=4)
    q[:, :, 1:] += torch.linspace(-1, 1, 7)
    spec = known(spec_of(4, 2))
    data = watched("expected_attention", spec, (q[:199], k[:199], v[:199]))
    path = save(tmp_path / "c.json", "expected_attention", spec, data)
    rows = [
        drive(make(spec, "expected_attention", **knobs), q, k, v, [100, 99, 1], 40, 1).reads[-1]
        for knobs in ({}, {"calibration": path})
    ]
    for a, b in zip(*rows, strict=True):
        assert len(set(a) & set(b)) >= 39
    method = make(spec, "expected_attention", calibration=path)
    assert method.aux() == ()


@pytest.mark.parametrize("seed", range(20))
def test_the_filters_are_those_of_least_loss(seed: int) -> None:
    rng = random.Random(seed)
    n, count = rng.randint(3, 9), rng.randint(1, 3)
    count = min(count, n - 1)
    latest = rng.randint(0, 2)
    lost = [[rng.random() for _ in range(n)] for _ in range(n)]
    ways = [
        (loss(lost, list(places)), list(places))
        for places in itertools.combinations(range(n - 1), count)
        if places[0] <= latest
    ]
    total, places = fewest_lost(lost, count, latest)
    assert total == pytest.approx(min(ways)[0])
    assert loss(lost, places) == pytest.approx(total)


# ── files that cannot be used ────────────────────────────────────────────────────────────────────


def _good(name: str) -> Any:
    spec = spec_of(4, 2)
    return watched(name, spec, random_layer(64), budget=8)


@pytest.mark.parametrize("name", METHODS_WITH)
def test_another_model_is_refused_and_both_are_named(tmp_path: Path, name: str) -> None:
    spec = spec_of(4, 2)
    path = save(tmp_path / "c.json", name, known(spec, "aaaa-bbbb"), _good(name))
    with pytest.raises(RequestError, match=rf"'a model' .*'aaaa-bbbb', this .* '{PRINT}'"):
        make(known(spec), name, calibration=path)
    with pytest.raises(RequestError, match="this model has fingerprint 'unknown'"):
        make(spec, name, calibration=path)
    make(known(spec, "aaaa-bbbb"), name, calibration=path)


@pytest.mark.parametrize("name", METHODS_WITH)
def test_other_versions_methods_and_damage_are_refused(tmp_path: Path, name: str) -> None:
    spec, file = known(spec_of(4, 2)), tmp_path / "c.json"
    save(file, name, spec, _good(name))
    whole = json.loads(file.read_text())
    other = METHODS_WITH[METHODS_WITH.index(name) - 1]
    cases = [
        ({"version": 9}, "has version 9, this release reads version 1"),
        ({"method": other}, f"is of method '{other}', not '{name}'"),
        ({"format": "x"}, "must be a whole file"),
        ({"model": 3}, "must be a whole file"),
        ({"data": {}}, "must be a whole file"),
        ({"data": dict.fromkeys(whole["data"], "x")}, "must be a whole file"),
        ({"data": {k: [[[0, 99]]] for k in whole["data"]}}, "must be a whole file"),
    ]
    for change, message in cases:
        file.write_text(json.dumps({**whole, **change}))
        with pytest.raises(RequestError, match=message):
            make(spec, name, calibration=str(file))
    file.write_text(json.dumps(whole)[:-30])
    with pytest.raises(RequestError, match="must be a whole file"):
        make(spec, name, calibration=str(file))
    with pytest.raises(RequestError, match="must be a whole file"):
        make(spec, name, calibration=str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("name", "knob", "value"),
    [
        ("omnikv", "filter_layers", [0]),
        ("duo_attention", "pattern", "p.json"),
        ("double_sparsity", "channels", [1, 2]),
    ],
)
def test_what_says_the_same_is_not_given_beside_it(name: str, knob: str, value: object) -> None:
    knobs = {knob: value, "calibration": "c.json"}
    if name == "double_sparsity":
        knobs["dense_layers"] = 0
    with pytest.raises(RequestError, match=f"{knob}=.* and a calibration say the same thing"):
        make(known(spec_of(4, 2)), name, **knobs)


# ── the command, on checkpoints ──────────────────────────────────────────────────────────────────

SMALL = ["--kv-cache-memory-bytes", "8MiB", "--max-num-batched-tokens", "48"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("calibration")
    return str(save_checkpoint(folder / "one")), str(save_checkpoint(folder / "two", seed=1))


@pytest.mark.parametrize("name", METHODS_WITH)
def test_a_calibrated_method_runs_on_its_model_alone(
    tmp_path: Path, models: tuple[str, str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "c.json")
    args = ["--method", name, "--output", file, "--input-len", "128", "--num-texts", "2", *SMALL]
    assert main(["calibrate", models[0], *args]) == 0
    report = json.loads(capsys.readouterr().out)
    written = json.loads(Path(file).read_text())
    assert written["model"]["fingerprint"] == report["fingerprint"]
    assert main(["calibrate", models[0], *args]) == 0
    capsys.readouterr()
    assert json.loads(Path(file).read_text()) == written, "the same run gives the same file"
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    sparse = SparseParams(name, budget=24, calibration=file)
    engine = {"kv_cache_memory_bytes": "8MiB", "enable_methods": [name], "quiet": True}
    if name == "expected_attention":  # no moments of the prompt are gathered, so it may differ
        engine |= {"sparse_method": name}
    with LLM(models[0], **engine) as llm:
        (output,) = llm.generate([list(range(3, 93))], greedy, sparse, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    with LLM(models[1], **engine) as llm, pytest.raises(RequestError) as caught:
        llm.generate([list(range(3, 93))], greedy, sparse, use_tqdm=False)
    assert report["fingerprint"] in str(caught.value)
    assert llm.resolved.spec.fingerprint in str(caught.value)


def test_bad_input_of_the_command(
    tmp_path: Path, models: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*args: str) -> str:
        capsys.readouterr()
        assert main(["calibrate", models[0], *SMALL, *args]) == 2
        return capsys.readouterr().err

    out = ["--output", str(tmp_path / "c.json")]
    assert "'snapkv' needs no calibration; those that take one are" in said(
        "--method", "snapkv", *out
    )
    assert "unknown sparse method 'omnikw'" in said("--method", "omnikw", *out)
    assert "is no folder" in said("--method", "omnikv", "--output", str(tmp_path / "no" / "c"))
    assert "32 or more" in said("--method", "omnikv", *out, "--input-len", "8")
    assert "max_model_len=1024" in said("--method", "omnikv", *out, "--input-len", "4096")
    assert "at most half" in said("--method", "omnikv", *out, "--input-len", "64", "--budget", "40")
    knobs = '{"sinks": 3}'
    assert "unknown knob 'sinks'" in said("--method", "omnikv", *out, "--sparse-config", knobs)
    assert not (tmp_path / "c.json").exists()


def _print(model: str, **engine_args: Any) -> str:
    return fingerprint(open_model(config_from_kwargs(model=model, **engine_args).model))


def test_fingerprints_tell_models_apart_and_copies_not(
    tmp_path: Path, models: tuple[str, str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(models[0], copy)
    first = _print(models[0])
    assert _print(str(copy)) == first
    assert _print(str(copy), hf_overrides={"max_position_embeddings": 2048}) == first
    config, weights = first.split("-")
    other = _print(models[1]).split("-")
    assert other[0] == config
    assert other[1] != weights
    assert _print(str(copy), hf_overrides={"rms_norm_eps": 0.5}).split("-")[0] != config
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert _print(str(copy)) != first
    dummies = [_print("", load_format="dummy", hf_config=models[0], seed=s) for s in (0, 0, 1)]
    assert dummies[0] == dummies[1] != dummies[2]
    file.unlink()
    source = open_model(config_from_kwargs(model=models[0]).model)
    with pytest.raises(ConfigError, match="cannot read"):
        fingerprint(replace(source, shards=(file,)))


def test_latent_layers_are_calibrated_where_a_method_acts_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without a tokenizer reads random tokens; one without heads has none to tell apart."""
    shape = str(save_latent(tmp_path / "mla", "deepseek_v2"))
    model = ["--load-format", "dummy", "--hf-config", shape]
    args = ["--input-len", "64", "--num-texts", "1", "--sparse-config", '{"dense_layers": 0}']
    out = tmp_path / "c.json"
    args += ["--method", "double_sparsity", "--output", str(out)]
    assert main(["calibrate", *model, *args, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == "random tokens"
    knobs = {"dense_layers": 0, "calibration": str(out)}
    engine = {"sparse_method": "double_sparsity", "sparse_config": knobs, "kv_budget": 16}
    with LLM(
        load_format="dummy", hf_config=shape, **engine, kv_cache_memory_bytes="8MiB", quiet=True
    ) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([list(range(3, 73))], greedy, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    for name in ("duo_attention", "expected_attention"):
        refused = tmp_path / f"{name}.json"
        assert main(["calibrate", *model, "--method", name, "--output", str(refused), *SMALL]) == 2
        assert "acts on layers of kind FULL" in capsys.readouterr().err
        assert not refused.exists()
