"""The kernel benchmarks at small sizes; run by tests/unit/test_bench_kernels.py, which sets
TRITON_INTERPRET=1 in a process of its own: Triton reads it when it is first imported."""

from __future__ import annotations

import pytest
import torch

from sparseengine.bench.kernels import GROUPS
from sparseengine.bench.timing import Bench, bench_copy


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
