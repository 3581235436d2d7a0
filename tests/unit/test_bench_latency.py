"""Arrivals, traces, and the times that requests are said to have waited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.engines import save_checkpoint
from sparseengine.bench.latency import (
    Arrival,
    Served,
    percentiles,
    poisson,
    read_trace,
    serve,
    summary,
)
from sparseengine.errors import ConfigError
from sparseengine.llm import LLM


def test_arrivals_are_seeded_and_have_the_rate() -> None:
    prompts = [[1, 2]] * 4000
    arrivals = poisson(prompts, 5, 8.0)
    assert arrivals == poisson(prompts, 5, 8.0)
    assert arrivals[0].at_s == 0.0
    assert arrivals[-1].at_s / len(arrivals) == pytest.approx(1 / 8, rel=0.05)
    assert {a.at_s for a in poisson(prompts[:9], 5, float("inf"))} == {0.0}


def test_times_count_from_the_arrival() -> None:
    served = [
        Served(arrival_s=1.0, tokens_s=[1.5, 1.75, 2.25]),
        Served(arrival_s=0.0, tokens_s=[4]),
    ]
    row = summary("full", "x", served)
    assert served[0].gaps_s == [0.25, 0.5]
    assert row["output_tok_s"] == 1.0
    assert row["ttft_ms"][0] == pytest.approx(2250)
    assert row["itl_ms"][0] == pytest.approx(375)
    assert row["e2e_ms"][2] == pytest.approx(3972.5)
    assert percentiles([0.002]) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "holds no request"),
        ("{", "line 1"),
        ('{"prompt_len": 4}', "output_len"),
        ('{"prompt_len": 0, "output_len": 3}', "must have tokens"),
        ('{"prompt_len": 4, "output_len": 3, "at_s": -1}', "must not be negative"),
        ('{"prompt_len": 4, "output_len": 3, "at_s": NaN}', "must not be negative"),
    ],
)
def test_wrong_traces_name_the_line(text: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_trace(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(str(tmp_path / "none"))


def test_a_trace_is_served_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 0.2, "prompt": [5, 6, 7], "output_len": 2},
        {"prompt_len": 30, "output_len": 3},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = read_trace(str(file))
    assert [r["at_s"] for r in rows] == [0.0, 0.2]
    arrivals = [
        Arrival(at_s=r["at_s"], prompt=(3,) * len(r["prompt"]), output_len=r["output_len"])
        for r in rows
    ]
    folder = save_checkpoint(tmp_path / "model")
    with LLM(str(folder), quiet=True, max_model_len=256) as llm:
        first, second = serve(llm, arrivals)
    assert (len(first.tokens_s), len(second.tokens_s)) == (3, 2)
    assert second.tokens_s[0] >= 0.2
    assert first.ttft_s > 0
    assert second.ttft_s > 0
    assert all(gap >= 0 for s in (first, second) for gap in s.gaps_s)
