"""Sparse prefill where a user meets it: Python, resolution, benchmark and evaluation flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import save_checkpoint
from fixtures.tiny_latent import save_latent
from sparseengine.bench.options import add_bench_arguments, engines_of
from sparseengine.cli.main import main
from sparseengine.config import collect, config_from_kwargs
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.fit import planned_table
from sparseengine.errors import ConfigError, RequestError, UnsupportedError
from sparseengine.evals.options import add_eval_arguments, cases_of
from sparseengine.llm import LLM
from sparseengine.provenance import Source
from sparseengine.resolve import explain, resolve

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SMALL: dict[str, Any] = {"block": 16, "min_tokens": 64, "last": 8}
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 8 << 20,
    "quiet": True,
}
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, enable_methods="full,snapkv,quest", **OPTIONS) as made:
        yield made


def test_any_request_may_name_a_pattern(llm: LLM) -> None:
    asked = [
        SparseParams(),
        SparseParams(prefill="a_shape", record=True,
                     prefill_config={**SMALL, "sink": 16, "window": 16}),
        SparseParams("snapkv", budget=40, prefill="xattention", record=True,
                     prefill_config={**SMALL, "threshold": 0.3}),
        SparseParams("quest", prefill="minference", prefill_config={**SMALL, "vertical": 16,
                                                                    "slash": 16}),
        SparseParams(prefill="flexprefill", prefill_config={**SMALL, "gamma": 1.0}),
    ]  # fmt: skip
    outputs = [o.outputs[0] for o in llm.generate([PROMPT] * 5, GREEDY, asked, use_tqdm=False)]
    assert outputs[4].token_ids == outputs[0].token_ids
    for output, want in zip(outputs[1:3], asked[1:3], strict=True):
        assert output.sparse is not None
        assert output.sparse.prefill == want.prefill
        assert output.sparse.prefill_density is not None
        assert 0 < output.sparse.prefill_density < 0.9
        json.dumps(output.sparse.to_dict(), allow_nan=False)
    alone = llm.generate(PROMPT, GREEDY, asked[2], use_tqdm=False)[0].outputs[0]
    assert alone.token_ids == outputs[2].token_ids
    assert alone.sparse == outputs[2].sparse


def test_wrong_requests_are_refused_and_the_engine_serves_on(llm: LLM) -> None:
    wrong = [
        ({"prefill": "xatention"}, "unknown prefill pattern 'xatention'.*'xattention'"),
        ({"prefill": ""}, "prefill='' is not allowed"),
        ({"prefill": "a_shape", "prefill_config": [1]}, "prefill_config"),
        ({"prefill": "a_shape", "prefill_config": {"sinks": 1}}, "unknown knob 'sinks'.*'sink'"),
        ({"prefill": "a_shape", "prefill_config": {"sink": -1}}, "sink=-1 is not allowed"),
    ]
    for params, message in wrong:
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPT, GREEDY, SparseParams(**params), use_tqdm=False)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_the_default_pattern_applies_to_requests_that_give_no_params(model: str, llm: LLM) -> None:
    config = {**SMALL, "sink": 16, "window": 16}
    with LLM(model, sparse_prefill="a_shape", sparse_prefill_config=config, **OPTIONS) as made:
        by_default = made.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0]
        dense = made.generate(PROMPT, GREEDY, SparseParams(), use_tqdm=False)[0].outputs[0]
        data = made.explain()
    named = SparseParams(prefill="a_shape", prefill_config=config)
    want = llm.generate([PROMPT, PROMPT], GREEDY, [named, SparseParams()], use_tqdm=False)
    assert by_default.token_ids == want[0].outputs[0].token_ids
    assert dense.token_ids == want[1].outputs[0].token_ids
    assert data["prefill"]["name"] == "a_shape"
    assert data["prefill"]["config"]["window"] == 16
    assert data["prefill"]["traits"]["invariant"] == "always"
    assert data["prefill"]["possible"] == "yes"


def test_values_have_a_source(model: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {model}\nsparse: {{prefill: a_shape, prefill_knobs: {{sink: 64}}}}\n")
    config = collect(cli={"sparse_prefill": "minference"}, file=file)
    origin = config.origins["sparse.prefill"]
    assert (origin.value, origin.source) == ("minference", Source.CLI)
    assert origin.shadowed[0].value == "a_shape"
    with pytest.raises(
        ConfigError, match="--sparse-prefill-config: minference: unknown knob 'sink'"
    ):
        resolve(config)
    assert explain(resolve(collect(file=file)))["prefill"]["config"]["sink"] == 64


def test_engines_that_cannot_say_why(model: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="deterministic: reads all keys"):
        resolve(config_from_kwargs(model=model, deterministic=True, sparse_prefill="a_shape"))
    with LLM(model, deterministic=True, **OPTIONS) as made:
        assert "no sparse prefill" in made.explain()["prefill"]["possible"]
        with pytest.raises(RequestError, match=r"prefill='a_shape' is not possible: .*determin"):
            made.generate(PROMPT, GREEDY, SparseParams(prefill="a_shape"), use_tqdm=False)
        assert made.generate(PROMPT, GREEDY, SparseParams(), use_tqdm=False)
    latent = str(save_latent(tmp_path, "glm4_moe_lite"))
    with pytest.raises(UnsupportedError, match="kind FULL; the model has LATENT layers only"):
        resolve(config_from_kwargs(model=latent, sparse_prefill="a_shape"))


def test_models_with_windows_act_in_their_full_layers(tmp_path: Path) -> None:
    folder = str(save_checkpoint(tmp_path, "gemma3"))
    with LLM(folder, enable_methods="full,snapkv", **OPTIONS) as made:
        asked = [SparseParams("snapkv", budget=60)]
        for window in (1 << 20, 16):
            config = {**SMALL, "sink": 16, "window": window}
            asked.append(
                SparseParams("snapkv", budget=60, prefill="a_shape", prefill_config=config,
                             record=True)
            )  # fmt: skip
        outputs = [o.outputs[0] for o in made.generate([PROMPT] * 3, GREEDY, asked, use_tqdm=False)]
        kinds = [spec.kind.name for spec in made.resolved.spec.layers]
    assert {"FULL", "WINDOW"} <= set(kinds)
    assert outputs[1].token_ids == outputs[0].token_ids
    for output, whole in zip(outputs[1:], (True, False), strict=True):
        assert output.sparse is not None
        assert (output.sparse.prefill_density == 1.0) == whole


def test_benchmarks_compare_with_dense_prefill(model: str) -> None:
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    flags = [model, "--sparse-prefill", "a_shape", "--sparse-prefill-config", '{"window": 64}']

    def labels(*more: str) -> dict[str, str]:
        args = parser.parse_args([*flags, *more])
        return {label: config.sparse.prefill for label, config in engines_of(args, 64)}

    assert labels() == {"full": "dense", "full+a_shape": "a_shape"}
    assert labels("--methods", "snapkv") == {
        "full": "dense", "full+a_shape": "a_shape", "snapkv+a_shape": "a_shape",
    }  # fmt: skip
    args = parser.parse_args([model, "--methods", "snapkv"])
    assert [label for label, _ in engines_of(args, 64)] == ["full", "snapkv"]


def test_the_benchmark_runs_both(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps({**SMALL, "sink": 16, "window": 16})
    shape = ["--input-len", "150", "--output-len", "8", "--max-num-batched-tokens", "64"]
    flags = ["--sparse-prefill", "a_shape", "--sparse-prefill-config", config]
    assert main(["bench", "throughput", model, *shape, *flags, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "prefill vs dense" in out
    rows = json.loads(out.strip().splitlines()[-1])["rows"]
    assert [row["method"] for row in rows] == ["full", "full+a_shape"]
    assert rows[0]["prefill_vs_dense"] == 1.0
    assert rows[1]["prefill_vs_dense"] > 0


def test_evaluations_keep_what_they_compare_with_dense() -> None:
    parser = argparse.ArgumentParser()
    add_eval_arguments(parser)
    flags = ["--sparse-prefill", "xattention", "--sparse-prefill-config", '{"stride": 16}']
    cases = cases_of(parser.parse_args(["m", "--methods", "snapkv", *flags]))
    plain = [case.name for case in cases if case.prefill == "dense"]
    assert plain[0] == "full"
    assert "snapkv" not in plain
    assert [case.name for case in cases][-2:] == ["full+xattention", "snapkv+xattention"]
    params = cases[-1].params(record=True)
    assert (params.prefill, dict(params.prefill_config)) == ("xattention", {"stride": 16})
    assert cases[-1].label == "snapkv+xattention 0.25"
    without = [case.name for case in cases_of(parser.parse_args(["m", "--methods", "snapkv"]))]
    assert without == [*plain, "snapkv"]


def test_the_memory_plan_counts_what_choosing_takes() -> None:
    def activations(**given: Any) -> int:
        options = {"load_format": "dummy", "hf_config": "qwen3-8b", "max_num_batched_tokens": 8192}
        resolved = resolve(config_from_kwargs(model="", device="cpu", **options, **given))
        table = planned_table(
            resolved, memory_bytes=150 * 10**9, prompt_tokens=40_000, output_tokens=100
        )
        return table.activations

    dense = activations()
    lines, shape = activations(sparse_prefill="minference"), activations(sparse_prefill="a_shape")
    keys = 40_000 * 8 * 128 * 4
    assert dense < shape < dense + (1 << 20)
    assert dense + keys < lines < dense + (2 << 30)
    short = {"min_tokens": 50_000}
    assert activations(sparse_prefill="minference", sparse_prefill_config=short) == dense
