"""Prefill policies belong to the method's traits; the scheduler obeys them."""

from __future__ import annotations

import pytest

from fixtures.scheduling import Bench
from sparseengine.core.plan import Purpose

WHOLE = "whole"  # long_bs1full_short_batch
CHUNKED = "chunked"  # all_chunked


def test_all_chunked_splits_at_the_budget_and_fills_it() -> None:
    bench = Bench(max_num_batched_tokens=16)
    a, b = bench.add(40, 1), bench.add(10, 1)
    bench.run()
    assert bench.sizes() == [
        [(a.id, 16)],
        [(a.id, 16)],
        [(a.id, 8), (b.id, 8)],
        [(b.id, 2)],
    ]


def test_a_prompt_longer_than_the_budget_runs_alone_and_whole() -> None:
    bench = Bench(max_num_batched_tokens=16)
    long = bench.add(40, 1, WHOLE)
    short = bench.add(5, 1, WHOLE)
    bench.run()
    assert bench.sizes() == [[(long.id, 40)], [(short.id, 5)]]


def test_short_prompts_are_batched_whole_and_never_split() -> None:
    bench = Bench(max_num_batched_tokens=16)
    a, b, c, d = (bench.add(n, 1, WHOLE) for n in (7, 6, 5, 3))
    bench.run()
    # c does not fit behind a and b (18 > 16) and is not split; d takes the room that is left
    assert bench.sizes() == [[(a.id, 7), (b.id, 6), (d.id, 3)], [(c.id, 5)]]


def test_a_prompt_of_exactly_the_budget_is_short() -> None:
    bench = Bench(max_num_batched_tokens=16)
    a, b = bench.add(16, 1, WHOLE), bench.add(16, 1, WHOLE)
    bench.run()
    assert bench.sizes() == [[(a.id, 16)], [(b.id, 16)]]


@pytest.mark.parametrize("mix", [True, False])
def test_a_long_whole_prompt_gets_a_step_without_decodes_and_no_more(mix: bool) -> None:
    bench = Bench(max_num_batched_tokens=16, mix=mix, max_decode_stall_steps=1)
    first = bench.add(4, 20)
    while first.in_prefill:
        bench.step()
    long = bench.add(40, 3, WHOLE)
    plans = [bench.step() for _ in range(4)]
    alone = [p for p in plans if p is not None and p.num_tokens == 40]
    assert len(alone) == 1
    assert [c.request.id for c in alone[0].chunks] == [long.id]
    others = [p for p in plans if p is not alone[0]]
    assert all(first.id in [c.request.id for c in p.chunks] for p in others if p is not None)


def test_a_whole_prompt_that_decodes_leave_no_room_for_is_not_starved() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=8)
    decodes = [bench.add(2, 50) for _ in range(4)]
    while any(r.in_prefill for r in decodes):
        bench.step()
    whole = bench.add(8, 1, WHOLE)  # short, but 4 decodes leave 4 tokens
    before = len(bench.plans)
    while whole.id not in bench.sink.ended:
        bench.step()
    assert len(bench.plans) - before <= 2


def test_policies_share_an_engine() -> None:
    bench = Bench(max_num_batched_tokens=16)
    chunked, whole = bench.add(20, 1, CHUNKED), bench.add(10, 1, WHOLE)
    bench.run()
    assert bench.sizes() == [[(chunked.id, 16)], [(chunked.id, 4), (whole.id, 10)]]


def test_chunks_end_at_multiples_of_the_methods_block() -> None:
    bench = Bench(max_num_batched_tokens=11)
    request = bench.add(21, 2, "block")  # blocks of 8
    bench.run()
    prompt = [c for p in bench.plans for c in p.chunks if c.purpose is Purpose.PREFILL]
    assert [(c.start, c.stop) for c in prompt] == [(0, 8), (8, 16), (16, 21)]
    assert request.num_generated == 2
