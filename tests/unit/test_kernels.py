"""Triton kernels equal their twins, interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[1] / "gpu" / "interpreted_kernels.py"


def test_kernels_equal_their_twins_under_the_interpreter() -> None:
    """In a process of its own: Triton decides whether to interpret when it is first imported."""
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout or "[100%]" in done.stdout
