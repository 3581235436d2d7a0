"""cos and sin equal transformers for every scaling rule, in both spellings of the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave,
    yarn_get_mscale,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from sparseengine.errors import ConfigError
from sparseengine.models import model_spec
from sparseengine.nn.rope import RotaryEmbedding, mla_scale_factor, rope_spec

HEAD_DIM, MAX_POSITION = 16, 512
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.2, 2.5, 3.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 12.0, 16.0],
}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-no-original": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-no-original": {"rope_type": "yarn", "factor": 8.0},
    "yarn-attention-factor-1": {"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.0},
    "yarn-equal-mscales": {"rope_type": "yarn", "factor": 16.0, "mscale": 1, "mscale_all_dim": 1},
    "yarn-deepseek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 128,
    },
    "yarn-one-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707},
    "yarn-betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2},
    "yarn-not-truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "yarn-shrink": {"rope_type": "yarn", "factor": 0.5},
    "longrope": {**LONG, "original_max_position_embeddings": 64},
    "longrope-short": {**LONG, "original_max_position_embeddings": 4096},
    "longrope-factor": {**LONG, "factor": 8.0, "original_max_position_embeddings": 64},
    "longrope-attention-factor": {
        **LONG,
        "attention_factor": 1.19,
        "original_max_position_embeddings": 64,
    },
}


def old_spelling(rope: dict[str, Any], **config: Any) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as before transformers 5."""
    scaling = None if rope["rope_type"] == "default" else dict(rope)
    return {"rope_theta": 7000.0, "rope_scaling": scaling, **config}


def older_spelling(rope: dict[str, Any], **config: Any) -> dict[str, Any]:
    """The same with `type` for `rope_type`."""
    scaling = {"type" if k == "rope_type" else k: v for k, v in rope.items()}
    return {"rope_theta": 7000.0, "rope_scaling": scaling, **config}


def new_spelling(rope: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 7000.0, **rope}, **config}


SPELLINGS = [old_spelling, older_spelling, new_spelling]


def ours(
    config: dict[str, Any], positions: Tensor, length: int | None = None
) -> tuple[Tensor, Tensor]:
    config = {"max_position_embeddings": MAX_POSITION, **config}
    lengths = None if length is None else torch.full_like(positions, length)
    rotation = RotaryEmbedding(rope_spec(config, HEAD_DIM))(positions, torch.float32, lengths)
    return tuple(torch.cat((x, x), dim=-1)[:, 0] for x in (rotation.cos, rotation.sin))


def theirs(config: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    hf = LlamaConfig(
        **{
            "hidden_size": 64,
            "num_attention_heads": 4,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": MAX_POSITION,
            **config,
        }
    )
    cos, sin = LlamaRotaryEmbedding(hf)(torch.empty(1), positions[None])
    return cos[0], sin[0]


def assert_equal(config: dict[str, Any], positions: Tensor) -> None:
    length = int(positions.max()) + 1  # the positions of one prompt
    mine = ours(config, positions, length)
    for found, expected in zip(mine, theirs(config, positions), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("case", CASES)
def test_cos_and_sin_equal_transformers(case: str, spelling: Any) -> None:
    assert_equal(spelling(CASES[case]), torch.arange(MAX_POSITION))


@pytest.mark.parametrize("case", [c for c in CASES if c != "default"])
def test_each_case_can_fail(case: str) -> None:
    """A case whose cos equals plain RoPE's would prove nothing; dynamic starts past the limit."""
    positions = torch.tensor([MAX_POSITION + 9]) if case == "dynamic" else torch.arange(99)
    plain = ours(new_spelling(CASES["default"]), positions)[0]
    scaled = ours(new_spelling(CASES[case]), positions)[0]
    assert not torch.allclose(plain, scaled, atol=1e-3)


def test_explicit_attention_factor_is_not_applied_twice() -> None:
    spec = rope_spec({"max_position_embeddings": 512, **new_spelling(CASES["yarn"])}, HEAD_DIM)
    assert RotaryEmbedding(spec).attention_factor == pytest.approx(1.2079, abs=1e-4)
    one = new_spelling(CASES["yarn-attention-factor-1"])
    spec = rope_spec({"max_position_embeddings": 512, **one}, HEAD_DIM)
    assert RotaryEmbedding(spec).attention_factor == 1.0


@pytest.mark.parametrize("case", CASES)
def test_scaling_leaves_the_softmax_scale_alone(case: str) -> None:
    """As in transformers' Llama and Qwen3: the factor is on cos and sin, hence in the keys."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "max_position_embeddings": MAX_POSITION,
        **new_spelling(CASES[case]),
    }
    assert model_spec(config, torch.float32).layers[0].softmax_scale == 16**-0.5


@pytest.mark.parametrize("past", [0, 1, 300])
@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_past_the_limit(case: str, past: int) -> None:
    """A decoded token, and all tokens of a prompt that is longer than the limit."""
    assert_equal(new_spelling(CASES[case]), torch.tensor([MAX_POSITION + past]))
    assert_equal(new_spelling(CASES[case]), torch.arange(MAX_POSITION + past))


@pytest.mark.parametrize(("length", "factors"), [(64, "short_factor"), (65, "long_factor")])
def test_longrope_takes_the_long_factors_for_longer_texts_only(length: int, factors: str) -> None:
    config, positions = new_spelling(CASES["longrope"]), torch.arange(60)
    wanted = new_spelling({**CASES["longrope"], "short_factor": LONG[factors]})
    assert torch.equal(ours(config, positions, length)[0], ours(wanted, positions, 60)[0])


@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_rules_by_length_depend_neither_on_the_batch_nor_on_chunks(case: str) -> None:
    """A token's rotation follows from its own text: another's length changes nothing."""
    config = new_spelling(CASES[case])
    alone, together = torch.tensor([5]), torch.tensor([5, MAX_POSITION + 100])
    assert torch.equal(ours(config, alone)[0][0], ours(config, together)[0][0])
    whole = ours(config, torch.arange(700), 700)[0]
    assert torch.equal(ours(config, torch.arange(10, 30), 700)[0], whole[10:30])
    assert not torch.allclose(ours(config, torch.arange(700))[0], whole, atol=1e-3)


def test_original_length_beside_the_rope_dictionary_wins() -> None:
    config = new_spelling(CASES["yarn"], original_max_position_embeddings=32)
    assert_equal(config, torch.arange(64))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rotation_equals_transformers(share: float) -> None:
    config = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": share},
    }
    rope, positions = RotaryEmbedding(rope_spec(config, HEAD_DIM)), torch.arange(5, 12)
    rotation = rope(positions, torch.float32)
    x = torch.randn(7, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    dim = int(HEAD_DIM * share)
    cos, sin = (torch.cat((c, c), dim=-1)[:, 0] for c in (rotation.cos, rotation.sin))
    expected, _ = apply_rotary_pos_emb(x[..., :dim], x[..., :dim], cos, sin)
    torch.testing.assert_close(rotation.apply(x)[..., :dim], expected, rtol=0, atol=1e-6)
    assert torch.equal(rotation.apply(x)[..., dim:], x[..., dim:])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_interleaved_pairs_turn_in_place(share: float) -> None:
    """Each pair of neighbours is a complex number; products are those of transformers' MLA."""
    config = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": share},
    }
    spec = rope_spec(config, HEAD_DIM, interleaved=True)
    rotation = RotaryEmbedding(spec)(torch.arange(5, 12), torch.float32)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(7, 3, HEAD_DIM, generator=generator) for _ in range(2))
    turned, dim = rotation.apply(q), int(HEAD_DIM * share)
    pairs = torch.view_as_complex(q[..., :dim].unflatten(-1, (-1, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.complex(rotation.cos, rotation.sin)).flatten(-2)
    torch.testing.assert_close(turned[..., :dim], expected, rtol=0, atol=1e-6)
    assert torch.equal(turned[..., dim:], q[..., dim:])
    if share == 1.0:
        cos, sin = (torch.cat((c, c), dim=-1)[None, :, 0] for c in (rotation.cos, rotation.sin))
        wide = [x.transpose(0, 1)[None] for x in (q, k)]
        theirs = [x[0] for x in apply_rotary_pos_emb_interleave(*wide, cos, sin)]
        mine = [x.transpose(0, 1) for x in (turned, rotation.apply(k))]
        torch.testing.assert_close(mine[0] @ mine[1].mT, theirs[0] @ theirs[1].mT)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("case", CASES)
def test_mla_scale_factor_equals_transformers(case: str, spelling: Any) -> None:
    config = {"max_position_embeddings": MAX_POSITION, **spelling(CASES[case])}
    weight = CASES[case].get("mscale_all_dim")
    expected = 1.0 if weight is None else yarn_get_mscale(CASES[case]["factor"], weight) ** 2
    assert mla_scale_factor(config) == pytest.approx(expected)
    assert (expected > 1.2) is (case in ("yarn-deepseek", "yarn-equal-mscales"))


def test_rope_scaling_beside_rope_parameters_wins_and_keeps_the_base() -> None:
    """What `hf_overrides={"rope_scaling": ...}` makes of a new config."""
    config = {**new_spelling(CASES["default"]), "rope_scaling": CASES["linear"]}
    positions = torch.arange(40)
    wanted = ours(new_spelling(CASES["linear"]), positions)[0]
    assert torch.equal(ours(config, positions)[0], wanted)


def test_factors_divide_the_frequencies() -> None:
    """llama.cpp stores llama3 scaling as divisors: the formula's own give the formula's result."""
    config = new_spelling(LLAMA3, max_position_embeddings=MAX_POSITION)
    plain = RotaryEmbedding(
        rope_spec(new_spelling(CASES["default"], max_position_embeddings=512), HEAD_DIM)
    )
    scaled = RotaryEmbedding(rope_spec(config, HEAD_DIM))
    factors = (plain.inv_freq / scaled.inv_freq).tolist()
    stored = new_spelling({"rope_type": "factors", "factors": factors})
    positions = torch.arange(MAX_POSITION)
    torch.testing.assert_close(ours(stored, positions), ours(config, positions))


def test_unknown_type_and_missing_number_are_named() -> None:
    with pytest.raises(ConfigError, match=r"rope_type 'yarm'.*did you mean 'yarn'"):
        rope_spec(new_spelling({"rope_type": "yarm"}, max_position_embeddings=8), HEAD_DIM)
    spec = rope_spec(new_spelling({"rope_type": "linear"}, max_position_embeddings=8), HEAD_DIM)
    with pytest.raises(ConfigError, match=r"'linear' needs a number 'factor'.*None"):
        RotaryEmbedding(spec)
    short = new_spelling({**LONG, "long_factor": [1.0, 2.0]}, max_position_embeddings=8)
    with pytest.raises(ConfigError, match=r"'long_factor': 8 numbers.*has 2"):
        RotaryEmbedding(rope_spec(short, HEAD_DIM))
    nested = {"rope_parameters": {"full_attention": LLAMA3}, "max_position_embeddings": 8}
    with pytest.raises(ConfigError, match=r"per layer type \(full_attention\)"):
        rope_spec(nested, HEAD_DIM)
