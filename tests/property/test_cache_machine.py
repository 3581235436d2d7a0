"""The cache against a dict of lists, under every order of operations Hypothesis can think of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fixtures.cache_harness import PAGE, Mirror
from sparseengine.core.plan import Purpose
from sparseengine.core.specs import Ragged

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SEEDS = st.integers(0, 2**32 - 1)


class CacheMachine(RuleBasedStateMachine):
    ragged = Ragged.REQUEST
    kinds = "ff"

    @initialize(num_pages=st.sampled_from([6, 24]))
    def start(self, num_pages: int) -> None:
        self.mirror = Mirror(self.ragged, num_pages, kinds=self.kinds)

    def pick(self, seed: int) -> int:
        return sorted(self.mirror.rows)[seed % len(self.mirror.rows)]

    @precondition(lambda self: len(self.mirror.rows) < 6)
    @rule(tokens=st.integers(0, 3 * PAGE + 1))
    def admit(self, tokens: int) -> None:
        rid = self.mirror.admit()
        if tokens:
            self.mirror.step({rid: tokens})

    @precondition(lambda self: self.mirror.rows)
    @rule(counts=st.lists(st.integers(1, 2 * PAGE + 1), min_size=1, max_size=6), seed=SEEDS)
    def step(self, counts: list[int], seed: int) -> None:
        ids = np.random.default_rng(seed).permutation(sorted(self.mirror.rows))
        self.mirror.step({int(rid): n for rid, n in zip(ids, counts, strict=False)})

    @precondition(lambda self: self.mirror.rows)
    @rule()
    def decode(self) -> None:
        self.mirror.step(dict.fromkeys(self.mirror.rows, 1), Purpose.DECODE)

    @precondition(lambda self: self.mirror.rows)
    @rule(seed=SEEDS, tokens=st.integers(1, PAGE + 2))
    def replay(self, seed: int, tokens: int) -> None:
        rid = self.pick(seed)
        if self.mirror.step({rid: tokens}, Purpose.REPLAY):
            self.mirror.truncate(rid, tokens)

    @precondition(lambda self: self.mirror.rows)
    @rule(seed=SEEDS)
    def apply(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        chosen = [rid for rid in self.mirror.rows if rng.random() < 0.6]
        self.mirror.apply({rid: self.mirror.random_masks(rid, rng) for rid in chosen})

    @precondition(lambda self: self.mirror.rows)
    @rule()
    def seal(self) -> None:
        self.mirror.seal()
        self.mirror.compare_summaries()

    @precondition(lambda self: self.mirror.rows and len(self.mirror.rows) < 8)
    @rule(seed=SEEDS)
    def fork(self, seed: int) -> None:
        self.mirror.fork(self.pick(seed))

    @precondition(lambda self: self.mirror.rows)
    @rule(seed=SEEDS, share=st.floats(0, 1))
    def truncate(self, seed: int, share: float) -> None:
        rid = self.pick(seed)
        shortest = min(len(h) for layer in self.mirror.rows[rid] for h in layer)
        tokens = int(share * shortest)
        if self.mirror.may_truncate(rid, tokens):
            self.mirror.truncate(rid, tokens)
        else:
            with pytest.raises(AssertionError, match="would reach further back"):
                self.mirror.truncate(rid, tokens)

    @precondition(lambda self: self.mirror.rows)
    @rule(seed=SEEDS)
    def release(self, seed: int) -> None:
        self.mirror.release(self.pick(seed))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "mirror"):
            self.mirror.compare()

    def teardown(self) -> None:
        if hasattr(self, "mirror"):
            for rid in list(self.mirror.rows):
                self.mirror.release(rid)
            self.mirror.compare()


class LayerMachine(CacheMachine):
    ragged = Ragged.LAYER


class HeadMachine(CacheMachine):
    ragged = Ragged.HEAD


class TwoPoolMachine(CacheMachine):
    kinds = "fww"


class SharedLayerMachine(LayerMachine):
    kinds = "fww"


class SharedHeadMachine(HeadMachine):
    kinds = "wf"


class WindowMachine(CacheMachine):
    kinds = "ww"


_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestRequestRows = CacheMachine.TestCase
TestLayerRows = LayerMachine.TestCase
TestHeadRows = HeadMachine.TestCase
TestTwoPools = TwoPoolMachine.TestCase
TestSharedLayerRows = SharedLayerMachine.TestCase
TestSharedHeadRows = SharedHeadMachine.TestCase
TestWindowsOnly = WindowMachine.TestCase
_CASES = (TestRequestRows, TestLayerRows, TestHeadRows)
_WINDOWS = (TestTwoPools, TestSharedLayerRows, TestSharedHeadRows, TestWindowsOnly)
for case in (*_CASES, *_WINDOWS):
    case.settings = _SETTINGS
del case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("ragged", "kinds", "operations", "aux"),
    [
        (Ragged.HEAD, "ff", 10_000, False),
        (Ragged.LAYER, "ff", 1_000, True),
        (Ragged.REQUEST, "ff", 1_000, True),
        (Ragged.HEAD, "fw", 2_000, False),
        (Ragged.LAYER, "wwf", 1_000, True),
        (Ragged.REQUEST, "wwf", 500, True),
    ],
)
def test_random_operations_leak_nothing(
    ragged: Ragged, kinds: str, operations: int, aux: bool, device: str
) -> None:
    rng = np.random.default_rng(7)
    mirror = Mirror(ragged, 40, kinds=kinds, aux=aux, device=device)
    for i in range(operations):
        ids = sorted(mirror.rows)
        op = rng.integers(10)
        if not ids or (op == 0 and len(ids) < 8):
            mirror.admit()
        elif op <= 4:
            chosen = rng.permutation(ids)[: rng.integers(1, 4)]
            if not mirror.step({int(r): int(rng.integers(1, 7)) for r in chosen}):
                mirror.release(ids[0])
        elif op == 5:
            rid = int(rng.choice(ids))
            mirror.apply({rid: mirror.random_masks(rid, rng)})
        elif op == 6 and len(ids) < 8:
            mirror.fork(int(rng.choice(ids)))
        elif op == 7:
            rid = int(rng.choice(ids))
            shortest = min(len(h) for layer in mirror.rows[rid] for h in layer)
            tokens = int(rng.integers(shortest + 1))
            if mirror.may_truncate(rid, tokens):
                mirror.truncate(rid, tokens)
        elif op == 8:
            mirror.seal()
        else:
            mirror.release(int(rng.choice(ids)))
        if i % 500 == 0:
            mirror.compare()
    for rid in list(mirror.rows):
        mirror.release(rid)
    mirror.compare()
    assert mirror.cache.free_pages() == mirror.cache.total_pages()
