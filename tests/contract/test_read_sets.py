"""(5) and (10): what each head reads equals an independent oracle, in ascending positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import oracles
from contract.cases import CASES, INV_FREQ
from contract.driver import PAGE, make
from contract.reads import Driven, drive, random_layer, spec_of
from contract.toy import toy_spec
from sparseengine.core.params import SparseParams
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.errors import RequestError
from sparseengine.methods import METHODS
from sparseengine.methods.adakv import AdaKV
from sparseengine.methods.pending import Pending

HEADS = [(8, 2), (4, 2), (4, 1)]
CHUNKINGS = {"whole": None, "sevens": 7, "one_at_the_end": -1}


def steps_for(length: int, chunking: int | None, block: int | None = None) -> list[int]:
    """Prefill chunk sizes: whole, of n tokens, or all but one token and then one."""
    sizes, at = [], 0
    while at < length:
        size = length - at if chunking is None else chunking
        if chunking == -1:
            size = length - 1 - at if at < length - 1 else 1
        if block is not None:
            size = min(size, block - at % block)
        sizes.append(min(size, length - at))
        at += sizes[-1]
    return sizes


def run(
    name: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    length: int,
    budget: int,
    chunking: int | None = None,
    page_size: int = PAGE,
    **knobs: Any,
) -> Driven:
    q, k, v = qkv
    method = make(spec_of(q.shape[1], k.shape[1], k.shape[2]), name, page_size, **knobs)
    decodes = len(k) - length
    steps = [*steps_for(length, chunking, method.prefill_block()), *[1] * decodes]
    return drive(method, q, k, v, steps, budget, decodes, page_size)


Oracle = Callable[[Tensor, Tensor, int], oracles.Rows]
SCORED: dict[str, tuple[str, dict[str, Any], Oracle]] = {
    "knorm": (
        "knorm",
        {"skip_layers": (), "sink": 3, "recent": 5},
        lambda q, k, b: oracles.evict(oracles.knorm_scores(q, k), b, 3, 5),
    ),
    "keydiff": (
        "keydiff",
        {"sink": 3, "recent": 5},
        lambda q, k, b: oracles.evict(oracles.keydiff_scores(q, k), b, 3, 5),
    ),
    "keydiff_blocks": (
        "keydiff",
        {"sink": 3, "recent": 5, "block_tokens": 16},
        lambda q, k, b: oracles.blockwise(
            oracles.keydiff_scores, q, k, 16, lambda s: oracles.evict(s, b, 3, 5)
        ),
    ),
    "expected_attention": (
        "expected_attention",
        {"sink": 3, "value_norm": False},
        lambda q, k, b: oracles.evict(oracles.expected_attention_scores(q, k, None, 3), b, 3, 0),
    ),
    "snapkv": (
        "snapkv",
        {"window": 8, "kernel": 5, "sink": 3},
        lambda q, k, b: oracles.evict(oracles.snapkv_scores(q, k, 8, 5), b, 3, 8),
    ),
    "snapkv_blocks": (
        "snapkv",
        {"window": 3, "kernel": 3, "sink": 2, "block_tokens": 12},
        lambda q, k, b: oracles.snapkv_blocks(q, k, b, 12, 3, 3, 2),
    ),
    "snapkv_avg": (
        "snapkv",
        {"window": 8, "kernel": 5, "sink": 0, "pooling": "avg"},
        lambda q, k, b: oracles.evict(oracles.snapkv_scores(q, k, 8, 5, "avg"), b, 0, 8),
    ),
    "pyramidkv": (  # one layer gets the whole budget; several: tests/unit/test_methods_pyramidkv.py
        "pyramidkv",
        {"window": 8, "kernel": 5, "sink": 3},
        lambda q, k, b: oracles.evict(oracles.snapkv_scores(q, k, 8, 5), b, 3, 8),
    ),
    "rkv": ("rkv", {}, lambda q, k, b: oracles.rkv(q, k, b, len(k))),
    "skipkv": (  # nothing was said, so none of it again; tests/unit/test_methods_skipkv.py
        "skipkv",
        {"importance": 0.07},
        lambda q, k, b: oracles.rkv(q, k, b, len(k)),
    ),
    "h2o": ("h2o", {}, lambda q, k, b: oracles.h2o(q, k, b, len(k))),
    "tova_prompt": (  # its decode steps: tests/unit/test_methods_tova.py
        "tova",
        {"burst": 0},
        lambda q, k, b: oracles.evict(oracles.tova_scores(q, k), b, 0, 1),
    ),
    "kvzip": (
        "kvzip",
        {"chunk": 16, "lead": 3, "sink": 3, "recent": 5},
        lambda q, k, b: oracles.adakv(oracles.kvzip_scores(q, k, 16, 3, 3), b, 0.0, 3, 5),
    ),
    "kvzip_uniform": (
        "kvzip",
        {"chunk": 7, "lead": 9, "sink": 3, "recent": 5, "prefix": (0,), "form": "uniform"},
        lambda q, k, b: oracles.evict(oracles.kvzip_scores(q, k, 7, 9, 3, (0,)), b, 3, 5),
    ),
    "adakv": (
        "adakv",
        {"window": 8, "kernel": 5, "sink": 3},
        lambda q, k, b: oracles.adakv(oracles.snapkv_scores(q, k, 8, 5), b, 0.2, 3, 8),
    ),
    "adakv_knorm": (
        "adakv",
        {"scorer": "knorm", "skip_layers": (), "sink": 3, "recent": 5, "alpha": 0.0},
        lambda q, k, b: oracles.adakv(oracles.knorm_scores(q, k), b, 0.0, 3, 5),
    ),
}


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_scored_eviction_keeps_what_the_oracle_keeps(
    name: str, heads: tuple[int, int], chunking: str
) -> None:
    method, knobs, oracle = SCORED[name]
    length = 45
    qkv = random_layer(length + 3, *heads, seed=heads[0])
    q, k, _ = (x[:length] for x in qkv)
    for budget in (8, 16, 23, length - 1, length):  # 8 is the window alone; length changes nothing
        got = run(method, qkv, length, budget, CHUNKINGS[chunking], **knobs)
        kept = oracle(q, k, budget)
        for i in range(3):  # decode appends and evicts nothing
            now = [[*row, *range(length, length + i + 1)] for row in kept]
            assert got.reads[i - 3] == now, f"budget {budget}, decode {i}"
        assert sum(map(len, kept)) == len(kept) * min(budget, length), "the total is exact"


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize(("length", "budget"), [(1, 1), (5, 1), (5, 3), (7, 7), (9, 2), (40, 1)])
def test_prompts_shorter_than_the_window_and_tiny_budgets(
    name: str, length: int, budget: int
) -> None:
    method, knobs, oracle = SCORED[name]
    qkv = random_layer(length + 1, seed=length)
    got = run(method, qkv, length, budget, None, **knobs)
    kept = oracle(qkv[0][:length], qkv[1][:length], budget)
    assert got.reads[-1] == [[*row, length] for row in kept]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("budget", [1, 5, 8, 13, 24])
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_streaming_reads_sinks_and_recent(
    aligned: bool, block: int, budget: int, chunking: str
) -> None:
    length, decodes, sink = 45, 11, 3
    qkv = random_layer(length + decodes)
    got = run(
        "streaming_llm", qkv, length, budget, CHUNKINGS[chunking],
        sink=sink, block_tokens=block, page_aligned=aligned,
    )  # fmt: skip
    for i in range(decodes):
        now = length + i
        kept = oracles.streaming(now, budget, sink, PAGE, aligned)
        assert got.reads[i - decodes] == [[*kept, now]] * 2
        assert len(kept) <= budget


def test_streaming_attends_to_sinks_recent_and_its_own_block_in_prefill() -> None:
    qkv = random_layer(49)
    got = run("streaming_llm", qkv, 48, 12, 16, sink=4, block_tokens=16)
    assert got.reads[0][0] == list(range(16))
    assert got.reads[1][0] == [*range(4), *range(8, 16), *range(16, 32)]
    assert got.reads[2][0] == [*range(4), *range(24, 32), *range(32, 48)]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("budget", [1, 5, 8, 13, 24])
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_duo_reads_everything_in_retrieval_heads_alone(
    aligned: bool, block: int, budget: int, chunking: str
) -> None:
    length, decodes, sink = 45, 11, 3
    qkv = random_layer(length + decodes, 8, 4)
    got = run(
        "duo_attention", qkv, length, budget, CHUNKINGS[chunking],
        sink=sink, block_tokens=block, page_aligned=aligned,
    )  # fmt: skip
    for i in range(decodes):
        now = length + i
        kept = oracles.duo(now, budget, sink, PAGE, aligned, (True, True, False, False))
        assert got.reads[i - decodes] == [[*row, now] for row in kept]


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("budget", [1, 12, 17, 30, 50, 64])
def test_quest_reads_the_pages_with_the_highest_bound(
    heads: tuple[int, int], chunking: str, budget: int
) -> None:
    length, decodes = 45, 12
    qkv = random_layer(length + decodes, *heads, seed=budget)
    got = run("quest", qkv, length, budget, CHUNKINGS[chunking], dense_layers=0)
    for i in range(decodes):
        n = length + i + 1
        expected = oracles.quest(qkv[0][:n], qkv[1][:n], budget, PAGE)
        assert got.reads[i - decodes] == expected
        assert all(len(row) <= max(budget, 3 * PAGE) for row in expected)


@pytest.mark.parametrize("digest", ["cuboid", "representatives", "mean"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("budget", [1, 12, 30, 50])
def test_infllm_recalls_the_pages_whose_digest_matches(
    digest: str, heads: tuple[int, int], chunking: str, budget: int
) -> None:
    length, decodes = 45, 12
    qkv = random_layer(length + decodes, *heads, seed=budget)
    for sinks, recent, least, few in ((2, 2, 5, 4), (1, 1, 3, 2), (1, 4, 3, 99)):
        knobs = {"sink_pages": sinks, "recent_pages": recent, "min_pages": least}
        more = {"dense_layers": 0, "digest": digest, "representatives": few}
        got = run("infllm", qkv, length, budget, CHUNKINGS[chunking], **knobs, **more)
        for i in range(decodes):
            n = length + i + 1
            q, k = qkv[0][:n], qkv[1][:n]
            expected = oracles.infllm(q, k, budget, PAGE, digest, few, (sinks, recent, least))
            assert got.reads[i - decodes] == expected


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("budget", [1, 2, 5, 17, 30, 50, 64])
def test_double_sparsity_reads_the_tokens_whose_labels_score_best(
    heads: tuple[int, int], chunking: str, budget: int
) -> None:
    length, decodes, sink = 45, 12, 3
    qkv = random_layer(length + decodes, *heads, seed=budget)
    knobs = {"dense_layers": 0, "sink": sink, "group_factor": 2}
    got = run("double_sparsity", qkv, length, budget, CHUNKINGS[chunking], **knobs)
    for i in range(decodes):
        n = length + i + 1
        q, k = qkv[0][:n], qkv[1][:n]
        expected = oracles.double_sparsity(q, k, budget, PAGE, [2, 3, 6, 7], sink)
        assert got.reads[i - decodes] == expected
        assert all(len(row) == min(n, budget) for row in expected)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("budget", [1, 2, 5, 17, 30, 50, 64])
def test_omnikv_reads_the_tokens_of_largest_logit_in_any_head(
    heads: tuple[int, int], chunking: str, budget: int
) -> None:
    """The only layer of a model reads its own choice; others: tests/unit/test_methods_omnikv.py."""
    length, decodes, sink, recent = 45, 12, 3, 6
    qkv = random_layer(length + decodes, *heads, seed=budget)
    got = run("omnikv", qkv, length, budget, CHUNKINGS[chunking], sink=sink, recent=recent)
    for i in range(decodes):
        n = length + i + 1
        expected = oracles.omnikv(qkv[0][:n], qkv[1][:n], budget, sink, recent)
        assert got.reads[i - decodes] == expected
        assert all(len(row) == min(n, budget) for row in expected)


def test_quest_with_pages_of_one_token_is_exact_top_k() -> None:
    length, budget = 40, 9
    q, k, v = random_layer(length + 1)
    got = run(
        "quest", (q, k, v), length, budget, None, 1, dense_layers=0, sink_pages=0, min_pages=1
    )
    for h, row in enumerate(got.reads[-1]):
        logits = [
            max((k[j, h] @ q[length, g]).item() for g in (2 * h, 2 * h + 1)) for j in range(41)
        ]
        assert row == oracles.best([*logits[:40], float("inf")], budget)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_random_keeps_a_share_that_depends_on_seed_and_position_alone(seed: int) -> None:
    length, budget = 400, 100
    qkv = random_layer(length + 1, dim=4)
    other = random_layer(length + 1, dim=4, seed=9)
    kept = run("random", qkv, length, budget, seed=seed).reads[-1]
    assert kept == run("random", other, length, budget, 37, seed=seed).reads[-1]
    assert kept[0] == kept[1]
    assert {0, 1, 2, 3, *range(length - 32, length)} <= set(kept[0])
    assert len(kept[0]) == budget + 1
    middle = [p for p in kept[0] if 4 <= p < length - 32]
    assert 0.3 < sum(p < length // 2 for p in middle) / len(middle) < 0.75, "spread evenly"
    assert kept != run("random", qkv, length, budget, seed=seed ^ 5).reads[-1]


@pytest.mark.parametrize("form", ["floor", "share"])
def test_adakv_heads_differ_and_the_total_is_exact(form: str) -> None:
    length = 64
    q, k, v = random_layer(length + 1, 8, 4, seed=3)
    q[:, :2] *= 6  # one concentrated head gives budget to the others
    for budget in (12, 16, 21):
        got = run("adakv", (q, k, v), length, budget, None, form=form, window=8, sink=2)
        rows = [len(row) - 1 for row in got.reads[-1]]
        assert sum(rows) == 4 * budget
        assert len(set(rows)) > 1
        assert all(n >= 10 for n in rows), "sinks and window stay in every head"
        assert got.pages[-2] < 4 * -(-length // PAGE), "memory is really freed"


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8])
def test_adakv_floor_protects_heads_that_would_get_nothing(alpha: float) -> None:
    length, budget = 64, 20
    q, k, v = random_layer(length + 1, seed=2)
    k[:, 0, 1:] *= 9  # all keys of head 0 have larger norms than any of head 1
    knobs = {"scorer": "knorm", "skip_layers": (), "sink": 1, "recent": 2, "alpha": alpha}
    got = run("adakv", (q, k, v), length, budget, None, **knobs)
    scores = oracles.knorm_scores(q[:length], k[:length])
    expected = oracles.adakv(scores, budget, alpha, 1, 2)
    assert got.reads[-1] == [[*row, length] for row in expected]
    assert len(expected[0]) == max(3, int(alpha * budget))


def test_adakv_over_the_model_shares_all_budgets_out() -> None:
    """Three layers of one budget: one threshold over their heads, each head's floor is safe."""
    length, budget = 40, 15
    rng = torch.Generator().manual_seed(4)
    scores = torch.rand(3, 2, length, generator=rng) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    knobs = {"scorer": "knorm", "skip_layers": (), "sink": 2, "recent": 3, "scope": "model"}
    method = make(toy_spec("fff"), "adakv", **knobs)
    assert isinstance(method, AdaKV)
    method.scorer._pending[0] = {i: Pending(scores[i], (length,) * 2, budget) for i in range(3)}
    request = Request(0, list(range(length)), length, 4, budget=budget)
    keeps = method.evict(StepPlan((Chunk(request, (0,), 39, Purpose.PREFILL, True),)))
    got = [m.nonzero().flatten().tolist() for k in keeps for m in k.masks]
    assert got == oracles.adakv(scores.flatten(0, 1).tolist(), budget, 0.2, 2, 3)
    assert sum(map(len, got)) == 6 * budget
    assert sum(map(len, got[:2])) < 2 * budget < sum(map(len, got[4:]))
    with pytest.raises(RequestError, match="scope='model'"):
        make(toy_spec("fff"), "adakv", scope="model", form="share")


def test_adakv_with_full_floor_is_uniform() -> None:
    qkv = random_layer(65, 8, 4, seed=3)
    for form in ("floor", "share"):
        got = run("adakv", qkv, 64, 20, None, alpha=1.0, form=form, window=8, sink=2)
        assert got.kept[-2] == (20,) * 4
    plain = run("snapkv", qkv, 64, 20, None, window=8, sink=2)
    assert got.reads[-1] == plain.reads[-1]


def test_adakv_with_identical_heads_is_uniform() -> None:
    q, k, v = random_layer(65, 4, 2, seed=5)
    q[:, 2:], k[:, 1] = q[:, :2], k[:, 0]
    for form, alpha in itertools.product(("floor", "share"), (0.0, 0.2)):
        got = run("adakv", (q, k, v), 64, 20, None, alpha=alpha, form=form, window=8, sink=2)
        assert got.kept[-2] == (20, 20)


@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in CASES.items()])
def test_10_rows_ascend_and_reads_equal_masked_dense_attention(case: Any) -> None:
    """Physical eviction (or selection) == dense attention under the same mask, in float64."""
    length = 61
    q, k, v = (x.double() for x in random_layer(length + 4, 8, 2, seed=4))
    model = spec_of(8, 2, 8, torch.float64, INV_FREQ if case.shifts else ())
    method = make(model, case.method, **case.knobs)
    steps = [*steps_for(length, 20), 1, 1, 1, 1]
    got = drive(method, q, k, v, steps, case.budget, 4)
    for i in range(4):
        n = length + i + 1
        rows = got.reads[i - 4]
        assert all(row == sorted(set(row)) and row[-1] == n - 1 for row in rows)
        keys = oracles.in_cache(k[:n], rows, INV_FREQ) if case.shifts else k[:n]
        expected = oracles.masked_attention(q[:n], keys, v[:n], rows)
        torch.testing.assert_close(got.outs[i - 4][0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["knorm", "snapkv", "adakv", "kvzip", "tova", "h2o", "rkv"])
def test_the_attention_of_two_parts_merged_is_that_of_all(name: str) -> None:
    """What is not condensed yet is kept whole: with it a step attends to everything, in float64."""
    length, decodes = 45, 5
    q, k, v = (x.double() for x in random_layer(length + decodes, 8, 2, seed=6))
    bursts = {"tova": {"burst": 2}, "h2o": {"interval": 2}, "rkv": {"interval": 2}}
    knobs: dict[str, Any] = bursts.get(name, {"skip_layers": ()} if name == "knorm" else {})
    method = make(spec_of(8, 2, 8, torch.float64), name, **knobs)
    lost = []
    for sparse in (SparseParams(), SparseParams(compensate=True)):
        steps = [length, *[1] * decodes]
        got = drive(method, q, k, v, steps, length - 7, decodes, sparse=sparse)
        for i in range(decodes):
            n = length + i + 1
            everything = oracles.masked_attention(q[:n], k[:n], v[:n], [list(range(n))] * 2)
            lost.append((got.outs[i - decodes][0] - everything).abs().max().item())
    assert min(lost[:decodes]) > 1e-3, "tokens were dropped"
    assert max(lost[decodes:]) < 1e-12


def test_every_method_has_a_read_set_oracle() -> None:
    judged = {
        "full",
        "random",
        "streaming_llm",
        "duo_attention",
        "quest",
        "infllm",
        "double_sparsity",
        "omnikv",
        *(m for m, _, _ in SCORED.values()),
    }
    assert judged == set(METHODS)


SHRINKABLE = {
    "random": ("random", {"sink": 2, "recent": 4}),
    "knorm": SCORED["knorm"][:2],
    "keydiff": SCORED["keydiff"][:2],
    "adakv_knorm": SCORED["adakv_knorm"][:2],
    "streaming_llm": ("streaming_llm", {}),
    "snapkv": SCORED["snapkv"][:2],
    "h2o": SCORED["h2o"][:2],
    "rkv": ("rkv", {"sink": 3}),
}


@pytest.mark.parametrize("name", SHRINKABLE)
def test_shrink_evicts_again_from_what_is_stored(name: str) -> None:
    """Under memory pressure a compressed request gets a smaller budget, before it is resumed."""
    method_name, knobs = SHRINKABLE[name]
    length, budget, target = 45, 24, 14
    q, k, v = random_layer(length + 2)
    method = make(spec_of(4, 2), method_name, **knobs)
    got = drive(method, q, k, v, [length, 1, 1], budget, 2, shrink_to=target)
    survivors = got.reads[1]
    assert sum(map(len, got.reads[2])) == 2 * (target + 1)
    for before, after in zip(survivors, got.reads[2], strict=True):
        assert after == sorted(set(after))
        assert set(after) - {length + 1} <= set(before)
        assert {0, length, length + 1} <= set(after)
    if name == "knorm":
        for h, row in enumerate(survivors):
            scores = oracles.knorm_scores(q[row], k[row][:, h : h + 1])
            (chosen,) = oracles.evict(scores, target, 3, 5)
            assert got.reads[2][h] == [*(row[j] for j in chosen), length + 1]
