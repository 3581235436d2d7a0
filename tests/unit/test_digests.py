"""Digests of what was evicted: their content, what they detect, what they give back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseengine.attention import digests
from sparseengine.cache.digests import ENTRIES, TOKENS, digest_slots
from sparseengine.cache.manager import PagedCache
from sparseengine.core.cache import PrefixHit
from sparseengine.core.params import SparseParams
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import CacheGroup, LayerKind, LayerSpec, ModelSpec, Ragged
from sparseengine.core.view import Keep, Segment
from sparseengine.errors import CapacityError

DIM, HEADS, LAYERS = 4, 2, 2
KEEPS = SparseParams("knorm", dropped_mass=True)


def model(dim: int = DIM, *, q_heads: int = 4, latent: bool = False) -> ModelSpec:
    layer = LayerSpec(
        kind=LayerKind.LATENT if latent else LayerKind.FULL,
        q_heads=q_heads,
        kv_heads=1 if latent else HEADS,
        head_dim=dim,
        value_dim=dim - 1 if latent else dim,
    )
    return ModelSpec(layers=(layer,) * LAYERS, vocab_size=8, hidden_size=8, max_position=1 << 20)


def request(rid: int, sparse: SparseParams = KEEPS) -> Request:
    return Request(id=rid, tokens=[0], prompt_len=1, max_tokens=1, sparse=sparse)


class Store:
    """A cache and, in float64, everything that was ever written and evicted."""

    def __init__(
        self, ragged: Ragged, spec: ModelSpec, *, page: int = 4, pages: int = 400, seed: int = 0
    ) -> None:
        group = CacheGroup(layers=tuple(range(LAYERS)), page_size=page, ragged=ragged)
        self.spec, self.ragged = spec, ragged
        self.cache = PagedCache(spec, (group,), num_pages=pages, dtype=torch.float64, poison=True)
        self.random = torch.Generator().manual_seed(seed)
        self.heads = spec.layers[0].kv_heads
        # by request, layer and head: tokens [n, 2, D] in rows, and the evicted ones in order
        self.rows: dict[int, list[list[Tensor]]] = {}
        self.gone: dict[int, list[list[Tensor]]] = {}

    def admit(self, rid: int, sparse: SparseParams = KEEPS) -> None:
        self.cache.admit(request(rid, sparse), PrefixHit())
        none = torch.zeros(0, 2, self.spec.layers[0].head_dim, dtype=torch.float64)
        self.rows[rid] = [[none] * self.heads for _ in range(LAYERS)]
        self.gone[rid] = [[none] * self.heads for _ in range(LAYERS)]

    def fork(self, source: int, rid: int) -> None:
        self.cache.fork(source, rid)
        self.rows[rid] = [list(x) for x in self.rows[source]]
        self.gone[rid] = [list(x) for x in self.gone[source]]

    def append(self, rid: int, n: int) -> None:
        chunk = Chunk(request(rid), (0,) * n, 0, Purpose.PREFILL, samples=False)
        plan = StepPlan((chunk,))
        self.cache.reserve(plan)
        layer = self.spec.layers[0]
        for i in range(LAYERS):
            shape = (n, self.heads, 2, layer.head_dim)
            kv = torch.randn(shape, generator=self.random, dtype=torch.float64)
            if layer.kind is LayerKind.LATENT:
                self.cache.write(i, (kv[:, :, 0],))
            else:
                self.cache.write(i, (kv[:, :, 0], kv[:, :, 1]))
            for h in range(self.heads):
                self.rows[rid][i][h] = torch.cat([self.rows[rid][i][h], kv[:, h]])
        self.cache.seal(plan)

    def evict(self, rid: int, drop: int) -> None:
        """Drop as many random tokens of every row, as differently as the rows may be."""
        keeps = []
        shared: Tensor | None = None
        for i in range(LAYERS):
            masks = []
            for h in range(self.heads):
                n = len(self.rows[rid][i][h])
                mask = torch.ones(n, dtype=torch.bool)
                mask[torch.randperm(n, generator=self.random)[:drop]] = False
                if self.ragged is not Ragged.HEAD and h:
                    mask = masks[0]
                if self.ragged is Ragged.REQUEST:
                    mask = shared = mask if shared is None else shared
                masks.append(mask)
                row = self.rows[rid][i][h]
                self.gone[rid][i][h] = torch.cat([self.gone[rid][i][h], row[~mask]])
                self.rows[rid][i][h] = row[mask]
            wanted = masks if self.ragged is Ragged.HEAD else masks[:1]
            layer = None if self.ragged is Ragged.REQUEST else i
            if self.ragged is not Ragged.REQUEST or i == 0:
                keeps.append(Keep(rid, layer, tuple(wanted)))
        self.cache.apply(keeps)

    def check(self, rid: int) -> None:
        self.cache.check()
        for i in range(LAYERS):
            segment = self.cache.digests(rid, i)
            for h in range(self.heads):
                keys, values, bias = oracle(self.gone[rid][i][h])
                if segment is None:
                    assert len(keys) == 0
                    continue
                got = entries(segment, h, self.spec.layers[0])
                expected = values
                if self.spec.layers[0].kind is LayerKind.LATENT:
                    expected = keys[:, : self.spec.layers[0].value_dim]
                torch.testing.assert_close(got[0], keys, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(got[1], expected, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(got[2], bias, rtol=1e-6, atol=0)


def oracle(gone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and log weights of all evicted tokens [n, 2, D], one by one in float64."""
    found: list[tuple[Tensor, float]] = []
    whole = len(gone) // TOKENS * TOKENS
    for at in range(0, whole, TOKENS):
        page = gone[at : at + TOKENS]
        middle = sum(page[j, 0] for j in range(TOKENS)) / TOKENS
        far = max(range(TOKENS), key=lambda j: float((page[j, 0] - middle).norm()))
        rest = [page[j] for j in range(TOKENS) if j != far]
        found.append((sum(rest) / (TOKENS - 1), math.log(TOKENS - 1)))
        found.append((page[far], 0.0))
    found += [(token, 0.0) for token in gone[whole:]]
    if not found:
        return gone[:, 0], gone[:, 1], gone.new_zeros(0)
    both = torch.stack([token for token, _ in found])
    return both[:, 0], both[:, 1], torch.tensor([b for _, b in found], dtype=torch.float64)


def entries(segment: Segment, head: int, layer: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """What is stored for one head, read slot by slot."""
    assert isinstance(segment.table, Tensor)
    assert segment.log_bias is not None
    group = head if segment.table.shape[1] > 1 else 0
    count, size = int(segment.lens[0, group]), segment.page_size
    keys, values = [], []
    for slot in range(count):
        page = int(segment.table[0, group, slot // size])
        pools = [part[0][page] for part in segment.payload]
        at = head if pools[0].shape[0] > 1 else 0
        keys.append(pools[0][at, slot % size])
        values.append(pools[-1][at, slot % size, : layer.value_dim])
    bias = segment.log_bias[0, group, :count].double()
    return torch.stack(keys), torch.stack(values), bias


RAGGED = pytest.mark.parametrize("ragged", list(Ragged), ids=lambda r: r.name)


@RAGGED
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("latent", [False, True], ids=["kv", "latent"])
def test_content_is_that_of_all_original_tokens(ragged: Ragged, page: int, latent: bool) -> None:
    store = Store(ragged, model(latent=latent), page=page, pages=2000)
    store.admit(1)
    store.admit(2, SparseParams("knorm"))
    store.append(1, 90)
    store.append(2, 20)
    store.check(1)
    for drop, more in [(70, 3), (1, 40), (15, 0), (16, 1), (31, 2)]:
        store.evict(1, drop)
        store.evict(2, 1)
        store.append(2, 1)
        store.check(1)
        if more:
            store.append(1, more)
    assert store.cache.digests(2, 0) is None, "the other request asked for none"
    assert len(store.gone[1][0][0]) == 133
    assert store.cache.usage(1).pages > store.cache.usage(2).pages
    store.cache.release(1)
    store.cache.release(2)
    store.cache.check()
    assert store.cache.free_pages() == store.cache.total_pages()


@RAGGED
def test_forks_share_digests_and_part_ways(ragged: Ragged) -> None:
    store = Store(ragged, model(), seed=1)
    store.admit(1)
    store.append(1, 60)
    store.evict(1, 39)
    before = store.cache.free_pages()
    store.fork(1, 2)
    assert store.cache.free_pages() == before
    for rid, drop in [(2, 9), (1, 12), (2, 5), (1, 1)]:
        store.append(rid, 10)
        store.evict(rid, drop)
        store.check(1)
        store.check(2)
    store.cache.release(1)
    store.check(2)
    store.cache.release(2)
    assert store.cache.free_pages() == store.cache.total_pages()


def test_the_size_is_bounded_and_charged() -> None:
    for ragged in Ragged:
        store = Store(ragged, model(), page=4)
        store.admit(1)
        store.append(1, 150)
        rows = store.cache.usage(1).pages
        store.evict(1, 130)
        kept = store.cache.pages_for(20)
        used = store.cache.usage(1).pages - kept
        per_row = -(-digest_slots(130) // 4)
        assert used == per_row * HEADS * LAYERS
        assert used <= store.cache.digest_pages(130)
        assert used + kept < rows
    assert digest_slots(16 * 7) == 7 * ENTRIES
    assert store.cache.digest_pages(0) == 0


def test_no_page_left_for_digests_changes_nothing() -> None:
    store = Store(Ragged.HEAD, model(), page=4, pages=5)
    store.admit(1)
    store.append(1, 20)
    mask = torch.ones(20, dtype=torch.bool)
    mask[3] = False
    with pytest.raises(CapacityError, match="digests of what is evicted"):
        store.cache.apply([Keep(1, 0, (mask, mask))])
    store.cache.check()
    assert store.cache.lens(1, 0) == (20, 20)
    assert store.cache.digests(1, 0) is None


# ── detection and compensation on planted data ────────────────────────────────────────────────────

NEEDLE_NATS, NEEDLE_NORM = 12.0, 2.0  # above the background, of whose keys it has twice the norm


class Planted(Store):
    """One request whose evicted part holds a token that a later query asks for."""

    def __init__(
        self, seed: int, norm: float = NEEDLE_NORM, length: int = 512, dim: int = 64
    ) -> None:
        super().__init__(Ragged.HEAD, model(dim), page=16, pages=64, seed=seed)
        self.admit(1)
        self.length, self.dim, self.norm = length, dim, norm
        self.append(1, length)
        direction = torch.randn(dim, generator=self.random, dtype=torch.float64)
        self.needle = direction / direction.norm() * math.sqrt(dim) * self.norm
        self.at = length // 3
        group = self.cache.groups[0]
        lens = group.rows.tables
        for layer in range(LAYERS):
            for head in range(HEADS):
                row = group.geo.layer_rows(layer).start + head
                slot = self.cache._slot(1)
                page = int(lens.arena[lens.base[slot] + row * lens.width[slot] + self.at // 16])
                group.payload[0][page, 0, self.at % 16] = self.needle
                self.rows[1][layer][head][self.at, 0] = self.needle

    def query(self, asks: bool) -> Tensor:
        q = torch.randn(4, self.dim, generator=self.random, dtype=torch.float64)
        return q + self.needle * (NEEDLE_NATS / math.sqrt(self.dim)) / self.norm**2 if asks else q

    def drop_all_but(self, budget: int) -> None:
        """Keep random tokens and the newest 32, not the needle."""
        free = torch.randperm(self.length - 32, generator=self.random)
        kept = [int(i) for i in free if int(i) != self.at][: budget - 32]
        mask = torch.zeros(self.length, dtype=torch.bool)
        mask[kept], mask[-32:] = True, True
        for layer in range(LAYERS):
            for head in range(HEADS):
                row = self.rows[1][layer][head]
                self.gone[1][layer][head] = row[~mask]
                self.rows[1][layer][head] = row[mask]
        self.cache.apply([Keep(1, i, (mask, mask)) for i in range(LAYERS)])

    def truth(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dropped mass [Hq], outputs [Hq, D] of dense and of evicted attention) at layer 0."""
        mass, dense, evicted = [], [], []
        for h in range(4):
            row, gone = self.rows[1][0][h // 2], self.gone[1][0][h // 2]
            both = torch.cat([row, gone])
            logits = both[:, 0] @ q[h] / math.sqrt(self.dim)
            p = logits.softmax(0)
            mass.append(p[len(row) :].sum())
            dense.append(p @ both[:, 1])
            evicted.append(logits[: len(row)].softmax(0) @ row[:, 1])
        return torch.stack(mass), torch.stack(dense), torch.stack(evicted)

    def estimate(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(estimated dropped mass [Hq], compensated outputs [Hq, D]) at layer 0."""
        layer = self.spec.layers[0]
        segment = self.cache.digests(1, 0)
        assert segment is not None
        keys = torch.stack([self.rows[1][0][h][:, 0] for h in range(HEADS)])
        values = torch.stack([self.rows[1][0][h][:, 1] for h in range(HEADS)])
        lens = torch.full((HEADS,), keys.shape[1])
        kept = digests.row_lse(q, keys, lens, layer)
        found = digests.attend(q, segment, layer)
        share = torch.sigmoid(found.lse - kept)
        logits = q.view(HEADS, 2, -1) @ keys.mT / math.sqrt(self.dim)
        own = logits.softmax(-1) @ values
        return share.flatten(), torch.lerp(own, found.out, share[..., None]).flatten(0, 1)


def error(got: Tensor, dense: Tensor) -> float:
    return float((got - dense).norm() / dense.norm())


def planted_table(seeds: Sequence[int], norm: float = NEEDLE_NORM) -> dict[str, list[Any]]:
    """Mean of heads per seed: dropped mass, true and estimated, and errors, by kind of query."""
    table: dict[str, list[Any]] = {"asks": [], "ordinary": []}
    for seed in seeds:
        planted = Planted(seed, norm)
        planted.drop_all_but(64)
        double = Planted(seed, norm)
        double.drop_all_but(128)  # evict-only with the memory that digests take beside 64
        for kind in table:
            q = planted.query(kind == "asks")
            mass, dense, evicted = planted.truth(q)
            share, mixed = planted.estimate(q)
            _, _, more = double.truth(q)
            errors = error(evicted, dense), error(more, dense), error(mixed, dense)
            table[kind].append((float(mass.mean()), float(share.mean()), *errors))
    return table


def test_planted_needles_are_detected_and_given_back() -> None:
    table = planted_table(range(20))
    asks, ordinary = (torch.tensor(table[k], dtype=torch.float64) for k in ("asks", "ordinary"))
    # estimate against truth
    torch.testing.assert_close(asks[:, 1], asks[:, 0], rtol=0, atol=0.03)
    torch.testing.assert_close(ordinary[:, 1], ordinary[:, 0], rtol=0, atol=0.1)
    assert bool((ordinary[:, 1] <= ordinary[:, 0]).all()), "means underrate spread-out keys"
    # every query that needs the needle stands above every ordinary one
    assert float(asks[:, 1].min()) > float(ordinary[:, 1].max())
    # errors of evict-only, of evict-only with twice the tokens, and with digests
    for rows, most in ((asks, 0.03), (ordinary, 0.8)):
        evicted, double, mixed = rows[:, 2:].mean(0).tolist()
        assert mixed < most
        assert mixed < 0.6 * min(evicted, double), (evicted, double, mixed)


def test_a_needle_among_keys_as_long_as_it_is_not_found() -> None:
    """What digests cannot do: in this background every key is as far from the mean as any."""
    table = planted_table(range(20), norm=1.0)
    asks, ordinary = (torch.tensor(table[k], dtype=torch.float64) for k in ("asks", "ordinary"))
    assert float(asks[:, 0].min()) > float(ordinary[:, 0].max()), "the truth would tell them apart"
    assert float(asks[:, 1].min()) < float(ordinary[:, 1].max())
