"""Rings: REQUEST side tensors that captured steps write into."""

from __future__ import annotations

import torch

from fixtures.cache_harness import Mirror, request
from sparseengine.core.plan import Chunk, Purpose, StepPlan
from sparseengine.core.specs import Ragged


def test_rings_take_what_decodes_push_however_many_requests_there_are() -> None:
    mirror = Mirror(Ragged.HEAD, 80)
    mirror.step({mirror.admit(): 5})
    cache = mirror.cache
    owners = [1, *(mirror.fork(1) for _ in range(10))]  # more than there is room for at first
    at = cache.layer_step(0, *[torch.zeros(5, 2, 3)] * 3)
    at.request_aux("ring", 0).fill_(7)
    version = cache.static_version
    owners += [mirror.fork(1) for _ in range(9)]  # these have a ring
    assert cache.static_version > version, "captured steps hold the address of fewer rings"
    mirror.step(dict.fromkeys(owners, 1))
    plan = StepPlan(tuple(
        Chunk(request=request(i), tokens=(0,), start=n, purpose=Purpose.DECODE, samples=True)
        for n, i in enumerate(owners, start=5)
    ))  # fmt: skip
    cache._begin(plan, cache._tokens)  # at positions of our choice
    at = cache.layer_step(0, *[torch.zeros(len(owners), 2, 3)] * 3)
    value = torch.arange(1.0, len(owners) + 1)
    some = [i for i in range(len(owners)) if i != 12]
    at.subset(some).push("ring", value[some])
    for i, now in enumerate(plan.chunks):
        expected = [0.0, 0.0] if 1 <= i <= 10 else [7.0, 7.0]
        if i == 0 or (i > 10 and i != 12):
            expected[now.start % 2] = value[i].item()
        assert at.request_aux("ring", i).tolist() == expected, i
    cache._sides.check(owners)
    for owner in owners[1:]:
        mirror.release(owner)
    assert cache.memory().aux > 0
    cache.check()
