"""WINDOW layers hold their window's pages only, and share a pool with the FULL layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fixtures.cache_harness import FULL, PAGE, WINDOW, WINDOWED, Mirror, request, tiny_model
from sparseengine.attention.deterministic import WINDOW_ALIGN, DeterministicBackend
from sparseengine.attention.reference import ReferenceBackend
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.memory import request_bytes
from sparseengine.cache.plan import geometry, merge_plans
from sparseengine.core.attention import AttentionBackend
from sparseengine.core.cache import PrefixHit
from sparseengine.core.plan import Chunk, Purpose, StepPlan
from sparseengine.core.specs import AuxSpec, CacheGroup, LayerKind, LayerSpec, Per, Ragged
from sparseengine.core.view import Keep
from sparseengine.errors import CapacityError

RAGGED = pytest.mark.parametrize("ragged", list(Ragged))
BROAD = replace(WINDOWED, window=32)


def hybrid(
    *specs: LayerSpec, ragged: Ragged = Ragged.REQUEST, page_size: int = 16, num_pages: int = 400,
    max_chunk: int | None = None, window_align: int = 1, max_num_seqs: int = 16,
) -> PagedCache:  # fmt: skip
    """A cache of these layers under the merged plan of one method with rows as `ragged` says."""
    model = tiny_model(specs)
    acting = tuple(i for i, s in enumerate(specs) if s.kind is LayerKind.FULL)
    others = tuple(i for i, s in enumerate(specs) if s.kind is LayerKind.WINDOW)
    plan = [CacheGroup(layers=acting, page_size=page_size, ragged=ragged)] if acting else []
    plan += [CacheGroup(layers=others, page_size=page_size)] if others else []
    return PagedCache(
        model, merge_plans(model, [tuple(plan)]), num_pages=num_pages, poison=True,
        max_chunk=max_chunk, window_align=window_align, max_num_seqs=max_num_seqs,
    )  # fmt: skip


def run(
    cache: PagedCache, counts: dict[int, int], purpose: Purpose = Purpose.PREFILL, start: int = 0
) -> StepPlan:
    """Reserve a step; the caller seals it."""
    chunks = (
        Chunk(request=request(rid), tokens=(0,) * n, start=start, purpose=purpose, samples=False)
        for rid, n in counts.items()
    )
    plan = StepPlan(tuple(chunks))
    cache.reserve(plan)
    return plan


def admitted(cache: PagedCache, *ids: int) -> PagedCache:
    for rid in ids:
        cache.admit(request(rid), PrefixHit())
    return cache


def window_pages(cache: PagedCache, rid: int, layer: int) -> int:
    size = cache._group_of[layer].geo.page_size
    return max(-(-n // size) for n in cache.lens(rid, layer))


# ── what is held ─────────────────────────────────────────────────────────────────────────────────


@RAGGED
@pytest.mark.parametrize("chunk", [7, 16, 200, 3000])
def test_a_long_request_holds_a_window_and_a_chunk(ragged: Ragged, chunk: int) -> None:
    cache = admitted(hybrid(FULL, BROAD, BROAD, ragged=ragged, max_chunk=chunk), 1)
    layer_pages = 2 * 2  # of one page per row, two WINDOW layers x two heads
    for at in range(0, 3000, chunk):
        size = min(chunk, 3000 - at)
        plan = run(cache, {1: size}, start=at)
        held = window_pages(cache, 1, 1)
        assert held <= -(-(32 - 1 + size) // 16) + 1
        full = -(-(at + size) // 16) * 2
        assert cache.usage(1).pages == full + held * layer_pages
        assert cache.usage(1).pages <= cache.pages_for(at + size)
        cache.seal(plan)
        if at % 600 < chunk:
            cache.check()
    for at in range(3000, 3040):
        plan = run(cache, {1: 1}, Purpose.DECODE, at)
        assert window_pages(cache, 1, 2) <= 32 // 16 + 1
        assert cache.usage(1).pages <= cache.pages_for(at + 1, chunk=1)
        cache.seal(plan)
    assert cache.lens(1, 0) == (3040, 3040)
    cache.check()
    cache.release(1)
    assert cache.free_pages() == cache.total_pages()


def test_what_the_next_query_sees_is_there() -> None:
    """Positions in the keys; every query of every chunk finds its whole window and no more."""
    spec = replace(BROAD, window=10)
    cache = admitted(hybrid(FULL, spec, page_size=4), 1)
    rng, at = np.random.default_rng(0), 0
    while at < 200:
        size = int(rng.integers(1, 23))
        plan = run(cache, {1: size}, start=at)
        keys = torch.arange(at, at + size).float()[:, None, None].expand(-1, 2, 3)
        cache.write(1, (keys, keys))
        view = cache.view(1, None)
        (segment,) = view.segments
        length = int(segment.lens[0, 0])
        stored = segment.payload[0][0][segment.table[0, 0].long(), 0, :, 0].flatten()[:length]
        for i, position in enumerate(range(at, at + size)):
            end = length - size + i + 1
            seen = stored[max(0, end - 10) : end].tolist()
            assert seen == list(range(max(0, position - 9), position + 1))
        cache.seal(plan)
        at += size


@RAGGED
def test_forks_drop_references_only(ragged: Ragged) -> None:
    mirror = Mirror(ragged, 200, kinds="fw")
    parent = mirror.admit()
    mirror.step({parent: 5 * PAGE + 2})
    twin = mirror.fork(parent)  # before the step ends: the whole row is shared
    lens = mirror.cache.lens(parent, 1)
    mirror.cache.seal(run_nothing(parent))
    for head in mirror.rows[parent][1]:
        del head[: (len(head) - WINDOW + 1) // PAGE * PAGE]
    assert mirror.cache.lens(twin, 1) == lens, "the twin still has its pages"
    mirror.compare()
    for _ in range(3 * PAGE):
        mirror.step({parent: 1, twin: 1}, Purpose.DECODE)
        mirror.seal()
        mirror.compare()
    assert mirror.cache.lens(parent, 1) == mirror.cache.lens(twin, 1) < lens
    mirror.release(parent)
    mirror.compare()


def run_nothing(rid: int) -> StepPlan:
    """A plan of a request to seal, without having reserved it."""
    return StepPlan((Chunk(request(rid), (0,), 0, Purpose.DECODE, False),))


def test_replays_drop_nothing_and_leave_no_trace() -> None:
    cache = admitted(hybrid(FULL, BROAD), 1)
    cache.seal(run(cache, {1: 100}))
    lens = cache.lens(1, 1)
    assert lens == (36, 36)
    plan = run(cache, {1: 50}, Purpose.REPLAY, 100)
    cache.seal(plan)
    assert cache.lens(1, 1) == (86, 86)
    cache.truncate(1, 50)
    assert cache.lens(1, 1) == lens
    cache.check()


def test_truncation_stops_where_the_window_would_be_missing() -> None:
    cache = admitted(hybrid(FULL, BROAD), 1)
    cache.seal(run(cache, {1: 100}))  # 36 tokens are left, 31 are needed
    with pytest.raises(AssertionError, match="cannot remove 6 tokens of request 1: "):
        cache.truncate(1, 6)
    assert (cache.lens(1, 0), cache.lens(1, 1)) == ((100, 100), (36, 36)), "nothing has changed"
    cache.truncate(1, 5)
    assert (cache.lens(1, 0), cache.lens(1, 1)) == ((95, 95), (31, 31))
    short = admitted(hybrid(FULL, BROAD), 1)
    short.seal(run(short, {1: 20}))
    short.truncate(1, 20)
    assert short.lens(1, 1) == (0, 0), "nothing was dropped, so anything may be removed"


def test_windows_are_nobody_elses_to_evict() -> None:
    cache = admitted(hybrid(FULL, BROAD, ragged=Ragged.LAYER), 1)
    run(cache, {1: 9})
    with pytest.raises(AssertionError, match="layer 1: a WINDOW layer holds its newest 32 tokens"):
        cache.apply([Keep(1, 1, (torch.ones(9, dtype=torch.bool),))])


# ── tiles of the deterministic backend ───────────────────────────────────────────────────────────


def outputs(
    backend: AttentionBackend, qkv: tuple[Tensor, Tensor, Tensor], steps: Sequence[int], align: int
) -> Tensor:
    spec = replace(WINDOWED, window=100, head_dim=8, value_dim=8)
    cache = admitted(hybrid(spec, window_align=align), 1)
    out, at = [], 0
    for size in steps:
        plan = run(cache, {1: size}, start=at)
        q, k, v = (t[at : at + size] for t in qkv)
        cache.write(0, (k, v))
        out.append(backend.run(q, cache.view(0, None), spec, None))
        cache.seal(plan)
        assert (at + size - cache.lens(1, 0)[0]) % max(align, 16) == 0
        at += size
    return torch.cat(out)


def test_dropped_pages_change_no_bit_when_rows_start_at_tiles() -> None:
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(500, 4, 8, generator=rng)
    k, v = (torch.randn(500, 2, 8, generator=rng) for _ in range(2))
    cuts = ([500], [170, 130, 200], [37] * 13 + [1] * 19)
    whole, *others = (outputs(DeterministicBackend(), (q, k, v), c, WINDOW_ALIGN) for c in cuts)
    assert all(torch.equal(whole, other) for other in others)
    plain = outputs(ReferenceBackend(), (q, k, v), cuts[1], 1)
    torch.testing.assert_close(plain, whole, rtol=1e-5, atol=1e-5)


# ── shared pools ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("specs", "ragged", "merged", "pools"),
    [
        ((FULL, BROAD, BROAD), Ragged.REQUEST, Ragged.LAYER, 1),
        ((FULL, BROAD, BROAD), Ragged.HEAD, Ragged.HEAD, 1),
        ((BROAD, WINDOWED, WINDOWED), Ragged.REQUEST, Ragged.LAYER, 1),
        ((BROAD, BROAD), Ragged.REQUEST, Ragged.REQUEST, 1),
        ((FULL, replace(FULL, q_heads=2)), Ragged.REQUEST, Ragged.REQUEST, 1),
        ((replace(FULL, head_dim=5), BROAD, BROAD), Ragged.REQUEST, Ragged.REQUEST, 2),
        ((replace(FULL, kv_heads=1), BROAD), Ragged.HEAD, Ragged.HEAD, 1),
        ((replace(FULL, kv_heads=1), BROAD), Ragged.REQUEST, Ragged.LAYER, 2),
    ],
)
def test_groups_with_equal_pages_share_a_pool(
    specs: tuple[LayerSpec, ...], ragged: Ragged, merged: Ragged, pools: int
) -> None:
    cache = hybrid(*specs, ragged=ragged)
    assert {g.geo.group.ragged for g in cache.groups} == {merged}
    assert len(cache.pools) == pools
    assert len({id(g.payload[0]) for g in cache.groups}) == pools


def test_full_layers_use_what_windows_leave() -> None:
    """20 pages of one row in two layers; a static split would stop at 20 x 16 tokens."""
    cache = admitted(hybrid(FULL, BROAD, num_pages=20, max_chunk=16), 1)
    assert cache.free_tokens() == 36 * 16, "40 pages, of which the window and a chunk take 4"
    for at in range(0, 36 * 16, 16):
        cache.seal(run(cache, {1: 16}, start=at))
    assert cache.lens(1, 0) == (576, 576)
    admitted(cache, 2)
    cache.release(1)
    assert cache.free_pages() == cache.total_pages()
    for at in range(0, 36 * 16, 16):
        cache.seal(run(cache, {2: 16}, start=at))
    cache.check()


def test_a_step_asks_for_all_groups_of_a_pool_together() -> None:
    cache = admitted(hybrid(FULL, BROAD, BROAD, num_pages=4), 1, 2)  # 12 bundles of 2 heads
    cache.seal(run(cache, {1: 32}))  # 6 bundles
    free = cache.free_pages()
    with pytest.raises(CapacityError, match="needs 18 head pages, 12 of 24 are free") as caught:
        run(cache, {2: 33})  # 3 + 3 + 3, of which any two groups would fit
    assert (caught.value.needed, caught.value.available) == (18, 12)
    assert (cache.lens(2, 0), cache.lens(2, 1), cache.free_pages()) == ((0, 0), (0, 0), free)
    cache.check()
    cache.seal(run(cache, {2: 32}))
    assert cache.free_pages() == 0
    cache.check()


def test_side_tensors_of_one_pool_stay_apart() -> None:
    """Each group has its own, over all pages of the pool, and zeroes them when it takes a page."""
    model = tiny_model((FULL, WINDOWED))
    aux = (AuxSpec(name="mass", per=Per.SLOT), AuxSpec(name="top", per=Per.PAGE))
    groups = (CacheGroup(layers=(0,), page_size=4, aux=aux), CacheGroup(layers=(1,), page_size=4))
    cache = admitted(PagedCache(model, groups, num_pages=3, poison=True), 1)
    full, windowed = cache.groups
    assert (windowed.slot_aux, windowed.page_aux) == ({}, {})
    assert full.slot_aux["mass"].shape[0] == cache.pools[0].num_pages + 1 == 7
    cost = [geometry(model, g) for g in groups]
    per_page = request_bytes(cost, torch.float32, 4, 4)
    assert per_page.payload == 2 * (4 * 2 * 6 * 4)
    assert per_page.aux == 2 * (2 * 4 * 4 + 2 * 4), "any page of the pool may be a FULL one"
    total = cache.memory().payload + cache.memory().aux
    again = PagedCache(model, groups, total_bytes=total)
    assert again.pools[0].num_pages == 6
    assert again.memory().payload + again.memory().aux == total
    for _ in range(40):  # pages wander between the groups
        plan = run(cache, {1: 1}, Purpose.DECODE)
        keys = torch.zeros(1, 2, 3)
        assert not cache.layer_step(0, keys, keys, keys).gather("mass", 0)[:, -1].any()
        full.slot_aux["mass"][full.current().slots[0] // 4] = 7.0
        cache.seal(plan)
        if cache.lens(1, 0)[0] >= 12:
            cache.truncate(1, 1)
            cache.release(1)
            admitted(cache, 1)
    cache.check()


# ── what is charged ──────────────────────────────────────────────────────────────────────────────


def test_windows_are_charged_a_window_and_a_chunk() -> None:
    cache = hybrid(FULL, BROAD, BROAD, BROAD, BROAD, BROAD, max_chunk=100)
    full, head = 2 * 2048, 2  # head pages of 32k tokens in one layer; heads
    assert cache.pages_for(32_768, chunk=1) == full + 5 * head * 3
    assert cache.pages_for(32_768) == full + 5 * head * 10, "46 tokens of a window and 100 on top"
    assert cache.pages_for(160, positions=32_768, chunk=1) == 2 * 10 + 5 * head * 3
    assert cache.pages_for(40) == 6 * head * 3, "never more than was run"
    unbounded = hybrid(FULL, BROAD)
    assert unbounded.pages_for(320) == 2 * head * 20, "one chunk may be the whole prompt"


def test_rows_that_start_at_multiples_are_charged_for_it() -> None:
    cache = admitted(hybrid(BROAD, window_align=64, max_chunk=1), 1)
    most = 0
    for at in range(300):
        plan = run(cache, {1: 1}, start=at)
        most = max(most, cache.usage(1).pages)
        cache.seal(plan)
    assert most == cache.pages_for(300) == 2 * -(-(31 + 63 + 1) // 16)


def test_the_pool_that_is_short_first_sets_the_charge() -> None:
    """Windows of other dimensions have a pool of their own: what fits together fits in each."""
    cache = hybrid(FULL, replace(BROAD, head_dim=7), num_pages=10, max_chunk=16)
    assert [p.num_pages for p in cache.pools] == [10, 10]
    assert cache.pages_for(160) == cache.total_pages() == 40
    assert cache.pages_for(161) > 40, "10 pages of FULL rows, although the windows leave 7"
    assert cache.free_tokens() == 160
    admitted(cache, 1)
    for at in range(0, 160, 16):
        cache.seal(run(cache, {1: 16}, start=at))
    with pytest.raises(CapacityError, match="2 head pages, 0 of 20 are free"):
        run(cache, {1: 1}, Purpose.DECODE)
    cache.check()
