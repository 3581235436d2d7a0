"""Admission, preemption, forks, replays, aborts: the scheduler without a model."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from fixtures.scheduling import METHODS, PAGE, Bench, Plain
from sparseengine.core.method import SparseMethod
from sparseengine.core.plan import Demand, Purpose
from sparseengine.engine.memory import _fit
from sparseengine.engine.outputs import Finish, Sample
from sparseengine.errors import CapacityError


def test_decodes_come_first_and_all_run() -> None:
    bench = Bench(max_num_batched_tokens=16)
    first = [bench.add(3, 30) for _ in range(3)]
    bench.step()
    late = bench.add(40, 2)
    plan = bench.step()
    assert plan is not None
    assert [c.purpose for c in plan.chunks] == [Purpose.DECODE] * 3 + [Purpose.PREFILL]
    assert [c.request for c in plan.chunks] == [*first, late]
    assert plan.num_tokens == 16


def test_mix_false_never_mixes_and_alternates_within_the_bound() -> None:
    bench = Bench(max_num_batched_tokens=8, mix=False, max_decode_stall_steps=2)
    bench.add(4, 12)
    bench.step()
    bench.add(60, 2)
    bench.run()
    kinds = []
    for plan in bench.plans:
        purposes = {c.purpose for c in plan.chunks}
        assert len(purposes) == 1
        kinds.append("D" if purposes == {Purpose.DECODE} else "P")
    assert "PPP" not in "".join(kinds[1:-1])
    assert "".join(kinds).startswith("PPPDPPDPPDPPD")


def test_admission_keeps_what_running_requests_will_still_write() -> None:
    """20 pages; each request grows from 2 to 10 pages: two fit, although three would now."""
    bench = Bench(pages=20)
    for _ in range(3):
        bench.add(2 * PAGE, 8 * PAGE)
    bench.step()
    assert len(bench.scheduler.running) == 2
    bench.run()
    assert bench.sink.preempted == []
    assert len(bench.sink.ended) == 3
    assert bench.cache.free_pages() == bench.cache.total_pages()


def test_peak_is_charged_until_the_prompt_is_done_then_steady() -> None:
    """A method that keeps 2 of 8 pages: the second prompt waits for the first one's eviction."""
    methods = {"evicting": Plain(demand=Demand(8 * PAGE, 2 * PAGE))}
    bench = Bench(pages=10, methods=methods)
    bench.add(8 * PAGE - 1, 1, "evicting")
    bench.scheduler.running.clear()
    admission = bench.scheduler.admission
    first, second = bench.request(31, 1, "evicting"), bench.request(31, 1, "evicting")
    ticket = admission.admit(first, [], 8, admission.available_pages([]))
    assert ticket is not None
    assert ticket.charge_pages == 8
    assert admission.admit(second, [], 8, admission.available_pages([ticket])) is None
    admission.settle(ticket)
    assert ticket.charge_pages == 2
    assert admission.admit(second, [], 8, admission.available_pages([ticket])) is not None


def test_a_request_that_never_fits_is_refused_with_both_numbers() -> None:
    bench = Bench(pages=50)
    for _ in range(5):
        with pytest.raises(CapacityError, match=r"needs 251 KV pages, the engine has 50") as caught:
            bench.add(1002, 1)
        assert (caught.value.needed, caught.value.available) == (251, 50)
    assert not bench.scheduler.has_work
    fits = bench.add(50 * PAGE - 1, 1)
    bench.run()
    assert bench.sink.ended[fits.id] == Finish("length")


def test_out_of_memory_preempts_the_newest_and_the_oldest_never_stops() -> None:
    bench = Bench(pages=12, reserve_output_tokens=0, max_num_batched_tokens=16)
    requests = [bench.add(8, 24) for _ in range(3)]
    bench.run()
    assert bench.sink.preempted
    assert requests[0].id not in bench.sink.preempted
    assert all(bench.sink.ended[r.id] == Finish("length") for r in requests)
    for r in requests:
        assert r.tokens[8:] == [(r.id + n) % 100 for n in range(8, 32)]
    assert bench.cache.free_pages() == bench.cache.total_pages()
    bench.cache.check()


@pytest.mark.parametrize("method", ["chunked", "hooks"])
def test_resume_runs_the_prompt_then_the_generated_tokens(method: str) -> None:
    bench = Bench(max_num_batched_tokens=64)
    request = bench.add(10, 8, method)
    for _ in range(5):
        bench.step()
    assert request.num_generated == 5
    bench.scheduler._preempt(bench.scheduler.running[request.id])
    bench.plans.clear()
    bench.run()
    got = [(c.start, len(c.tokens), c.purpose, c.samples) for p in bench.plans for c in p.chunks]
    prompt = (0, 10, Purpose.PREFILL, False)
    if method == "chunked":
        assert got[:2] == [prompt, (10, 5, Purpose.PREFILL, True)]
        assert got[2] == (15, 1, Purpose.DECODE, True)
    else:
        redone = [(10 + i, 1, Purpose.DECODE, i == 4) for i in range(5)]
        assert got[:6] == [prompt, *redone]
    assert request.tokens[10:] == [(request.id + n) % 100 for n in range(10, 18)]


def test_a_method_that_understates_its_needs_fails_one_request_not_the_engine() -> None:
    methods = {"liar": Plain(demand=Demand(PAGE, PAGE)), **METHODS}
    bench = Bench(pages=6, methods=methods)
    liar, honest = bench.add(40, 2, "liar"), bench.add(8, 2)
    bench.run()
    assert bench.sink.ended[liar.id].reason == "error"
    assert "pages" in str(bench.sink.ended[liar.id].stop_reason)
    assert bench.sink.ended[honest.id] == Finish("length")


def test_siblings_fork_the_prompt_and_sample_from_its_logits() -> None:
    bench = Bench(max_num_batched_tokens=64)
    family = bench.add_family(4, 22, 6)
    bench.step()
    parent, *rest = family
    assert bench.sink.forks == [(parent.id, r.id) for r in rest]
    assert all(r.num_generated == 1 and r.computed == 22 for r in family)
    used = bench.cache.total_pages() - bench.cache.free_pages()
    assert used == 6  # one copy of the prompt
    bench.step()
    used = bench.cache.total_pages() - bench.cache.free_pages()
    assert used == 5 + 4  # the open page is private now
    bench.run()
    prompt_chunks = [c for p in bench.plans for c in p.chunks if c.purpose is Purpose.PREFILL]
    assert len(prompt_chunks) == 1
    assert set(bench.sink.ended) == {r.id for r in family}
    bench.cache.check()
    assert bench.cache.free_pages() == bench.cache.total_pages()


def test_a_family_is_admitted_with_its_forks_not_with_n_copies() -> None:
    """Four copies of 10 + 2 pages would need 48; 10 + 4 * 3 are enough."""
    bench = Bench(pages=24, max_num_batched_tokens=64)
    family = bench.add_family(4, 10 * PAGE, 2 * PAGE)
    bench.run()
    assert [
        c.request.id for p in bench.plans for c in p.chunks if c.purpose is Purpose.PREFILL
    ] == [family[0].id]
    assert bench.sink.preempted == []


def test_more_siblings_than_room_run_the_prompt_themselves() -> None:
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=64)
    family = bench.add_family(5, 9, 3)
    bench.run()
    assert {r.id: bench.sink.ended[r.id] for r in family} == {
        r.id: Finish("length") for r in family
    }
    assert all(r.num_generated == 3 for r in family)


def test_siblings_survive_the_parents_abort() -> None:
    bench = Bench(max_num_batched_tokens=8)
    parent, child = bench.add_family(2, 20, 3)
    bench.step()
    bench.scheduler.abort(parent.id)
    bench.run()
    assert bench.sink.ended[parent.id] == Finish("abort")
    assert bench.sink.ended[child.id] == Finish("length")
    assert bench.cache.free_pages() == bench.cache.total_pages()


def test_an_error_sample_ends_its_request_only() -> None:
    bench = Bench()
    bad, good = bench.add(3, 5), bench.add(3, 5)
    plan = bench.scheduler.schedule()
    assert plan is not None
    bench.scheduler.commit(plan, {bad.id: Sample(error="NaN"), good.id: Sample(token=4)})
    assert bench.sink.ended == {bad.id: Finish("error", "NaN")}
    bench.run()
    assert bench.sink.ended[good.id] == Finish("length")


def test_replays_follow_the_prompt_and_leave_nothing() -> None:
    bench = Bench(max_num_batched_tokens=16)
    request = bench.add(10, 3, "replay")
    bench.run()
    got = [(c.purpose, c.start, c.tokens) for p in bench.plans for c in p.chunks]
    assert got[1:3] == [(Purpose.REPLAY, 10, (7, 8, 9)), (Purpose.REPLAY, 10, (5,))]
    assert [p for p, _, _ in got[3:]] == [Purpose.DECODE] * 2
    assert request.num_generated == 3
    assert bench.cache.free_pages() == bench.cache.total_pages()


def test_abort_at_every_point() -> None:
    for steps in range(8):
        bench = Bench(max_num_batched_tokens=8)
        family = bench.add_family(3, 20, 3)
        queued = bench.add(5, 3)
        for _ in range(steps):
            bench.step()
        for request in (*family, queued):
            bench.scheduler.abort(request.id)
            bench.scheduler.abort(request.id)  # twice is harmless
        bench.scheduler.abort(999)
        assert not bench.scheduler.has_work
        assert set(bench.sink.ended) == {r.id for r in (*family, queued)}
        assert bench.cache.free_pages() == bench.cache.total_pages()
        bench.cache.check()


# ── models with WINDOW layers ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kinds", ["fw", "fwwwww", "ww"])
def test_as_many_run_at_once_as_the_memory_table_says(kinds: str) -> None:
    methods = {"dense": full(), **METHODS}
    bench = Bench(
        kinds=kinds, pages=55, max_num_seqs=64, max_num_batched_tokens=20, methods=methods
    )
    prompt_len, output = 50, 120
    fit = _fit(bench.cache, "dense", methods["dense"], prompt_len, output, None).requests
    for _ in range(fit + 3):
        bench.add(prompt_len, output, "dense")
    most = 0
    while bench.scheduler.has_work:
        bench.step()
        most = max(most, len(bench.scheduler.running))
    assert most == fit
    assert bench.sink.preempted == []
    # one, if every layer were charged every token: 55 pages of 4 tokens for 170
    assert fit == {"fw": 2, "fwwwww": 5, "ww": 16}[kinds]


def full() -> Plain:
    """Dense, and known to replay nothing."""

    class Full(Plain):
        replay = SparseMethod.replay

    return Full()


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("kinds", ["fw", "fww", "w"])
def test_what_is_admitted_alone_can_run(kinds: str, method: str) -> None:
    """The smallest pool that does not refuse a request is large enough for it, replays and all."""
    prompt_len, output = 61, 30
    for pages in range(1, 40):
        bench = Bench(kinds=kinds, pages=pages)
        with suppress(CapacityError):
            request = bench.add(prompt_len, output, method)
            bench.run()
            assert bench.sink.ended == {request.id: Finish("length")}
            break
    assert 1 < pages < 39, "small pools were refused"


def test_hybrids_that_pay_in_advance_are_never_preempted() -> None:
    """Random prompts, methods and families in a tight pool; every page is checked every step."""
    for seed in range(6):
        rng = random.Random(seed)
        kinds = rng.choice(["fw", "fww", "wwf"])
        bench = Bench(kinds=kinds, pages=30, max_num_batched_tokens=rng.choice([8, 16, 32]))
        for _ in range(12):
            length, output = rng.randrange(1, 60), rng.randrange(1, 24)
            if rng.random() < 0.3:
                bench.add_family(rng.randrange(2, 5), length, output)
            else:
                bench.add(length, output, rng.choice(sorted(METHODS)))
        while bench.scheduler.has_work:
            bench.step()
            bench.cache.check()
        assert bench.sink.preempted == []
        assert {f.reason for f in bench.sink.ended.values()} == {"length"}
        assert bench.cache.free_pages() == bench.cache.total_pages()
