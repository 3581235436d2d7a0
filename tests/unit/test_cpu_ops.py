"""Compiled CPU loops against torch, and that rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sparseengine.ops import cpu
from sparseengine.ops.reference import page_scores as page_scores_reference
from sparseengine.ops.reference import store as store_reference


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS = [0, 1, 3, 700]  # the last is spread over threads


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1, 8, 64, 100])
def test_rms_norm(rows: int, size: int) -> None:
    x, weight = random(rows, size + 5)[:, 2 : 2 + size] * 3, random(size, seed=1)
    expected = F.rms_norm(x, (size,), weight, 1e-5)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_of_heads(rows: int) -> None:
    x, weight = random(rows, 7, 24)[:, 2:6], random(24, seed=1)
    expected = F.rms_norm(x, (24,), weight, 1e-6)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-6), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("half", [1, 8, 32])
@pytest.mark.parametrize("rest", [0, 5])
def test_rotate(rows: int, half: int, rest: int) -> None:
    size = 2 * half + rest
    x = random(rows, 9, size)[:, 1:8]
    cos, sin = random(rows, 1, half, seed=1), random(rows, 1, half, seed=2)
    got = cpu.rotate(x, cos, sin)
    assert got is not None
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = (low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :])
    torch.testing.assert_close(got, torch.cat(turned, -1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1, 40, 96])
def test_silu_mul(rows: int, size: int) -> None:
    both = random(rows, 2 * size) * 20
    if rows:
        both[0, 0], both[-1, 0] = 1e4, -1e4
    gate, up = both[:, :size], both[:, size:]
    got = cpu.silu_mul(gate, up)
    torch.testing.assert_close(got, F.silu(gate) * up, atol=1e-5, rtol=2e-6)
    assert got.isfinite().all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1, 40, 96])
def test_gelu_mul(rows: int, size: int) -> None:
    both = random(rows, 2 * size) * 4
    if rows:
        both[0, 0], both[-1, 0] = 1e4, -1e4
    gate, up = both[:, :size], both[:, size:]
    got = cpu.gelu_mul(gate, up)
    expected = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-6)
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_take_torch(dtype: torch.dtype) -> None:
    x, weight = random(3, 16).to(dtype), random(16).to(dtype)
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5))
    assert torch.equal(cpu.silu_mul(x, x), F.silu(x) * x)
    assert torch.equal(cpu.gelu_mul(x, x), F.gelu(x, approximate="tanh") * x)
    assert cpu.rotate(x[:, None], x[:, None, :8], x[:, None, :8]) is None


def test_a_row_keeps_its_bits_in_any_company() -> None:
    x, weight = random(700, 96), random(96, seed=1)
    cos, sin = random(700, 1, 8, seed=2), random(700, 1, 8, seed=3)
    norm = cpu.rms_norm(x, weight, 1e-5)
    gated, bent = cpu.silu_mul(x, norm), cpu.gelu_mul(x, norm)
    turned = cpu.rotate(x.view(700, 6, 16), cos, sin)
    assert turned is not None
    for row in (0, 17, 699):
        one = slice(row, row + 1)
        assert torch.equal(cpu.rms_norm(x[one], weight, 1e-5), norm[one])
        assert torch.equal(cpu.silu_mul(x[one], norm[one]), gated[one])
        assert torch.equal(cpu.gelu_mul(x[one], norm[one]), bent[one])
        alone = cpu.rotate(x[one].view(1, 6, 16), cos[one], sin[one])
        assert alone is not None
        assert torch.equal(alone, turned[one])


@pytest.mark.parametrize(("groups", "stored"), [(1, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_store(groups: int, stored: int, tokens: int) -> None:
    g = torch.Generator().manual_seed(4)
    pools = tuple(torch.zeros(8, stored + 2, 5, dim)[:, 1 : 1 + stored] for dim in (6, 4))
    twins = tuple(pool.clone() for pool in pools)
    values = tuple(random(tokens, 5, dim)[:, 1:4] for dim in (6, 4))
    slots = torch.stack([torch.randperm(40, generator=g)[:tokens] for _ in range(groups)])
    if groups == 3 and stored == 1:  # heads share pools: their slots must differ
        slots = torch.randperm(40, generator=g)[: 3 * tokens].view(3, tokens)
    if tokens > 4:
        slots[:, 4] = -1
    assert cpu.store(pools, values, slots)
    store_reference(twins, values, slots)
    for pool, twin in zip(pools, twins, strict=True):
        assert torch.equal(pool, twin)


def test_store_refuses_what_it_cannot_do() -> None:
    pool, value = torch.zeros(2, 1, 4, 8), torch.ones(1, 1, 8)
    slots = torch.zeros(1, 1, dtype=torch.int64)
    assert not cpu.store((pool.double(),), (value,), slots)
    assert not cpu.store((pool,), (value.bfloat16(),), slots)
    assert not pool.any()


@pytest.mark.parametrize(("groups", "stored"), [(1, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("size", [4, 40])
def test_page_scores(groups: int, stored: int, size: int) -> None:
    low = random(30, stored + 2, size)[:, 1 : 1 + stored]
    high = low + random(30, stored + 2, size, seed=1)[:, 1 : 1 + stored].abs()
    q = random(2, 12, size, seed=2)[:, 2:8]
    table = torch.randint(0, 30, (2, groups, 9), generator=torch.Generator().manual_seed(3)).int()
    wide = torch.empty_strided(low.shape, low.stride())
    wide.copy_(high)
    got = cpu.page_scores(q, low, wide, table, 2)
    assert got is not None
    expected = page_scores_reference(q, low, high, table, 2)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_page_scores_refuses_what_it_cannot_do() -> None:
    q, bounds = random(1, 2, 8), random(4, 1, 8)
    table = torch.zeros(1, 1, 3, dtype=torch.int32)
    assert cpu.page_scores(q, bounds, bounds, table.long(), 2) is None
    assert cpu.page_scores(q.double(), bounds, bounds, table, 2) is None
    assert cpu.page_scores(q, bounds, random(4, 2, 8)[:, :1], table, 2) is None
