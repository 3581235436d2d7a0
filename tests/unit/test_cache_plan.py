"""Cache plans: merging, and the arithmetic of their memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fixtures.cache_harness import AUX, FULL, request, step_plan, tiny_model
from sparseengine.cache.manager import PagedCache
from sparseengine.cache.memory import page_bytes
from sparseengine.cache.plan import merge_plans
from sparseengine.cache.tables import PageTables
from sparseengine.core.cache import PrefixHit
from sparseengine.core.specs import AuxSpec, CacheGroup, LayerKind, LayerSpec, Per, Ragged
from sparseengine.core.view import Keep
from sparseengine.errors import ConfigError, UnsupportedError

WINDOW = LayerSpec(kind=LayerKind.WINDOW, q_heads=4, kv_heads=2, head_dim=3, value_dim=3, window=4)
RECURRENT = LayerSpec(kind=LayerKind.RECURRENT, state=((2,),))


def test_the_union_is_the_finest_with_all_side_tensors() -> None:
    model = tiny_model((FULL,) * 3)
    merged = merge_plans(
        model,
        [
            (CacheGroup(layers=(0, 1, 2)),),
            (CacheGroup(layers=(0, 1, 2), ragged=Ragged.LAYER, aux=AUX[:1]),),
            (CacheGroup(layers=(0,), aux=AUX[:2]), CacheGroup(layers=(1, 2), ragged=Ragged.HEAD)),
        ],
    )
    assert merged == (
        CacheGroup(layers=(0,), ragged=Ragged.LAYER, aux=AUX[:2]),
        CacheGroup(layers=(1, 2), ragged=Ragged.HEAD, aux=AUX[:1]),
    )


def test_the_order_of_side_tensors_does_not_split_groups() -> None:
    plans = [
        (CacheGroup(layers=(0,), aux=AUX[:1]), CacheGroup(layers=(1,), aux=AUX[1:2])),
        (CacheGroup(layers=(0,), aux=AUX[1:2]), CacheGroup(layers=(1,), aux=AUX[:1])),
    ]
    merged = merge_plans(tiny_model(), plans)
    assert [g.layers for g in merged] == [(0, 1)]


def test_layers_of_different_kinds_are_split() -> None:
    model = tiny_model((FULL, WINDOW, RECURRENT, FULL))
    merged = merge_plans(model, [(CacheGroup(layers=(0, 1, 3)),)])
    assert [g.layers for g in merged] == [(0, 3), (1,)]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (CacheGroup(layers=(0, 1), page_size=32), "page_size 16 in one plan, 32 in another"),
        (CacheGroup(layers=(0, 1), codec=("int8", "int8")), "codec"),
        (
            CacheGroup(layers=(0, 1), aux=(AuxSpec(name="mass", per=Per.PAGE),)),
            "side tensor 'mass'",
        ),
    ],
)
def test_contradictions_are_errors(other: CacheGroup, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        merge_plans(tiny_model(), [(CacheGroup(layers=(0, 1), aux=AUX[:1]),), (other,)])


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ((CacheGroup(layers=(0,)),), r"layers \[1\] hold KV"),
        ((CacheGroup(layers=(0, 1)), CacheGroup(layers=(1,))), "layer 1 is in two groups"),
        ((CacheGroup(layers=(0, 1, 2)),), "layer 2, which is RECURRENT"),
        ((CacheGroup(layers=(0, 1, 7)),), r"layer 7; the model has layers 0\.\.2"),
    ],
)
def test_plans_that_do_not_fit_the_model(plan: tuple[CacheGroup, ...], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        merge_plans(tiny_model((FULL, FULL, RECURRENT)), [plan])


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (CacheGroup(layers=(0,), codec=("int8",)), "codec"),
        (CacheGroup(layers=(0, 1)), "differ in kind"),
        (CacheGroup(layers=()), "no layers"),
        (CacheGroup(layers=(0,), page_size=0), "page_size=0"),
    ],
)
def test_the_cache_refuses_what_it_cannot_store(group: CacheGroup, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        PagedCache(tiny_model((FULL, WINDOW)), (group,), num_pages=4)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ragged", list(Ragged))
def test_a_byte_budget_is_kept_and_used(ragged: Ragged) -> None:
    groups = (
        CacheGroup(layers=(0,), page_size=16, ragged=ragged, aux=AUX),
        CacheGroup(layers=(1, 2), page_size=8, ragged=Ragged.HEAD),
    )
    model = tiny_model((FULL,) * 3)
    cost = page_bytes(model, groups, torch.float32)
    # 16 tokens x 2 heads x (3 + 3) floats in each layer; SLOT and PAGE side tensors in layer 0
    assert cost.payload == 3 * 16 * 2 * 6 * 4
    assert cost.aux == 2 * (16 * 4 + 3 * 4)
    total = 50 * (cost.payload + cost.aux)
    cache = PagedCache(model, groups, total_bytes=total)
    used = cache.memory()
    assert 0.95 * total < used.payload + used.aux <= total
    rows = [g.pool.num_pages // g.geo.rows * g.geo.page_size for g in cache.groups]
    assert max(rows) - min(rows) <= 16, "all groups run out together"
    assert cache.free_tokens() == min(rows)


def test_too_little_memory_says_how_much_is_needed() -> None:
    groups = (CacheGroup(layers=(0, 1), ragged=Ragged.HEAD),)
    with pytest.raises(ConfigError, match=r"KV memory of 100 bytes.*at least (\d+)") as caught:
        PagedCache(tiny_model(), groups, total_bytes=100)
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    assert PagedCache(tiny_model(), groups, total_bytes=needed).free_tokens() == 16
    with pytest.raises(ConfigError, match="0 pages"):
        PagedCache(tiny_model(), groups, num_pages=0)
    with pytest.raises(ConfigError, match="only one"):
        PagedCache(tiny_model(), groups)


def test_tables_stay_under_two_percent_at_128k() -> None:
    """One channel stands for 128 of bf16 K and V: payload bytes are scaled accordingly."""
    spec = LayerSpec(kind=LayerKind.FULL, q_heads=8, kv_heads=2, head_dim=1, value_dim=1)
    layers, long, short, scale = 3, 131_072, 2_048, 128 * 2 / 4
    model = tiny_model((spec,) * layers)
    group = CacheGroup(layers=tuple(range(layers)), ragged=Ragged.HEAD)
    cost = page_bytes(model, (group,), torch.float32)
    assert cost.table / (cost.payload * scale) < 0.002

    cache = PagedCache(model, (group,), num_pages=3 * long // 16, max_num_seqs=64)
    for rid in range(48):
        cache.admit(request(rid), PrefixHit())
    cache.reserve(step_plan(dict.fromkeys(range(40), short)))
    assert _table_share(cache, scale) < 0.02
    # a long prompt beside short ones pays for its own table only
    cache.reserve(step_plan({40: long}))
    assert _table_share(cache, scale) < 0.02
    # and gives it back when it is evicted to a budget
    before = cache.memory().tables
    kept = torch.zeros(long, dtype=torch.bool)
    kept[-short:] = True
    cache.apply([Keep(40, None, (kept,))])
    for rid in range(41, 48):
        cache.reserve(step_plan({rid: long}))
        cache.apply([Keep(rid, None, (kept,))])
    assert cache.memory().tables < 1.5 * before
    assert _table_share(cache, scale) < 0.02
    cache.check()


def _table_share(cache: PagedCache, scale: float) -> float:
    """Bytes of tables and page bookkeeping, host and device, over those of the KV pages in use."""
    rows, pool = cache.groups[0].rows, cache.groups[0].pool
    used = (pool.num_pages - pool.num_free) / pool.num_pages
    share = rows.tables.arena.nbytes * 2 + rows.lens.nbytes + rows.sealed.nbytes
    share += pool.bookkeeping_bytes() * used  # proportional to the pool
    return share / (cache.memory().payload * scale * used)


def test_page_tables_survive_packing_shrinking_and_reuse() -> None:
    rng = np.random.default_rng(0)
    tables = PageTables(3)
    tables.grow_slots(6)
    model: dict[int, np.ndarray] = {}
    for _ in range(600):
        slot = int(rng.integers(6))
        if slot in model and rng.random() < 0.2:
            tables.drop(slot)
            del model[slot]
        elif slot in model and rng.random() < 0.4:
            used = int(rng.integers(model[slot].shape[1] + 1))
            model[slot] = model[slot][:, :used]
            tables.shrink(slot, used)
        else:
            used = int(rng.integers(1, 400))
            model[slot] = rng.integers(0, 1 << 20, (3, used)).astype(np.int32)
            tables.fit(np.array([slot]), np.array([used]))
            at = tables.at(np.full((3, 1), slot), np.arange(3)[:, None], np.arange(used))
            tables.arena[at] = model[slot]
        for s, want in model.items():
            got = tables.block(np.full(3, s), np.arange(3), want.shape[1])
            assert np.array_equal(got, want)
        live = 3 * int(tables.width.sum())
        assert tables.arena.size <= max(8 * live, 1024)
    assert sum(m.shape[1] for m in model.values()) > 0
