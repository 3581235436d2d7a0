"""Triton kernels equal their twins, interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparseengine.cli.main import main

CHECKS = Path(__file__).parents[1] / "gpu"


@pytest.mark.parametrize(
    ("file", "interpret"), [("interpreted_kernels.py", "1"), ("compiled_kernels.py", "0")]
)
def test_kernels_equal_their_twins_or_compile(file: str, interpret: str) -> None:
    """In a process of its own: Triton decides whether to interpret when it is first imported."""
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    env = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS / file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout or "[100%]" in done.stdout


def test_splits_fill_the_device_but_stay_long_enough() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from sparseengine.ops.triton.attention import plan_splits

    assert plan_splits(320 * 4, 2176, 132) == (2, 2048)
    assert plan_splits(21 * 4, 32768, 132) == (16, 2048)
    assert plan_splits(1, 100, 132) == (1, 256)
    for rows in (1, 3, 64, 5000):
        for max_len in (1, 255, 257, 4096, 131072, 1 << 21):
            splits, tokens = plan_splits(rows, max_len, 132)
            assert 1 <= splits <= 256
            assert 256 <= tokens <= 2048
            assert splits == 256 or splits * tokens >= max_len


def test_splits_of_latent_rows_fill_whole_waves() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from sparseengine.ops.triton.latent import plan_waves

    assert plan_waves(78, 16384, 132) == (10, 1639)  # 780 programs in 3 waves of 264
    assert plan_waves(512, 2048, 132) == (1, 2048)  # 512 in 2 waves
    assert plan_waves(8, 32768, 132) == (33, 993)  # one wave
    assert plan_waves(5000, 0, 132) == (1, 1)
    for programs in (1, 3, 64, 5000):
        for max_len in (1, 255, 257, 4096, 131072, 1 << 20):
            splits, tokens = plan_waves(programs, max_len, 132)
            assert 1 <= splits <= 256
            assert splits * tokens >= max_len
            assert tokens <= 4096 or splits == 256


def test_launch_shapes_fit_the_shared_memory() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from sparseengine.ops.triton.attention import DECODE, PREFILL, PREFILL_SHORT, PREFILL_WIDE

    hopper, consumer = 232_448, 101_376
    assert PREFILL.fitted(512, hopper) == PREFILL
    assert DECODE.fitted(512, hopper) == DECODE
    for tuning in (DECODE, PREFILL, PREFILL_SHORT, PREFILL_WIDE):
        for row_bytes in (256, 512, 1024, 2048):
            for limit in (hopper, consumer):
                small = tuning.fitted(row_bytes, limit)
                assert small.bytes(row_bytes) <= limit
                assert small.keys >= 16
                assert small.pairs >= 16
                assert small.stages >= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark would run")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_the_benchmark_says_that_it_needs_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    assert "CUDA device" in capsys.readouterr().err
