"""Mixture of experts: routers against formulas written out, experts against a loop over tokens."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sparseengine import ops
from sparseengine.bench import moe as bench
from sparseengine.errors import ConfigError
from sparseengine.models.loading import MODELS
from sparseengine.nn.linear import make_deterministic
from sparseengine.nn.moe import Experts, MoE, Router, RouterSpec

CHECKS = Path(__file__).parents[1] / "gpu" / "interpreted_moe.py"
SOFTMAX = RouterSpec(num_experts=6, top_k=3)
GROUPS: dict[str, Any] = {"num_experts": 12, "top_k": 3, "num_groups": 4, "top_groups": 2}
SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "correction_bias": True, "epsilon": 1e-20}
ROUTERS = {
    "softmax": SOFTMAX,
    "softmax-normalised": RouterSpec(num_experts=6, top_k=3, normalise=True),
    "scaled": RouterSpec(num_experts=6, top_k=2, scale=16.0),
    "groups-by-max": RouterSpec(**GROUPS, scale=2.0),
    "sigmoid": RouterSpec(num_experts=6, top_k=3, **SIGMOID),
    "sigmoid-normalised": RouterSpec(num_experts=6, top_k=3, **SIGMOID, normalise=True, scale=1.8),
    "groups-by-two": RouterSpec(**GROUPS, **SIGMOID, group_score="top2_sum", normalise=True),
    "dropped-count-as-zero": RouterSpec(**GROUPS, **SIGMOID, masked_score=0.0),
}


def route_by_hand(
    logits: list[float], bias: list[float], spec: RouterSpec
) -> list[tuple[int, float]]:
    """(expert, weight) of one token, best first."""
    if spec.scoring == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(spec.num_groups)]
    best = 1 if spec.group_score == "max" else 2
    marks = [sum(sorted(group)[-best:]) for group in groups]
    kept = sorted(range(spec.num_groups), key=lambda g: (-marks[g], g))[: spec.top_groups]
    choice = [c if i // size in kept else spec.masked_score for i, c in enumerate(choice)]
    chosen = sorted(range(spec.num_experts), key=lambda i: (-choice[i], i))[: spec.top_k]
    weights = [scores[i] for i in chosen]
    if spec.normalise:
        weights = [w / (sum(weights) + spec.epsilon) for w in weights]
    return [(i, w * spec.scale) for i, w in zip(chosen, weights, strict=True)]


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_equal_their_formulas(router: str) -> None:
    spec = ROUTERS[router]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, spec.num_experts, generator=generator)
    bias = None
    if spec.correction_bias:  # large and mostly negative: choice and weights differ in order
        bias = torch.randn(spec.num_experts, generator=generator) - 0.5
    ids, weights = ops.moe_route(logits, bias, spec)
    assert weights.dtype == torch.float32
    rows = [0.0] * spec.num_experts if bias is None else bias.tolist()
    for token in range(200):
        expected = route_by_hand(logits[token].tolist(), rows, spec)
        assert ids[token].tolist() == [i for i, _ in expected]
        wanted = torch.tensor([w for _, w in expected])
        torch.testing.assert_close(weights[token], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("router", ROUTERS)
def test_equal_scores_go_to_the_smaller_index(router: str) -> None:
    spec = ROUTERS[router]
    bias = torch.zeros(spec.num_experts) if spec.correction_bias else None
    for logits in (torch.zeros(2, spec.num_experts), torch.full((2, spec.num_experts), torch.nan)):
        ids, _ = ops.moe_route(logits, bias, spec)
        assert ids.tolist() == [list(range(spec.top_k))] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 7}, "top_k 7 is not 1 to 6"),
        ({"top_k": 0}, "top_k 0 is not 1 to 6"),
        ({"num_groups": 4}, "6 experts do not make 4 equal groups"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups 3 is not 1 to 2"),
        ({"num_groups": 3, "top_groups": 1}, "top_k 3 is not 1 to 2, the experts of 1 of 3 groups"),
        ({"num_groups": 6, "top_groups": 6, "group_score": "top2_sum"}, "have no two best scores"),
    ],
)
def test_impossible_routers(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSpec(**{"num_experts": 6, "top_k": 3, **wrong})


def experts_by_hand(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    inner = down.shape[2]
    rows = []
    for row, chosen, scales in zip(x, ids.tolist(), weights, strict=True):
        total = torch.zeros_like(row)
        for expert, scale in zip(chosen, scales, strict=True):
            gate, up = gate_up[expert, :inner] @ row, gate_up[expert, inner:] @ row
            total += scale * (down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def stacks(experts: int = 5, hidden: int = 12, inner: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)


@pytest.mark.parametrize("row_tile", [None, 16])
@pytest.mark.parametrize(
    "ids",
    [
        torch.rand(40, 5, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :3],
        torch.full((40, 1), 2),  # one expert gets all, four get none
        torch.tensor([[4, 0]]),
    ],
    ids=["even", "one-expert", "one-token"],
)
def test_experts_equal_a_loop_over_tokens(ids: Tensor, row_tile: int | None) -> None:
    gate_up, down = stacks()
    x, weights = torch.randn(len(ids), 12), torch.rand(ids.shape)
    out = ops.moe_experts(x, gate_up, down, ids, weights, row_tile)
    torch.testing.assert_close(out, experts_by_hand(x, gate_up, down, ids, weights))


def test_no_tokens() -> None:
    x, nothing = torch.empty(0, 12), torch.empty(0, 3)
    assert ops.moe_experts(x, *stacks(), nothing.long(), nothing).shape == (0, 12)
    ids, weights = ops.moe_route(torch.empty(0, 6), None, SOFTMAX)
    assert ids.shape == weights.shape == (0, 3)
    block = filled(MoE(12, 7, SOFTMAX, shared_size=5))
    assert block(x).shape == (0, 12)


def filled(module: MoE) -> MoE:
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.4)
    return module


def test_a_row_of_nan_stays_alone() -> None:
    block = filled(MoE(12, 7, SOFTMAX, shared_size=5))
    x = torch.randn(20, 12)
    clean = block(x)
    x[7] = torch.nan
    poisoned = block(x)
    others = torch.arange(20) != 7
    assert torch.isnan(poisoned[7]).all()
    torch.testing.assert_close(poisoned[others], clean[others])
    assert torch.isfinite(poisoned[others]).all()


def test_the_block_is_router_experts_and_shared_expert() -> None:
    spec = RouterSpec(num_experts=6, top_k=2, **SIGMOID, normalise=True, scale=1.8)
    block = filled(MoE(12, 7, spec, shared_size=5))
    x = torch.randn(9, 12)
    assert block.gate.e_score_correction_bias is not None
    assert block.shared_experts is not None
    ids, weights = ops.moe_route(
        x @ block.gate.weight.T, block.gate.e_score_correction_bias.data, spec
    )
    stack = (block.experts.gate_up_proj.data, block.experts.down_proj.data)
    expected = experts_by_hand(x, *stack, ids, weights) + block.shared_experts(x)
    torch.testing.assert_close(block(x), expected)
    alone = MoE(12, 7, SOFTMAX)
    assert alone.shared_experts is None
    assert "gate.e_score_correction_bias" not in dict(alone.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_router_logits_are_not_rounded_to_the_model_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    router, x = Router(256, SOFTMAX, dtype=dtype), torch.randn(9, 256).to(dtype)
    router.weight.data.normal_()
    router.prepare()
    weight = router.weight.to_dense() if router.weight.is_mkldnn else router.weight
    exact = x.double() @ weight.double().T
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert router(x).dtype == wide
    assert (router(x) - exact).abs().max() < 1e-4


def test_deterministic_rows_are_their_own() -> None:
    block = filled(MoE(64, 40, SOFTMAX, shared_size=24))
    make_deterministic(block)
    assert block.experts.row_tile == block.gate.row_tile == 16
    x = torch.randn(50, 64)
    whole = block(x)
    for part in (slice(0, 1), slice(3, 20), slice(20, 50)):
        assert torch.equal(block(x[part]), whole[part])


def test_checkpoint_names_fill_the_stacks() -> None:
    experts = Experts(3, 8, 5)
    places = experts.places("mlp.experts")
    assert len(places) == 9
    for number, view in enumerate(places.values()):
        view.fill_(float(number))
    assert places["mlp.experts.1.up_proj.weight"].shape == (5, 8)
    assert places["mlp.experts.1.down_proj.weight"].shape == (8, 5)
    firsts = experts.gate_up_proj[:, :, 0].tolist()
    assert firsts == [[3.0 * i] * 5 + [3.0 * i + 1] * 5 for i in range(3)]
    assert experts.down_proj[:, 0, 0].tolist() == [2.0, 5.0, 8.0]
    for name, (stack, replaces) in experts.stacked_places("mlp.experts").items():
        assert set(replaces) <= set(places), name
        assert stack.shape[0] == 3
        assert sum(places[r].numel() for r in replaces) == stack.numel()


QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}


def build(**overrides: Any) -> Any:
    config = {k: v for k, v in {**QWEN3_MOE, **overrides}.items() if v is not None}
    family = MODELS.get("Qwen3MoeForCausalLM")
    return family(config, family.build_spec(config, torch.float32))


def test_both_names_of_the_number_of_experts() -> None:
    for overrides in ({}, {"num_experts": None, "num_local_experts": 4}):
        gate = build(**overrides).model.layers[1].mlp.gate
        assert (gate.spec.num_experts, gate.spec.normalise) == (4, False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts": None}, "num_local_experts must be a whole number"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is larger than num_experts 4"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_impossible_configs(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**overrides)


def test_kernels_equal_their_twins_under_the_interpreter() -> None:
    """In a process of its own: Triton decides whether to interpret when it is first imported."""
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout or "[100%]" in done.stdout


def test_launch_shapes_fit_the_shared_memory() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from sparseengine.ops.triton.moe import plan_tiles

    for item_bytes in (2, 4):
        for num_pairs in (8, 128, 2560, 4000, 65536):
            pair = plan_tiles(num_pairs, 128, item_bytes)
            assert pair[0].rows == pair[1].rows, "both products walk the same tiles"
            for parts, tile in zip((2, 1), pair, strict=True):
                assert tile.fitted(parts, item_bytes, 232_448) == tile
                small = tile.fitted(parts, item_bytes, 101_376)
                size = (small.rows + parts * small.cols) * small.depth * item_bytes * small.stages
                assert size <= 101_376
                assert small.depth >= 16


def test_the_benchmark_counts_the_bytes_of_an_expert() -> None:
    qwen, glm = bench.LAYERS
    assert (qwen.expert_bytes, glm.expert_bytes) == (9_437_184, 18_874_368)
