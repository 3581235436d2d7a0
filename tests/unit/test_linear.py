"""Packed and deterministic linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparseengine.nn.linear import Linear, MergedLinear, make_deterministic


def filled(in_features: int, out_features: int, dtype: torch.dtype, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(in_features + out_features)
    linear = Linear(in_features, out_features, bias, dtype=dtype)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / in_features**0.5)
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_prepare_keeps_the_product_and_the_weight(
    dtype: torch.dtype, bias: bool, rows: int
) -> None:
    linear = filled(72, 100, dtype, bias)
    weight = linear.weight.clone()
    x = torch.randn(rows, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = F.linear(x.double(), weight.double(), None if not bias else linear.bias.double())
    linear.prepare()
    linear.prepare()
    assert linear.weight.shape == (100, 72)
    assert linear.weight.dtype == dtype
    stored = linear.weight.to_dense() if linear.weight.is_mkldnn else linear.weight
    assert torch.equal(stored, weight)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(dtype, 1e-5)
    assert torch.allclose(linear(x).double(), expected, atol=tolerance, rtol=tolerance)


def test_a_tied_weight_stays_plain_for_its_other_owner() -> None:
    embedding = nn.Embedding(50, 16)
    head = Linear(16, 50)
    head.weight = embedding.weight
    head.prepare()
    assert torch.equal(head(embedding.weight), F.linear(embedding.weight, embedding.weight))
    assert not embedding.weight.is_mkldnn


def test_prepare_reads_strided_rows() -> None:
    linear = filled(64, 32, torch.float32)
    x = torch.randn(9, 200)[:, 5:69]
    expected = F.linear(x, linear.weight)
    linear.prepare()
    assert torch.allclose(linear(x), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 192), (1536, 96), (72, 100)])
@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_bits_do_not_depend_on_the_other_rows(
    dtype: torch.dtype, shape: tuple[int, int], packed: bool
) -> None:
    linear = filled(*shape, dtype)
    if packed:
        linear.prepare()
    make_deterministic(nn.Sequential(linear))
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(shape[0], generator=generator).to(dtype)
    solo = linear(row[None])[0]
    for num_rows in range(1, 65):
        x = torch.randn(num_rows, shape[0], generator=generator).to(dtype)
        for place in {0, num_rows // 2, num_rows - 1}:
            kept = x[place].clone()
            x[place] = row
            assert torch.equal(linear(x)[place], solo), (num_rows, place)
            x[place] = kept


def test_deterministic_product_is_right() -> None:
    linear = filled(40, 24, torch.float32, bias=True)
    x = torch.randn(37, 40)
    expected = linear(x)
    make_deterministic(linear)
    assert torch.allclose(linear(x), expected, atol=1e-5)
    assert linear(x[:0]).shape == (0, 24)


def test_merged_parts_tile_the_rows() -> None:
    merged = MergedLinear(8, (6, 2, 4))
    with torch.no_grad():
        merged.weight.copy_(torch.randn(12, 8))
    x = torch.randn(3, 8)
    parts = merged.split(merged(x))
    for i, part in enumerate(parts):
        assert torch.allclose(part, F.linear(x, merged.weight[merged.rows(i)]), atol=1e-6)
