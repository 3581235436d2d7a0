"""Latent attention: the choice between two ways, their equality, sizes and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparseengine import ops
from sparseengine.core.specs import LayerKind
from sparseengine.errors import ConfigError, UnsupportedError
from sparseengine.models import model_spec
from sparseengine.nn.latent import HeadsUp, LatentAttention, LatentDims, expansion_pays
from sparseengine.ops import reference
from sparseengine.ops.parts import Part

GLM = LatentDims(heads=20, nope=192, rope=64, value=256, kv_rank=512, q_rank=768)
V3 = LatentDims(heads=128, nope=128, rope=64, value=128, kv_rank=512, q_rank=1536)
GLM_CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "vocab_size": 154880,
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
}


def test_layer_as_the_cache_sees_it() -> None:
    layer = GLM.layer()
    assert layer.kind is LayerKind.LATENT
    assert (layer.q_heads, layer.kv_heads, layer.head_dim, layer.value_dim) == (20, 1, 576, 512)
    assert layer.stored_dims == (576,)
    assert layer.softmax_scale == 256**-0.5
    assert V3.layer(1.5).softmax_scale == pytest.approx(1.5 * 192**-0.5)
    spec = model_spec(GLM_CONFIG, torch.bfloat16)
    assert spec.layers == (layer,) * 47


@pytest.mark.parametrize("dims", [GLM, V3])
def test_the_cheaper_way_is_chosen(dims: LatentDims) -> None:
    """Against the operations of every product, counted one by one."""

    def operations(queries: int, keys: int) -> tuple[float, float]:
        seen = sum(keys - queries + i + 1 for i in range(queries))
        absorbed = seen * (dims.kv_rank + dims.rope) + seen * dims.kv_rank
        absorbed += queries * dims.kv_rank * dims.value
        expanded = seen * (dims.nope + dims.rope) + seen * dims.value
        expanded += keys * dims.kv_rank * (dims.nope + dims.value)
        return absorbed, expanded

    for queries, keys in [(1, 1), (1, 50_000), (64, 64), (100, 9000), (3000, 3000), (512, 32768)]:
        absorbed, expanded = operations(queries, keys)
        assert expansion_pays([(queries, keys)], dims) == (expanded < absorbed)
    chunks = [(40, 4000), (2000, 2000)]
    both = [sum(pair) for pair in zip(*(operations(*c) for c in chunks), strict=True)]
    assert expansion_pays(chunks, dims) == (both[1] < both[0])
    assert not expansion_pays([], dims)
    # a decode never, a long prompt always, and in between one step from one to the other
    choices = [expansion_pays([(n, 32768)], dims) for n in range(1, 2000)]
    assert choices == sorted(choices)
    assert choices[0] is False
    assert choices[-1] is True


@pytest.mark.parametrize("row_tile", [None, 16])
@torch.inference_mode()
def test_absorbed_equals_expanded(row_tile: int | None) -> None:
    """q.k and the values of expanded rows, from the rows themselves; by formula, in float64."""
    torch.manual_seed(0)
    dims = LatentDims(heads=3, nope=5, rope=4, value=6, kv_rank=8)
    up = HeadsUp(dims, dtype=torch.float64)
    torch.nn.init.normal_(up.weight)
    up.prepare()
    up.row_tile = row_tile
    length = 21
    q = torch.randn(length, 3, 9, dtype=torch.float64)
    latent = torch.randn(length, 8, dtype=torch.float64)
    key = torch.randn(length, 4, dtype=torch.float64)
    weight = up.weight.reshape(3, 11, 8)
    keys = torch.stack([latent @ weight[h, :5].T for h in range(3)], 1)
    keys = torch.cat((keys, key[:, None].expand(-1, 3, -1)), -1)
    values = torch.stack([latent @ weight[h, 5:].T for h in range(3)], 1)
    expanded = ops.dense_attention(q, keys, values, 0.3)
    query = torch.cat((up.absorb(q[..., :5]), q[..., 5:]), -1)
    rows = torch.cat((latent, key), -1)[:, None]
    mixed = ops.dense_attention(query, rows, latent[:, None], 0.3)
    assert torch.allclose(up.values(mixed), expanded, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "dim", "value_dim"),
    [(1, 1, 2, 2, 8, 8), (7, 7, 4, 2, 12, 6), (5, 40, 4, 4, 6, 20), (33, 90, 3, 1, 16, 16)],
)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_dense_attention(
    dtype: torch.dtype,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    softcap: float,
) -> None:
    """The twin against a formula, head by head; the fast route against the twin."""
    torch.manual_seed(0)
    q = torch.randn(queries, heads, dim).to(dtype)
    k, v = torch.randn(keys, kv_heads, dim).to(dtype), torch.randn(keys, kv_heads, value_dim)
    v = v.to(dtype)
    want = torch.empty(queries, heads, value_dim, dtype=torch.float64)
    for h in range(heads):
        at = h * kv_heads // heads
        logits = q[:, h].double() @ k[:, at].double().T * 0.4
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        future = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        want[:, h] = logits.masked_fill(future, -torch.inf).softmax(-1) @ v[:, at].double()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10}.get(dtype, 2e-2)
    for found in (
        reference.dense_attention(q, k, v, 0.4, softcap),
        ops.dense_attention(q, k, v, 0.4, softcap),
    ):
        assert found.dtype == dtype
        assert torch.allclose(found.double(), want, atol=tolerance, rtol=tolerance)


def test_dense_attention_works_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(30, 2, 8), torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    whole = reference.dense_attention(q, k, v, 0.3)
    monkeypatch.setattr("sparseengine.ops.reference.dense._LOGITS", 7 * 2 * 50)
    assert torch.allclose(reference.dense_attention(q, k, v, 0.3), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"kv_lora_rank": None}, ConfigError, "kv_lora_rank must be a whole number"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act 'gelu'"),
    ],
)
def test_configs_that_are_refused(
    overrides: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model_spec({**GLM_CONFIG, **overrides}, torch.float32)


def test_scratch_memory_of_an_expansion_is_bounded_by_heads_at_once() -> None:
    block = LatentAttention(0, GLM, 64, scale=1.0, dtype=torch.bfloat16, device="meta")
    assert block.scratch_bytes(0, 8192) == 0
    row, head = 3 * 576 * 2, (256 + 256) * 2
    result = (8192 + 1024) * 20 * (256 * 2 + 4)
    most = 8 * result + (8192 + 1024) * 20 * (256 * 4 + 4)
    for length in (131_072, 1 << 20):
        found = block.scratch_bytes(length, 8192) - length * row
        assert 0 < found - 16384 * 20 * head <= most, "parts of 16,384 keys, nine results"
    many = LatentAttention(
        0, replace(GLM, heads=128), 64, scale=1.0, dtype=torch.bfloat16, device="meta"
    )
    found = many.scratch_bytes(131_072, 8192) - 131_072 * row
    assert found <= (1 << 29) + most * 32 / 20, "32 of 128 heads at once"


def test_a_part_behind_the_rows_end_expands_to_zeros() -> None:
    block = LatentAttention(0, replace(GLM, heads=2), 64, scale=1.0)
    torch.nn.init.normal_(block.kv_b_proj.weight)
    rows, weight = torch.randn(21, 576), block.kv_b_proj.per_head()
    expansion = block.kv_b_proj.expansion(0, 2)
    keys, values = block._expand(rows, expansion, Part(16, 8, causal=True))
    assert keys.shape == (8, 2, 256)
    assert values.shape == (8, 2, 256)
    for h in range(2):
        near = {"rtol": 1e-5, "atol": 1e-4}  # sums of 512 products of unit size
        torch.testing.assert_close(values[:5, h], rows[16:, :512] @ weight[h, 192:].T, **near)
        torch.testing.assert_close(keys[:5, h, :192], rows[16:, :512] @ weight[h, :192].T, **near)
        assert torch.equal(keys[:5, h, 192:], rows[16:, 512:])
    assert not keys[5:].any()
    assert not values[5:].any()
