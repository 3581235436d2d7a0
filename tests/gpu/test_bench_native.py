"""Benchmarks on a CUDA device: filled batches, the memory table, kernels, launch shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparseengine.cli.main import main
from sparseengine.ops import tuned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODEL = ["--load-format", "dummy", "--hf-config", "smollm2-135m"]
KV = ["--kv-cache-memory-bytes", "4g"]


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    status = main(["bench", *words])
    out = capsys.readouterr().out
    assert status == 0, out
    return json.loads(out.strip().splitlines()[-1])


def test_filled_batches_decode_as_many_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "throughput",
        *MODEL,
        "--kv-cache-memory-bytes",
        "2g",
        "--methods",
        "snapkv,quest",
        "--kv-budget",
        "512",
    ]
    words += ["--input-len", "7000", "--output-len", "40", "--batch-size", "max,4"]
    line = bench(capsys, *words, "--max-num-seqs", "128", "--synthetic-kv")
    rows = {(row["method"], row["max_batch"]): row for row in line["rows"]}
    assert rows["snapkv", True]["batch"] > 5 * rows["full", True]["batch"]
    assert all(row["full_steps"] >= 30 and row["prefill_tok_s"] is None for row in line["rows"])
    dense = rows["full", False]["kv_bytes_read_per_step"]
    assert rows["quest", False]["kv_bytes_read_per_step"] < dense / 4


def test_the_memory_table_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    line = bench(capsys, "memory", *MODEL, *KV, "--sparse-method", "quest")
    assert {row["what"] for row in line["rows"]} >= {"held by torch", "activations", "graphs"}
    assert all(row["actual_bytes"] is not None for row in line["rows"])


def test_kernels_equal_their_twins(capsys: pytest.CaptureFixture[str]) -> None:
    line = bench(capsys, "kernels", "--only", "latent,select,fused")
    assert all(row["time_us"] > 0 for row in line["rows"])
    assert all(row["error"] < 2e-2 for row in line["rows"] if row["error"] is not None)


def test_tuned_shapes_are_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "tuned.json")
    line = bench(capsys, "tune", "--only", "latent", "--output", file)
    assert all(row["gain"] >= 1 for row in line["rows"])
    assert len(tuned.read(file)) == 1
    assert main(["explain", *MODEL, "--tuning-file", file]) == 0
    assert "ignored" not in capsys.readouterr().out
