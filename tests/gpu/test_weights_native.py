"""Dummy weights on a CUDA device: the values of the CPU, at the memory's speed."""

from __future__ import annotations

import time

import pytest
import torch

from sparseengine.weights.dummy import _PATTERN_SIZE, DummyFill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_seed_gives_the_same_values_on_every_device(dtype: torch.dtype) -> None:
    fills = {device: DummyFill(7) for device in ("cpu", "cuda")}
    for count in (1000, 5 * _PATTERN_SIZE + 3, 17):
        found = {}
        for device, fill in fills.items():
            found[device] = torch.empty(count, dtype=dtype, device=device)
            fill("weight", found[device])
        assert torch.equal(found["cuda"].cpu(), found["cpu"])


def test_eight_billion_parameters_take_less_than_a_second() -> None:
    fill = DummyFill(0)
    stacks = [torch.empty(2**29, dtype=torch.bfloat16, device="cuda") for _ in range(16)]
    fill("warm", stacks[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for stack in stacks:
        fill("weight", stack)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 1.0
