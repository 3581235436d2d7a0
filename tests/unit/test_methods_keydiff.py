"""KeyDiff block by block: in the prompt, and while decoding."""

from __future__ import annotations

import pytest

from contract import oracles
from contract.driver import make
from contract.reads import drive, random_layer, spec_of
from contract.test_read_sets import steps_for
from contract.toy import toy_spec

LENGTH, DECODES, BUDGET = 45, 14, 20


@pytest.mark.parametrize("chunking", [None, 7])
@pytest.mark.parametrize("interval", [0, 1, 3, 5])
@pytest.mark.parametrize("block", [0, 16])
def test_blocks_of_the_prompt_and_of_decoded_tokens(
    block: int, interval: int, chunking: int | None
) -> None:
    """The anchor is that of survivors and block; every head goes its own way."""
    q, k, v = random_layer(LENGTH + DECODES, seed=block + interval)
    knobs = {"sink": 2, "recent": 4, "block_tokens": block, "interval": interval}
    method = make(spec_of(4, 2), "keydiff", **knobs)
    steps = [*steps_for(LENGTH, chunking, block or None), *[1] * DECODES]
    got = drive(method, q, k, v, steps, BUDGET, DECODES)
    for h in range(2):
        kept: list[int] = []
        at = 0
        for i, size in enumerate(steps):
            row, at = [*kept, *range(at, at + size)], at + size
            assert got.reads[i][h] == row
            in_prompt = at <= LENGTH
            if in_prompt:
                due = at == LENGTH or (block > 0 and at % block == 0)
            else:
                due = interval > 0 and len(row) >= BUDGET + interval
            kept = row
            if due:
                scores = oracles.keydiff_scores(q[row], k[row][:, h : h + 1])
                kept = [row[j] for j in oracles.evict(scores, BUDGET, 2, 4)[0]]
    assert len(row) <= BUDGET + max(interval, 1) or not interval


def test_only_what_evicts_while_decoding_re_runs_tokens_one_by_one() -> None:
    spec = toy_spec("ff")
    assert not make(spec, "keydiff").traits.decode_hooks
    paper = make(spec, "keydiff", preset="paper")
    assert paper.traits.decode_hooks
    assert paper.traits.graph_safe
    assert (paper.config.block_tokens, paper.config.interval) == (128, 128)
    assert paper.demand(1000, 500, 200).steady_tokens == 200 + 128
