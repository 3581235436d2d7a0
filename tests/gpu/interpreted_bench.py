"""The kernel benchmarks at small sizes; run by tests/unit/test_bench_kernels.py, which sets
TRITON_INTERPRET=1 in a process of its own: Triton reads it when it is first imported."""

from __future__ import annotations

import pytest
import torch

from sparseengine.bench import tune
from sparseengine.bench.kernels import GROUPS
from sparseengine.bench.timing import Bench, bench_copy
from sparseengine.ops import tuned


@pytest.mark.parametrize("group", list(GROUPS))
def test_a_group_measures_ops_that_equal_their_twins(group: str) -> None:
    torch.manual_seed(0)
    bench = Bench("cpu", small=True)
    bench_copy(bench)
    GROUPS[group](bench)
    rows = bench.rows()
    assert rows[0]["share"] == 1.0
    assert len(rows) > 1
    assert all(row["bytes"] > 0 and row["time_us"] > 0 for row in rows)
    assert all(row["error"] < 2e-3 for row in rows if row["error"] is not None)
    assert {sample["op"] for sample in bench.raw} == {row["op"] for row in rows}


FEW = {
    "decode": {"keys": (64, 32)},
    "prefill": {"keys": (128, 32), "pairs": (128,)},
    "latent": {"keys": (32, 16)},
    "moe_up": {"rows": (16, 32), "cols": (32,)},
    "moe_down": {"depth": (64,)},
}


@pytest.mark.parametrize("case", list(tune.CASES))
def test_tuning_measures_every_shape_that_is_looked_up(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is made up: every trial takes half as long as the one before."""
    torch.manual_seed(0)
    clock = iter(2.0**-i for i in range(99))
    monkeypatch.setattr(tune, "_time", lambda calls, device: next(clock))
    tuner = tune.Tuner(FEW)
    for name, calls in tune.CASES[case](Bench("cpu", small=True)):
        tuner.tune(name, calls)
    ops = ["moe_up", "moe_down"] if case == "moe" else [case]
    assert list(tuner.entries) == ops
    assert all(row["gain"] >= 2 and row["chosen"] for row in tuner.rows)
    assert tuned.in_force() == tuned.Tuned()


def test_shapes_that_compute_something_else_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tune, "relative_error", lambda got, want: 0.5)
    tuner = tune.Tuner(FEW)
    for name, calls in tune.CASES["latent"](Bench("cpu", small=True)):
        tuner.tune(name, calls)
    assert tuner.entries == {}
    assert tuner.rows[0]["chosen"] == {}
