"""Expected Attention: the closed form, rotations taken back and averaged, chunks that add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import oracles
from contract.driver import make
from contract.reads import drive, random_layer, spec_of
from sparseengine.core.method import LayerStep
from sparseengine.core.specs import ModelSpec, Per
from sparseengine.errors import UnsupportedError
from sparseengine.methods import METHODS
from sparseengine.methods.expected_attention import ExpectedAttention
from sparseengine.models import model_spec
from sparseengine.nn.rope import RopeSpec, RotaryEmbedding, rope_spec, rotary

NAME, LENGTH, DIM = "expected_attention", 61, 8
Layer = tuple[Tensor, Tensor, Tensor]

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 100.0},
    "half": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_theta": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip


def rope(name: str) -> RopeSpec:
    return rope_spec({"max_position_embeddings": 512, **ROPES[name]}, DIM)


def model_of(rope: RopeSpec | None = None) -> ModelSpec:
    model = spec_of(8, 2, DIM, torch.float64)
    return model if rope is None else replace(model, rotaries=(rotary(rope),))


def layer(seed: int = 3, length: int = LENGTH + 1) -> Layer:
    q, k, v = random_layer(length, 8, 2, DIM, seed)
    return q.double(), k.double(), v.double()


def scores(
    model: ModelSpec, qkv: Layer, steps: tuple[int, ...] = (LENGTH, 1), **knobs: Any
) -> Tensor:
    """What the method gave to the prompt's keys: [Hkv, L]."""
    method = make(model, NAME, **knobs)
    assert isinstance(method, ExpectedAttention)
    seen: list[Tensor] = []
    inner = method.score

    def spy(at: LayerStep, chunk: int) -> Tensor:
        seen.append(inner(at, chunk))
        return seen[-1]

    method.score = spy  # type: ignore[method-assign]
    drive(method, *qkv, steps, 20, 1)
    assert len(seen) == 1, "one eviction, when the prompt ends"
    return seen[0]


@pytest.mark.parametrize("sink", [0, 4])
@pytest.mark.parametrize("epsilon", [0.0, 0.01])
@pytest.mark.parametrize("value_norm", [True, False])
def test_scores_are_the_closed_form(sink: int, epsilon: float, value_norm: bool) -> None:
    q, k, v = layer()
    got = scores(model_of(), (q, k, v), sink=sink, epsilon=epsilon, value_norm=value_norm)
    prompt = q[:LENGTH], k[:LENGTH], v[:LENGTH] if value_norm else None
    expected = oracles.expected_attention_scores(*prompt, sink, epsilon)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def rotated(rope: RopeSpec, qkv: Layer) -> Layer:
    turn = RotaryEmbedding(rope)(torch.arange(len(qkv[0])), torch.float64)
    return turn.apply(qkv[0]), turn.apply(qkv[1]), qkv[2]


def matrices(rope: RopeSpec, positions: Tensor) -> Tensor:
    """The rotation of each position as a matrix, [T, D, D], columns being turned unit vectors."""
    eye = torch.eye(DIM, dtype=torch.float64).expand(len(positions), -1, -1)
    return RotaryEmbedding(rope)(positions, torch.float64).apply(eye).mT


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("future", [1, 40])
def test_rotations_are_taken_back_and_averaged(name: str, future: int) -> None:
    """Against moments of the queries before rotation and a mean of explicit matrices."""
    sink, (q, k, v) = 2, layer()
    found = rotated(rope(name), (q, k, v))
    got = scores(model_of(rope(name)), found, (13, LENGTH - 13, 1), sink=sink, future=future)
    mean_rotation = matrices(rope(name), torch.arange(LENGTH, LENGTH + future)).mean(0)
    for h in range(2):
        total = torch.zeros(LENGTH - sink, dtype=torch.float64)
        for g in range(4 * h, 4 * h + 4):
            seen = q[sink:LENGTH, g]
            mean, cov = mean_rotation @ seen.mean(0), torch.cov(seen.T, correction=0)
            cov = mean_rotation @ cov @ mean_rotation.T
            keys = found[1][sink:LENGTH, h]
            z = keys @ mean / DIM**0.5 + torch.einsum("ld,de,le->l", keys, cov, keys) / (2 * DIM)
            total += z.softmax(0) / 4
        expected = total * v[sink:LENGTH, h].norm(dim=-1)
        torch.testing.assert_close(got[h, sink:], expected, rtol=1e-5, atol=1e-8)
    assert (got[:, :sink] == 0).all()


@pytest.mark.parametrize("name", [None, "default", "yarn"])
def test_chunks_add_up(name: str | None) -> None:
    which = None if name is None else rope(name)
    qkv = layer() if which is None else rotated(which, layer())
    whole = scores(model_of(which), qkv, sink=5)
    for steps in ((3, 4, LENGTH - 7, 1), (*(7,) * 8, 5, 1), (*(1,) * LENGTH, 1)):
        torch.testing.assert_close(scores(model_of(which), qkv, steps, sink=5), whole)


def test_constant_queries_and_the_next_position_give_plain_attention() -> None:
    which, (q, k, v) = rope("default"), layer()
    q = q[:1].expand(LENGTH + 1, -1, -1).contiguous()  # every token asks the same
    queries, keys, _ = rotated(which, (q, k, v))
    for covariance in (True, False):  # nothing is spread
        got = scores(
            model_of(which), (queries, keys, v),
            sink=0, future=1, covariance=covariance, value_norm=False,
        )  # fmt: skip
        for h in range(2):
            logits = queries[LENGTH, 4 * h : 4 * h + 4] @ keys[:LENGTH, h].T / DIM**0.5
            torch.testing.assert_close(got[h], logits.softmax(-1).mean(0), rtol=1e-5, atol=1e-7)


def test_the_closed_form_is_the_mean_over_sampled_queries() -> None:
    q, k, v = layer()
    k[:, :, 1:] *= 0.6
    got = scores(model_of(), (q, k, v), sink=0, value_norm=False)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(200_000, DIM, generator=rng, dtype=torch.float64)
    total = torch.zeros(LENGTH, dtype=torch.float64)
    for g in range(4):
        seen = q[:LENGTH, g]
        values, vectors = torch.linalg.eigh(torch.cov(seen.T, correction=0))
        drawn = seen.mean(0) + (noise * values.clamp_min(0).sqrt()) @ vectors.T
        weight = (drawn @ k[:LENGTH, 0].T / DIM**0.5).exp().mean(0)
        total += weight / weight.sum() / 4
    torch.testing.assert_close(got[0], total, rtol=0.03, atol=0)


def test_keys_that_the_prompt_keeps_asking_for_stay() -> None:
    q, k, v = layer(length=201)
    q[:, :, 3] += 2  # a common direction of all queries
    k[70, :, 3] = 6
    method = make(model_of(), NAME)
    assert all(70 in row for row in drive(method, q, k, v, [200, 1], 20, 1).reads[-1])


def test_moments_are_held_while_the_prompt_runs_only() -> None:
    with_spread, mean_alone = (
        {a.name: a for a in make(model_of(), NAME, covariance=c).aux()} for c in (True, False)
    )
    assert set(with_spread) - set(mean_alone) == {"query_products"}
    for spec in with_spread.values():
        assert spec.per is Per.REQUEST
        assert spec.lifetime == "prefill"
    assert with_spread["query_products"].dims(model_of().layers[0]) == (8, DIM, DIM)


def config(architecture: str, **extra: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "vocab_size": 100, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", **extra,
    }  # fmt: skip


def test_a_model_spec_says_how_its_layers_rotate() -> None:
    spec = model_spec(config("LlamaForCausalLM", rope_theta=100.0), torch.float32)
    assert spec.rotaries == (rotary(rope_spec(config("x", rope_theta=100.0), 16)),) * 2
    assert len(spec.rotaries[0].inv_freq) == 8
    ExpectedAttention(ExpectedAttention.config_class(), spec)


def test_rotations_that_depend_on_the_length_are_refused() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    spec = model_spec(config("LlamaForCausalLM", rope_scaling=scaling), torch.float32)
    with pytest.raises(UnsupportedError, match="layer 0 depend on the text's length"):
        ExpectedAttention(ExpectedAttention.config_class(), spec)


def test_it_needs_no_question_and_decodes_without_hooks() -> None:
    traits = METHODS.get(NAME).traits
    assert not traits.query_aware
    assert not traits.decode_hooks
    assert traits.graph_safe
