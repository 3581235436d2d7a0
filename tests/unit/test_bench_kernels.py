"""Kernel benchmarks: groups that can be chosen, and that every group runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparseengine.bench.kernels_command import NAMES
from sparseengine.cli.main import main

CHECKS = Path(__file__).parents[1] / "gpu" / "interpreted_bench.py"


def test_every_group_runs_under_the_interpreter() -> None:
    """In a process of its own: Triton decides whether to interpret when it is first imported."""
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert "[100%]" in done.stdout


def test_the_help_names_every_group() -> None:
    from sparseengine.bench.kernels import GROUPS, chosen

    assert [name.split()[0] for name in NAMES.split(", ")] == list(GROUPS)
    assert chosen("moe, decode") == ["moe", "decode"]
    assert chosen(None) == list(GROUPS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark would run")
@pytest.mark.parametrize(
    ("words", "match"),
    [([], "CUDA device"), (["--only", "mo"], "moe"), (["--compare", "none"], "No such file")],
    ids=["device", "group", "compare"],
)
def test_what_cannot_run_is_said(
    words: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *words]) == 2
    assert match in capsys.readouterr().err
