"""Blocks take rank-local sizes: the ranks' parts add up to the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm

from fixtures.tiny import DenseContext
from sparseengine.core.specs import LayerKind, LayerSpec
from sparseengine.nn.attention import Attention
from sparseengine.nn.linear import MergedLinear
from sparseengine.nn.mlp import GeGLU, SwiGLU
from sparseengine.nn.norm import RMSNorm, ShiftedRMSNorm
from sparseengine.nn.rope import RotaryEmbedding, rope_spec

HIDDEN, TOKENS = 32, 9
SPEC = LayerSpec(kind=LayerKind.FULL, q_heads=8, kv_heads=4, head_dim=8, value_dim=8)


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)


def take_rank(whole: MergedLinear, part: MergedLinear, rank: int, ranks: int) -> None:
    """Column-parallel: every part of the merged matrix is cut by rank."""
    for i in range(len(whole.parts)):
        rows = whole.weight[whole.rows(i)].chunk(ranks)[rank]
        part.weight.data[part.rows(i)] = rows


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("qk_norm_eps", [None, 1e-6])
def test_attention_heads_split_over_ranks(ranks: int, qk_norm_eps: float | None) -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    rope = RotaryEmbedding(rope_spec({"max_position_embeddings": 64}, SPEC.head_dim))
    rotation = rope(torch.arange(TOKENS), torch.float32)
    whole = Attention(0, SPEC, HIDDEN, qk_norm_eps=qk_norm_eps)
    fill(whole)
    expected = whole(x, rotation, DenseContext(SPEC.softmax_scale))
    local = replace(SPEC, q_heads=SPEC.q_heads // ranks, kv_heads=SPEC.kv_heads // ranks)
    total = torch.zeros_like(expected)
    for rank in range(ranks):
        part = Attention(0, local, HIDDEN, qk_norm_eps=qk_norm_eps)
        take_rank(whole.qkv_proj, part.qkv_proj, rank, ranks)
        part.o_proj.weight.data.copy_(whole.o_proj.weight.chunk(ranks, dim=1)[rank])
        if part.q_norm is not None and part.k_norm is not None:
            part.q_norm.load_state_dict(whole.q_norm.state_dict())
            part.k_norm.load_state_dict(whole.k_norm.state_dict())
        total += part(x, rotation, DenseContext(SPEC.softmax_scale))
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def test_feed_forward_channels_split_over_ranks() -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    whole = SwiGLU(HIDDEN, 24)
    fill(whole)
    total = torch.zeros(TOKENS, HIDDEN)
    for rank in range(2):
        part = SwiGLU(HIDDEN, 12)
        take_rank(whole.gate_up_proj, part.gate_up_proj, rank, 2)
        part.down_proj.weight.data.copy_(whole.down_proj.weight.chunk(2, dim=1)[rank])
        total += part(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-5)


def test_values_may_have_another_size_than_keys() -> None:
    spec = replace(SPEC, value_dim=5)
    block = Attention(0, spec, HIDDEN)
    fill(block)
    rope = RotaryEmbedding(rope_spec({"max_position_embeddings": 64}, spec.head_dim))
    rotation = rope(torch.arange(TOKENS), torch.float32)
    out = block(torch.randn(TOKENS, HIDDEN), rotation, DenseContext(spec.softmax_scale))
    assert out.shape == (TOKENS, HIDDEN)
    assert block.o_proj.in_features == 8 * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_takes_the_mean_square_in_float32(dtype: torch.dtype) -> None:
    """Squares of 300 overflow nothing, and bf16 sums of 4,096 squares lose nothing."""
    norm = RMSNorm(4096, 1e-6, dtype=dtype)
    norm.weight.data.fill_(2.0)
    x = (torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * 300).to(dtype)
    exact = 2.0 * x.double() / x.double().pow(2).mean(-1, keepdim=True).sqrt()
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    assert ((norm(x).double() - exact).abs() <= tolerance * exact.abs() + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prepared", [False, True])
def test_shifted_norm_equals_transformers(dtype: torch.dtype, prepared: bool) -> None:
    """1 + weight is taken in float32: in bfloat16 it would lose a weight of 0.003."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(64, generator=generator) * 0.006 - 0.003).to(dtype)
    x = (torch.randn(5, 3, 64, generator=generator) * 9).to(dtype)
    norm, reference = ShiftedRMSNorm(64, 1e-6, dtype=dtype), Gemma3RMSNorm(64).to(dtype)
    norm.weight.data.copy_(weight)
    reference.weight.data.copy_(weight)
    if prepared:
        norm.prepare()
    found, expected = norm(x), reference(x).detach()
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype is torch.float32 else 0, atol=0)


def test_gelu_block_equals_transformers() -> None:
    config = Gemma3TextConfig(hidden_size=HIDDEN, intermediate_size=24)
    reference, block = Gemma3MLP(config), GeGLU(HIDDEN, 24)
    fill(block)
    gate, up = block.gate_up_proj.weight.chunk(2)
    weights = {"gate_proj": gate, "up_proj": up, "down_proj": block.down_proj.weight}
    reference.load_state_dict({f"{name}.weight": w for name, w in weights.items()})
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(block(x), reference(x).detach(), rtol=1e-5, atol=1e-5)


def test_merged_checkpoints_fill_the_whole_matrix() -> None:
    assert list(SwiGLU(8, 4, merged=True).gate_up_proj.places("mlp.gate_up_proj")) == [
        "mlp.gate_up_proj.weight"
    ]
    attention = Attention(0, SPEC, HIDDEN, merged=True)
    places = attention.qkv_proj.places("self_attn.qkv_proj")
    assert {name: place.shape[0] for name, place in places.items()} == {
        "self_attn.qkv_proj.weight": (8 + 4 + 4) * 8
    }
