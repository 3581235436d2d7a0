"""What bench commands leave behind: artefacts, ratios to earlier runs, plots, a JSON line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.engines import save_checkpoint
from sparseengine.bench.compare import Earlier
from sparseengine.cli.main import main
from sparseengine.errors import ConfigError

ROW = {"model": "m", "method": "full", "budget": None, "input_len": 64, "batch": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("bench") / "model"))


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict, str]:
    assert main(["bench", *words]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    return json.loads(out.strip().splitlines()[-1]), out


def saved(path: Path, *rows: dict) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_ratios_are_above_one_where_this_run_is_better(tmp_path: Path) -> None:
    earlier = Earlier(saved(tmp_path / "a", {**ROW, "decode_tok_s": 50.0, "ttft_ms": [8, 9, 9]}))
    (entry,) = earlier.ratios([{**ROW, "decode_tok_s": 100.0, "ttft_ms": [4.0, 5.0, 6.0]}])
    assert (entry["decode_tok_s"], entry["ttft_ms"]) == (2.0, 2.0)


@pytest.mark.parametrize(
    "other",
    [{"batch": 3}, {"input_len": 65}, {"method": "quest"}, {"model": "n"}, {"budget": "64"}],
)
def test_rows_that_differ_do_not_match(other: dict, tmp_path: Path) -> None:
    earlier = Earlier(saved(tmp_path / "a", {**ROW, **other, "decode_tok_s": 50.0}))
    assert earlier.ratios([{**ROW, "decode_tok_s": 100.0}]) == []


def test_another_engine_is_compared_at_our_batch_or_at_its_best(tmp_path: Path) -> None:
    rows = [
        {"startup_s": 3, "kv_tokens": 99},
        {"model": "m", "prompt_len": 64, "batch": 2, "decode_tok_s": 10.0},
        {"model": "m", "prompt_len": 64, "batch": 9, "decode_tok_s": 40.0},
    ]
    earlier = Earlier(saved(tmp_path / "peer.jsonl", *rows))
    mine = [{**ROW, "decode_tok_s": 80.0}, {**ROW, "batch": 5, "decode_tok_s": 80.0}]
    first, second = earlier.ratios(mine)
    assert (first["decode_tok_s"], "with_batch" in first) == (8.0, False)
    assert (second["decode_tok_s"], second["with_batch"]) == (2.0, 9)


@pytest.mark.parametrize(
    ("text", "match"),
    [("{}", "no result rows"), ("3", "a list of result rows"), ("a table", "no result rows")],
)
def test_files_without_rows_are_refused(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match=match):
        Earlier(str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="no aggregate"):
        Earlier(str(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        Earlier(str(tmp_path / "none"))


def test_a_run_is_compared_with_its_folder_and_with_its_own_output(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["throughput", model, "--input-len", "80", "--output-len", "8", "--synthetic-kv"]
    words += ["--batch-size", "1,2", "--sparse-method", "quest", "--kv-budget", "48"]
    line, out = bench(capsys, *words, "--output", str(tmp_path / "run"))
    assert [row["prefill_tok_s"] for row in line["rows"]] == [None] * 4
    dense, sparse = line["rows"][1], line["rows"][3]
    assert dense["kv_bytes_read_per_step"] > sparse["kv_bytes_read_per_step"] > 0
    assert "random numbers" in out
    (tmp_path / "out.txt").write_text(out)
    info = json.loads((tmp_path / "run" / "run_info.json").read_text())
    assert info["engines"]["quest"]["routes"]
    assert (tmp_path / "run" / "plot.svg").read_text().startswith("<svg")
    again = ["--compare", str(tmp_path / "run"), "--compare", str(tmp_path / "out.txt")]
    line, out = bench(capsys, *words, *again, "--plot", str(tmp_path / "x.svg"))
    assert len(line["compared"]) == 8
    assert all(entry["decode_tok_s"] > 0 for entry in line["compared"])
    assert out.count("above 1 is better") == 2
    assert (tmp_path / "x.svg").exists()


def test_scale_sweeps_batches_and_contexts_and_leaves_out_what_does_not_fit(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["scale", model, "--batches", "1,2,64", "--contexts", "64,128,4K", "--steps", "5"]
    words += ["--at-context", "64", "--at-batch", "2", "--num-gpu-blocks-override", "30"]
    words += ["--sparse-method", "snapkv", "--kv-budget", "32", "--plot", str(tmp_path / "p.svg")]
    line, _ = bench(capsys, *words)
    shapes = [(row["method"], row["input_len"], row["batch"]) for row in line["rows"]]
    each = [(64, 1), (64, 2), (128, 2)]
    assert shapes == [(method, *shape) for method in ("full", "snapkv") for shape in each]
    assert {p.name for p in tmp_path.iterdir()} == {"p-batch.svg", "p-context.svg"}
    assert "snapkv 32" in (tmp_path / "p-batch.svg").read_text()


def test_latency_compares_waits_and_draws_them(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["latency", model, "--num-requests", "3", "--input-len", "20", "--output-len", "4"]
    run = str(tmp_path / "run")
    bench(capsys, *words, "--output", run)
    line, out = bench(capsys, *words, "--compare", run)
    (entry,) = line["compared"]
    assert {"ttft_ms", "itl_ms", "output_tok_s"} <= entry.keys()
    assert "inf/s" in out
    assert (Path(run) / "plot.svg").exists()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["throughput", "--plot", "x.png"], "only .svg"),
        (["throughput", "--plot", "none/x.svg"], "does not exist"),
        (["latency", "--compare", "none"], "No such file"),
        (["throughput", "--synthetic-kv", "--compare-transformers"], "leave out one"),
        (["scale", "--steps", "2"], "5 or more"),
        (["scale", "--at-context", "1,2"], "give one length"),
        (["scale", "--batches", "x"], "--batches 'x'"),
        (["scale", "--batches", "1", "--at-context", "900", "--contexts", "900"], "no batch fits"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_wrong_flags_are_refused_before_anything_is_measured(
    words: list[str], match: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--num-gpu-blocks-override", "9"]
    assert main(["bench", words[0], model, *words[1:], *extra]) == 2
    assert match in capsys.readouterr().err
