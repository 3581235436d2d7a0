"""A cache beside a dict of lists: every stored entry carries its identity, and both are compared.

Identities are running numbers. Token i is written as key[..., 0] = i, value[..., 0] = -i, with the
layer and head in channel 1, and its SLOT side tensor becomes i + 0.5.
"""

from __future__ import annotations

import numpy as np
import torch

from sparseengine.cache.manager import PagedCache
from sparseengine.core.cache import PrefixHit
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import (
    AuxSpec,
    CacheGroup,
    LayerKind,
    LayerSpec,
    ModelSpec,
    Per,
    Ragged,
)
from sparseengine.core.view import Keep
from sparseengine.errors import CapacityError

LAYERS, HEADS, PAGE, DIM = 2, 2, 4, 3
AUX = (
    AuxSpec(name="mass", per=Per.SLOT),
    AuxSpec(name="sum", per=Per.PAGE, shape=("head_dim",)),
    AuxSpec(name="ring", per=Per.REQUEST, shape=(2,)),
    AuxSpec(name="window", per=Per.REQUEST, shape=(2,), lifetime="prefill"),
)
FULL = LayerSpec(kind=LayerKind.FULL, q_heads=4, kv_heads=HEADS, head_dim=DIM, value_dim=DIM)


def tiny_model(layers: tuple[LayerSpec, ...] = (FULL,) * LAYERS) -> ModelSpec:
    return ModelSpec(layers=layers, vocab_size=8, hidden_size=8, max_position=1 << 20)


def request(rid: int) -> Request:
    return Request(id=rid, tokens=[0], prompt_len=1, max_tokens=1)


def step_plan(counts: dict[int, int], purpose: Purpose = Purpose.PREFILL) -> StepPlan:
    return StepPlan(
        tuple(
            Chunk(request=request(rid), tokens=(0,) * n, start=0, purpose=purpose, samples=False)
            for rid, n in counts.items()
        )
    )


class Mirror:
    """The cache under test and its model: rows[rid][layer][head] is a list of identities."""

    def __init__(self, ragged: Ragged, num_pages: int, *, aux: bool = True) -> None:
        self.ragged = ragged
        group = CacheGroup(layers=(0, 1), page_size=PAGE, ragged=ragged, aux=AUX if aux else ())
        self.cache = PagedCache(
            tiny_model(), (group,), num_pages=num_pages, max_num_seqs=16, poison=True
        )
        self.group = self.cache.groups[0]
        self.rows: dict[int, list[list[list[int]]]] = {}
        self.aux = aux
        self.next_token = 1
        self.next_id = 1

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def admit(self) -> int:
        rid, self.next_id = self.next_id, self.next_id + 1
        self.cache.admit(request(rid), PrefixHit())
        self.rows[rid] = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]
        return rid

    def fork(self, source: int) -> int:
        rid, self.next_id = self.next_id, self.next_id + 1
        self.cache.fork(source, rid)
        self.rows[rid] = [[list(head) for head in layer] for layer in self.rows[source]]
        return rid

    def step(self, counts: dict[int, int], purpose: Purpose = Purpose.PREFILL) -> bool:
        """Append tokens; False if they did not fit (and then nothing may have changed)."""
        plan = step_plan(counts, purpose)
        try:
            self.cache.reserve(plan)
        except CapacityError:
            return False
        total = plan.num_tokens
        ids = np.arange(self.next_token, self.next_token + total)
        self.next_token += total
        for layer in range(LAYERS):
            self._write(layer, ids, plan)
        at = 0
        for rid, n in counts.items():
            for layer in self.rows[rid]:
                for head in layer:
                    head.extend(int(i) for i in ids[at : at + n])
            at += n
        return True

    def _write(self, layer: int, ids: np.ndarray, plan: StepPlan) -> None:
        key = torch.zeros(len(ids), HEADS, DIM)
        key[:, :, 0] = torch.from_numpy(ids).float()[:, None]
        key[:, :, 1] = torch.arange(HEADS) + 10.0 * layer
        value = key.clone()
        value[:, :, 0] *= -1
        self.cache.write(layer, (key, value))
        at = self.cache.layer_step(layer, key, key, value)
        for c in range(len(plan.chunks)) if self.aux else ():
            first, end = at.span(c)
            mass = at.gather("mass", c)  # [H, L]
            for head, length in enumerate(at.lens(c) * (HEADS // len(at.lens(c)))):
                assert not mass[head, length - (end - first) : length].any(), "new aux is not zero"
            at.scatter("mass", c, torch.where(mass == 0, at.gather("keys", c)[..., 0] + 0.5, mass))

    def truncate(self, rid: int, n: int) -> None:
        self.cache.truncate(rid, n)
        for layer in self.rows[rid]:
            for head in layer:
                del head[len(head) - n :]

    def release(self, rid: int) -> None:
        self.cache.release(rid)
        del self.rows[rid]

    def apply(self, masks: dict[int, list[list[np.ndarray]]]) -> bool:
        """masks[rid][layer][head]; equal masks may be given coarser than the rows."""
        keeps = []
        for rid, layers in masks.items():
            keeps.extend(self._keeps(rid, layers))
        try:
            self.cache.apply(keeps)
        except CapacityError:
            return False
        for rid, layers in masks.items():
            for layer, heads in enumerate(layers):
                for head, mask in enumerate(heads):
                    row = self.rows[rid][layer][head]
                    self.rows[rid][layer][head] = [t for t, k in zip(row, mask, strict=True) if k]
        return True

    def _keeps(self, rid: int, layers: list[list[np.ndarray]]) -> list[Keep]:
        flat = [m for heads in layers for m in heads]
        if all(np.array_equal(flat[0], m) for m in flat):
            return [Keep(rid, None, (torch.from_numpy(flat[0]),))]
        out = []
        for layer, heads in enumerate(layers):
            alike = all(np.array_equal(heads[0], m) for m in heads)
            each = heads[:1] if alike else heads
            out.append(Keep(rid, layer, tuple(torch.from_numpy(m) for m in each)))
        return out

    def seal(self) -> None:
        """Seal everything; summaries are written for the reported pages only."""
        plan = step_plan(dict.fromkeys(self.rows, 1))
        for pages in self.cache.seal(plan):
            assert pages.pages.unique().numel() == pages.pages.numel(), "a page is reported twice"
            pages.aux["sum"][pages.pages] = pages.payload[0][pages.pages].sum(2)

    # ── comparison ───────────────────────────────────────────────────────────────────────────────

    def compare(self) -> None:
        self.cache.check()
        for rid, layers in self.rows.items():
            for layer, heads in enumerate(layers):
                lens = tuple(len(head) for head in heads)
                assert self.cache.lens(rid, layer) == lens
                for head, tokens in enumerate(heads):
                    self._compare_row(rid, layer, head, tokens)
        if not self.rows:
            assert self.cache.free_pages() == self.cache.total_pages()

    def _pages(self, rid: int, layer: int, head: int) -> np.ndarray:
        span = self.group.geo.layer_rows(layer)
        row = span.start + (head if self.ragged is Ragged.HEAD else 0)
        slot, tables = self.cache._slot(rid), self.group.rows.tables
        first = int(tables.base[slot] + row * tables.width[slot])
        return tables.arena[first : first + int(tables.width[slot])].astype(np.int64)

    def _compare_row(self, rid: int, layer: int, head: int, tokens: list[int]) -> None:
        pages = self._pages(rid, layer, head)
        unit = self.group.geo.layer_units(layer).start
        unit += 0 if self.ragged is Ragged.HEAD else head
        at = np.arange(len(tokens))
        key = self.group.payload[0][pages[at // PAGE], unit, at % PAGE].numpy()
        value = self.group.payload[1][pages[at // PAGE], unit, at % PAGE].numpy()
        want = np.array(tokens, np.float32)
        assert np.array_equal(key[:, 0], want), f"keys of {rid}/{layer}/{head}"
        assert np.array_equal(value[:, 0], -want), f"values of {rid}/{layer}/{head}"
        assert (key[:, 1] == head + 10 * layer).all()
        if self.aux:
            mass = self.group.slot_aux["mass"][pages[at // PAGE], unit, at % PAGE].numpy()
            assert np.array_equal(mass, want + 0.5), f"side tensor of {rid}/{layer}/{head}"

    def compare_summaries(self) -> None:
        """After seal() every full page of every request has the summary of its content."""
        for rid, layers in self.rows.items():
            for layer, heads in enumerate(layers):
                for head, tokens in enumerate(heads):
                    pages = self._pages(rid, layer, head)
                    unit = self.group.geo.layer_units(layer).start
                    unit += 0 if self.ragged is Ragged.HEAD else head
                    full = len(tokens) // PAGE
                    got = self.group.page_aux["sum"][pages[:full], unit, 0].numpy()
                    want = np.array(tokens[: full * PAGE], np.float32).reshape(full, PAGE).sum(1)
                    assert np.array_equal(got, want), f"summaries of {rid}/{layer}/{head}"

    # ── random masks ─────────────────────────────────────────────────────────────────────────────

    def random_masks(self, rid: int, rng: np.random.Generator) -> list[list[np.ndarray]]:
        rows = self.rows[rid]
        one = self._mask(len(rows[0][0]), rng)
        if self.ragged is Ragged.REQUEST:
            return [[one] * HEADS for _ in rows]
        alike = len({len(h) for layer in rows for h in layer}) == 1
        if alike and rng.random() < 0.3:
            return [[one] * HEADS for _ in rows]
        if self.ragged is Ragged.LAYER:
            masks = [self._mask(len(layer[0]), rng) for layer in rows]
            return [[m] * HEADS for m in masks]
        return [[self._mask(len(head), rng) for head in layer] for layer in rows]

    @staticmethod
    def _mask(n: int, rng: np.random.Generator) -> np.ndarray:
        kind = rng.integers(5)
        at = np.arange(n)
        if kind == 0:
            return rng.random(n) < rng.random()
        if kind == 1:  # whole pages
            return np.repeat(rng.random(-(-n // PAGE)) < 0.5, PAGE)[:n]
        if kind == 2:  # a prefix
            return at < rng.integers(n + 1)
        if kind == 3:  # sinks and a recent tail
            return (at < rng.integers(1, PAGE + 2)) | (at >= n - rng.integers(1, 2 * PAGE))
        return np.ones(n, np.bool_)
