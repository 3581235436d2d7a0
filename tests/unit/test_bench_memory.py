"""Predicted bytes, held bytes, and how many requests really fit."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fixtures.engines import save_checkpoint
from sparseengine.bench.batch import make_prompts
from sparseengine.bench.capacity import overheads
from sparseengine.bench.memory import Line, held, measure
from sparseengine.bench.synthetic import fill, probe, randomise
from sparseengine.cli.main import main
from sparseengine.config import config_from_kwargs
from sparseengine.core.params import SamplingParams
from sparseengine.engine.fit import planned_table
from sparseengine.errors import ConfigError
from sparseengine.llm import LLM
from sparseengine.resolve import resolve
from sparseengine.weights.dummy import shape_names

KV_BYTES = 3 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("memory") / "model"))


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    status = main(["bench", *words])
    return status, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("method", ["full", "quest", "h2o"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_and_the_start_up_table_say_what_is_held(
    method: str, tied: bool, tmp_path: Path
) -> None:
    folder = str(save_checkpoint(tmp_path / "m", tie_word_embeddings=tied))
    args = {"sparse_method": method, "kv_cache_memory_bytes": KV_BYTES, "max_model_len": 200}
    with LLM(folder, quiet=True, **args) as llm:
        lines = {line.what: line for line in measure(llm, None)}
    resolved = resolve(config_from_kwargs(model=folder, **args))
    plan = planned_table(
        resolved,
        memory_bytes=resolved.caps.memory_bytes,
        prompt_tokens=150,
        output_tokens=50,
    )
    assert all(line.ok for line in lines.values()), lines
    for what, planned in (
        ("weights", plan.weights),
        ("KV pages", plan.kv_pages),
        ("side tensors", plan.side_tensors),
    ):
        actual = lines[what].actual
        assert actual is not None
        assert planned == pytest.approx(actual, rel=0.02)
    assert (lines["side tensors"].actual > 0) == (method != "full")


def test_a_line_that_is_off_fails() -> None:
    def line(what: str, predicted: int) -> Line:
        return Line(what=what, predicted=predicted, actual=100, total=1000)

    assert [line("weights", n).ok for n in (97, 98, 102, 103)] == [False, True, True, False]
    assert [line("graphs", n).ok for n in (79, 80, 120, 121)] == [False, True, True, False]
    assert Line(what="graphs", predicted=5, actual=None, total=9).ok


def test_storages_count_once() -> None:
    whole = torch.zeros(100)
    assert sum(held([whole, whole[:50], {"a": whole.view(10, 10)}], whole).values()) == 400
    assert held(Namespace()) == {}


def test_bench_memory_reports_every_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, line = bench(capsys, "memory", model, "--num-gpu-blocks-override", "50")
    assert (status, line["ok"]) == (0, True)
    assert [row["what"] for row in line["rows"]][:3] == ["weights", "KV pages", "side tensors"]
    monkeypatch.setattr("sparseengine.engine.build.weight_bytes", lambda _: 1)
    status, line = bench(capsys, "memory", model, "--num-gpu-blocks-override", "50")
    assert (status, line["ok"]) == (1, False)


@pytest.mark.parametrize("name", shape_names())
def test_metadata_is_at_most_two_percent_of_kv_at_128k(name: str) -> None:
    """Rows per head have the most table entries. Longer than some models go, on purpose."""
    windows_only = name == "mistral-7b-v0.1"
    for method in ("full",) if windows_only else ("full", "snapkv"):
        config = config_from_kwargs(
            hf_config=name, load_format="dummy", dtype="bfloat16", sparse_method=method
        )
        assert 0 < overheads(resolve(config), 131072)["metadata"] <= 0.02


@pytest.mark.parametrize("method", ["full", "snapkv", "quest", "streaming_llm", "pyramidkv"])
def test_as_many_requests_are_admitted_as_capacity_says(
    method: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sparse-method", method, "--kv-cache-memory-bytes", str(KV_BYTES)]
    flags += [] if method == "full" else ["--kv-budget", "48"]
    words = ["capacity", model, "--contexts", "256", "--output-len", "16", *flags]
    _, line = bench(capsys, *words)
    row = line["rows"][-1]
    assert (row["method"], row["input_len"]) == (method, 240)
    count = row["requests"]
    budget = {} if method == "full" else {"kv_budget": 48}
    with LLM(
        model,
        quiet=True,
        sparse_method=method,
        kv_cache_memory_bytes=KV_BYTES,
        max_model_len=256,
        **budget,
    ) as llm:
        prompt = make_prompts(300, 240, 1, seed=0)[0]
        randomise(llm.engine)
        like = probe(llm, prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        names = [llm.engine.add_request(prompt, sampling) for _ in range(count + 1)]
        with pytest.raises(ConfigError, match=f"{count} of {count + 1} requests fit"):
            fill(llm.engine, names, like)
        assert len(llm.engine.scheduler.running) == count


def test_capacity_leaves_out_what_the_model_has_no_positions_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["capacity", "--hf-config", "phi-4", "--device-memory-gb", "141"]
    flags = ["--methods", "snapkv", "--kv-budget", "512", "--contexts", "16K,128K"]
    _, line = bench(capsys, *words, *flags)
    dense, sparse = line["rows"]
    assert (dense["method"], sparse["method"]) == ("full", "snapkv")
    assert sparse["requests"] > 10 * dense["requests"] > 0
    assert main(["bench", *words, "--contexts", "128K"]) == 2
    assert "fewer positions" in capsys.readouterr().err
    assert main(["bench", *words, "--contexts", "100"]) == 2
    assert "leaves no prompt" in capsys.readouterr().err
