"""Pipelines: a score, how rows share the budget, what is read of the rest, how prompts are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract import oracles
from contract.driver import Driver, make
from contract.reads import drive, random_layer, spec_of
from contract.test_contract import prompt
from contract.test_read_sets import steps_for
from contract.toy import Toy
from sparseengine.errors import RequestError
from sparseengine.methods.allocate import Allocation
from sparseengine.methods.prefill import make_pattern

Scores = list[list[float]]


def h2o_scores(q: Tensor, k: Tensor) -> Scores:
    """What all queries of the prompt paid, summed over a KV head's query group."""
    group, length, out = q.shape[1] // k.shape[1], len(k), []
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    for h in range(k.shape[1]):
        total = torch.zeros(length, dtype=torch.float64)
        for g in range(h * group, h * group + group):
            logits = q[:, g].double() @ k[:, h].double().T / k.shape[2] ** 0.5
            total += logits.masked_fill(hidden, -math.inf).softmax(-1).sum(0)
        out.append(total.tolist())
    return out


# name -> knobs, protected tokens (of a budget), scores
SCORERS: dict[str, tuple[dict[str, Any], Callable[[int], tuple[int, int]], Any]] = {
    "knorm": (
        {"skip_layers": (), "sink": 3, "recent": 5},
        lambda b: (3, 5),
        oracles.knorm_scores,
    ),
    "keydiff": ({"sink": 3, "recent": 5}, lambda b: (3, 5), oracles.keydiff_scores),
    "snapkv": (
        {"window": 6, "kernel": 3, "sink": 3},
        lambda b: (3, 6),
        lambda q, k: oracles.snapkv_scores(q, k, 6, 3),
    ),
    "h2o": (
        {"interval": 0, "recent_ratio": 0.25},
        lambda b: (0, math.ceil(b / 4)),
        h2o_scores,
    ),
    "kvzip": (
        {"chunk": 8, "lead": 2, "sink": 3, "recent": 5},
        lambda b: (3, 5),
        lambda q, k: oracles.kvzip_scores(q, k, 8, 2, 3),
    ),
}
ALLOCATIONS = [
    {},
    {"allocate": "uniform"},
    {"allocate": "pyramid"},
    *(
        {"allocate": kind, "allocate_scope": scope}
        for kind in ("adakv", "page_quanta")
        for scope in ("layer", "model")
    ),
]  # fmt: skip
SELECTORS: dict[str, dict[str, Any]] = {
    "quest": {"dense_layers": 0, "min_pages": 2},
    "infllm": {
        "dense_layers": 0, "min_pages": 3, "sink_pages": 1, "recent_pages": 1, "digest": "mean",
    },
    "double_sparsity": {"dense_layers": 0, "sink": 2, "group_factor": 2},
}  # fmt: skip
PATTERNS: dict[str, dict[str, Any]] = {
    "a_shape": {"sink": 3, "window": 12},
    "xattention": {"stride": 4, "threshold": 0.5},
}


def retained(
    kind: str, scores: Scores, budget: int, sink: int, recent: int, page: int, floor: float = 0.2
) -> oracles.Rows:
    """Slots that rows of one scope keep: brute force over tokens, or over pages of ranks."""
    rows = range(len(scores))
    ranked: list[list[float]] = []
    for row in scores:
        must = oracles.forced(len(row), budget, sink, recent)
        ranked.append([math.inf if j in must else s for j, s in enumerate(row)])
    if kind in ("uniform", "pyramid"):  # one layer is no pyramid
        return [oracles.best(row, budget) for row in ranked]
    if kind == "adakv":
        for row in ranked:
            for j in oracles.best(row, int(budget * floor)):
                row[j] = math.inf
        flat = [(-s, j, r) for r in rows for j, s in enumerate(ranked[r])]
        chosen = sorted(flat)[: len(scores) * budget]
        return [sorted(j for _, j, h in chosen if h == r) for r in rows]
    order = [sorted(range(len(row)), key=lambda j, row=row: (-row[j], j)) for row in ranked]
    worth = []
    for r in rows:
        least = math.inf
        for m in range(math.ceil(len(order[r]) / page)):
            part = [ranked[r][j] for j in order[r][m * page : (m + 1) * page]]
            least = min(least, math.inf if part[0] == math.inf else sum(part))
            worth.append((-least, m, r))
    best = sorted(worth)[: len(scores) * math.ceil(budget / page)]
    return [
        sorted(j for _, m, h in best if h == r for j in order[r][m * page : (m + 1) * page])
        for r in rows
    ]


def read(name: str, q: Tensor, k: Tensor, tokens: int, page: int) -> list[int]:
    """Slots of one head's row that the newest query reads: q [., g, D], k [L, 1, D]."""
    if name == "quest":
        return oracles.quest(q, k, tokens, page, 1, 2)[0]
    if name == "infllm":
        return oracles.infllm(q, k, tokens, page, "mean", 4, (1, 1, 3))[0]
    return oracles.double_sparsity(q, k, tokens, page, [2, 3, 6, 7], 2)[0]


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    select = draw(st.sampled_from(["", *SELECTORS]))
    return {
        "scorer": draw(st.sampled_from(sorted(SCORERS))),
        "allocate": draw(st.sampled_from(ALLOCATIONS)),
        "select": select,
        "tokens": draw(st.integers(3, 40)),
        "pattern": draw(st.sampled_from(["", *PATTERNS])),
        "length": draw(st.integers(20, 60)),
        "budget": draw(st.integers(4, 64)),
        "page": draw(st.sampled_from([1, 4, 8])),
        "chunking": draw(st.sampled_from([None, 7, -1])),
        "seed": draw(st.integers(0, 1 << 16)),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipelines())
def test_any_pipeline_reads_what_a_masked_oracle_reads(drawn: dict[str, Any]) -> None:
    """Read sets, and outputs to 1e-10, of a prompt and three decoded tokens in float64."""
    length, budget, page = drawn["length"], drawn["budget"], drawn["page"]
    q, k, v = (x.double() for x in random_layer(length + 3, 4, 2, 8, seed=drawn["seed"]))
    own, protected, score = SCORERS[drawn["scorer"]]
    knobs = {**own, **drawn["allocate"]}
    if drawn["select"]:
        knobs |= {
            "select": drawn["select"],
            "select_tokens": drawn["tokens"],
            "select_config": SELECTORS[drawn["select"]],
        }
    model = spec_of(4, 2, 8, torch.float64)
    method = make(model, drawn["scorer"], page, **knobs)
    common = {"block": 16, "min_tokens": 16, "last": 8}
    pattern = (
        make_pattern(drawn["pattern"], {**common, **PATTERNS[drawn["pattern"]]}, model)
        if drawn["pattern"]
        else None
    )
    steps = [*steps_for(length, drawn["chunking"]), 1, 1, 1]
    got = drive(method, q, k, v, steps, budget, 3, page, pattern=pattern)

    kind = drawn["allocate"].get("allocate", "uniform")
    scores = score(q[:length], k[:length])
    sink, recent = protected(budget)
    if drawn["scorer"] == "kvzip" and not drawn["allocate"]:
        rows = oracles.adakv(scores, budget, 0.0, sink, recent)
    else:
        rows = retained(kind, scores, budget, sink, recent, page)
    if length <= budget:
        rows = [list(range(length))] * 2
    if kind == "page_quanta" and length > budget:
        held = [math.ceil(len(row) / page) for row in rows]
        assert sum(held) == 2 * min(math.ceil(budget / page), math.ceil(length / page))
    for i in range(3):
        n = length + i + 1
        rows = [[*row, n - 1] for row in rows]
        wanted = rows
        if drawn["select"]:
            wanted = []
            for h, row in enumerate(rows):
                part = read(
                    drawn["select"], q[[n - 1], 2 * h : 2 * h + 2], k[row, h : h + 1],
                    drawn["tokens"], page,
                )  # fmt: skip
                wanted.append([row[j] for j in part])
        assert got.reads[i - 3] == wanted, f"step {i} of {sorted(drawn.items())}"
        expected = oracles.masked_attention(q[:n], k[:n], v[:n], wanted)
        torch.testing.assert_close(got.outs[i - 3][0], expected, rtol=0, atol=1e-10)


def tokens(kinds: str, name: str, budget: int | None, **knobs: Any) -> list[int]:
    toy = Toy(kinds)
    driver = Driver(toy, {"m": make(toy.spec, name, **knobs)})
    return driver.finish([driver.add(0, prompt(48), 6, "m", budget)], 16)[0]


def outputs(name: str, budget: int, **knobs: Any) -> tuple[list[Tensor], list[Any]]:
    q, k, v = random_layer(52, seed=3)
    got = drive(make(spec_of(4, 2), name, **knobs), q, k, v, [48, 1, 1, 1, 1], budget)
    return got.outs, got.reads


SNAP = {"window": 6, "kernel": 3, "sink": 3}
QUEST = {"select": "quest", "select_config": {"dense_layers": 0}}


@pytest.mark.parametrize("allocate", ALLOCATIONS, ids=str)
@pytest.mark.parametrize("scorer", sorted(SCORERS))
def test_degenerate_stages_equal_dense_bit_for_bit(scorer: str, allocate: dict[str, str]) -> None:
    knobs = {**SCORERS[scorer][0], **allocate, **QUEST, "select_tokens": 60}
    outs, reads = outputs(scorer, 60, **knobs)
    dense, everything = outputs("full", 60)
    assert reads == everything
    assert all(torch.equal(a, b) for a, b in zip(outs, dense, strict=True))


@pytest.mark.parametrize(
    ("pipeline", "alone"),
    [
        (("snapkv", 20, {**SNAP, "allocate": "uniform"}), ("snapkv", 20, SNAP)),
        (("snapkv", 20, {**SNAP, "allocate": "adakv"}), ("adakv", 20, SNAP)),
        (("snapkv", 20, {**SNAP, **QUEST, "select_tokens": 60}), ("snapkv", 20, SNAP)),
        (
            ("keydiff", 60, {**QUEST, "select_tokens": 16}),
            ("quest", 16, {"dense_layers": 0}),
        ),
        (
            ("kvzip", 20, {"chunk": 8, "allocate": "uniform"}),
            ("kvzip", 20, {"chunk": 8, "form": "uniform"}),
        ),
    ],
    ids=["uniform", "adakv", "everything-read", "everything-retained", "own-form-replaced"],
)
def test_one_stage_alone_equals_its_method(pipeline: Any, alone: Any) -> None:
    (name, budget, knobs), (other, own_budget, own) = pipeline, alone
    first, second = outputs(name, budget, **knobs), outputs(other, own_budget, **own)
    assert first[1] == second[1]
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_pyramid_of_a_scorer_equals_the_pyramid_method() -> None:
    own = {"window": 6, "kernel": 3, "sink": 2}
    alone = tokens("ffff", "pyramidkv", 20, **own)
    # the method keeps its window apart; the stage keeps sinks and window apart
    toy = Toy("ffff")
    stage = make(toy.spec, "snapkv", **own, allocate="pyramid")
    driver = Driver(toy, {"m": stage})
    request = driver.add(0, prompt(48), 6, "m", 20)
    driver.advance([request])
    lens = [driver.cache.lens(0, layer)[0] for layer in range(4)]
    assert sum(lens) == 80
    assert lens == sorted(lens, reverse=True)
    assert lens[0] > 20 > lens[-1] >= 8
    assert len(alone) == 6
    assert tokens("ffff", "snapkv", 20, **{**own, "sink": 0}, allocate="pyramid") == tokens(
        "ffff", "pyramidkv", 20, **{**own, "sink": 0}
    )


# ── page quanta ──────────────────────────────────────────────────────────────────────────────────


def synthetic_heads(layers: int, heads: int, length: int, seed: int = 0) -> Tensor:
    """Attention of heads whose concentration is log-normal: fp64 [N, H, L], each sums to one."""
    rng = torch.Generator().manual_seed(seed)
    spread = torch.randn(layers, heads, 1, generator=rng, dtype=torch.float64).mul(0.7).exp() * 1.5
    spread *= torch.linspace(0.6, 1.6, layers, dtype=torch.float64)[:, None, None]
    logits = torch.randn(layers, heads, length, generator=rng, dtype=torch.float64) * spread
    return logits.softmax(-1)


@pytest.mark.parametrize("keep", [0.125, 0.25, 0.5])
def test_page_quanta_capture_more_mass_in_as_many_pages(keep: float) -> None:
    """One list for all rows < one per row < pages over a layer <= pages over the model."""
    layers, heads, length, page = 8, 8, 2048, 16
    mass = synthetic_heads(layers, heads, length)
    lens, budget = torch.full((layers, heads), length), int(keep * length)

    def captured(kind: str, scope: str = "layer") -> float:
        allocation = Allocation(kind=kind, scope=scope)
        kept = allocation.retain(mass.float(), lens, (budget,) * layers, (0, 0), page)
        pages = -(-kept.sum(-1) // page).sum()
        assert int(pages) <= layers * heads * budget // page
        if kind == "page_quanta":
            assert int(pages) == layers * heads * budget // page
            assert int((kept.sum(-1) % page).sum()) == 0  # no slot of a page is wasted
        return float((mass * kept).sum() / (layers * heads))

    shared = mass.mean((0, 1)).topk(budget).indices
    found = [
        float(mass[..., shared].sum() / (layers * heads)),
        captured("uniform"),
        captured("page_quanta"),
        captured("page_quanta", "model"),
    ]
    assert found == sorted(found)
    assert found[1] - found[0] > 0.02
    assert found[2] - found[1] > 0.01


def test_ties_of_pages_go_to_the_better_rank_then_layer_then_head() -> None:
    scores, lens = torch.ones(2, 2, 16), torch.full((2, 2), 16)
    kept = Allocation(kind="page_quanta", scope="model").retain(scores, lens, (6, 6), (0, 0), 4)
    assert kept.sum(-1).tolist() == [[8, 8], [8, 8]]
    scores[1] *= 2
    kept = Allocation(kind="page_quanta", scope="model").retain(scores, lens, (6, 6), (0, 0), 4)
    assert kept.sum(-1).tolist() == [[0, 0], [16, 16]]
    kept = Allocation(kind="page_quanta", scope="model").retain(scores, lens, (6, 6), (1, 2), 4)
    assert kept.sum(-1).tolist() == [[4, 4], [12, 12]]
    assert kept[0].tolist() == [[True, True] + [False] * 12 + [True] * 2] * 2


def test_a_partly_filled_page_of_negative_scores_is_not_worth_more_than_a_full_one() -> None:
    scores = -torch.ones(1, 2, 9)
    scores[0, 1] = -2
    lens = torch.full((1, 2), 9)
    kept = Allocation(kind="page_quanta").retain(scores, lens, (8,), (0, 0), 4)
    assert kept.sum(-1).tolist() == [[9, 4]]


# ── shrink ───────────────────────────────────────────────────────────────────────────────────────

SHARING = ("adakv", "kvzip", "kvzip_layer")  # their heads share budgets without a stage
SHRINKING: dict[str, tuple[str, dict[str, Any], tuple[int, int], Any]] = {
    **{
        name: (name, knobs, protected(14), score)
        for name, (knobs, protected, score) in SCORERS.items()
        if name != "h2o"  # sums that the decoded token has changed: see test_read_sets
    },
    "kvzip_uniform": (
        "kvzip", {**SCORERS["kvzip"][0], "form": "uniform"}, (3, 5), SCORERS["kvzip"][2],
    ),
    "kvzip_layer": (
        "kvzip", {**SCORERS["kvzip"][0], "form": "layer"}, (3, 5), SCORERS["kvzip"][2],
    ),
    "pyramidkv": ("pyramidkv", SNAP, (3, 6), SCORERS["snapkv"][2]),
    "adakv": ("adakv", SNAP, (3, 6), SCORERS["snapkv"][2]),
    "expected_attention": (
        "expected_attention", {"sink": 3, "recent": 4, "value_norm": False}, (3, 4),
        lambda q, k: oracles.expected_attention_scores(q, k, None, 3),
    ),
    "tova": ("tova", {"burst": 0, "recent": 4}, (0, 4), oracles.tova_scores),
}  # fmt: skip


@pytest.mark.parametrize("allocate", [{}, {"allocate": "page_quanta"}], ids=["own", "pages"])
@pytest.mark.parametrize("name", SHRINKING)
def test_shrink_is_the_methods_own_choice_at_the_target(
    name: str, allocate: dict[str, str]
) -> None:
    """Scores of the prompt decide again among survivors; the decoded token has none and stays."""
    method_name, knobs, (sink, recent), score = SHRINKING[name]
    if allocate and name in ("pyramidkv", "adakv"):
        with pytest.raises(RequestError, match="itself"):
            make(spec_of(4, 2), method_name, **knobs, **allocate)
        return
    q, k, v = random_layer(47, seed=2)
    method = make(spec_of(4, 2), method_name, **knobs, **allocate)
    got = drive(method, q, k, v, [45, 1, 1], 24, 2, shrink_to=14)
    survivors = got.reads[1]
    once = score(q[:45], k[:45])
    once = once * 2 if len(once) == 1 else once
    scores = [[*row, math.inf] for row in once]  # position 45 was never scored
    if getattr(method, "scorer", method).can_rescore():  # from what is stored now
        for h, row in enumerate(survivors):
            found = score(q[row], k[row][:, h : h + 1])[0]
            scores[h] = [found[row.index(j)] if j in row else 0.0 for j in range(46)]
    left = [[scores[h][j] for j in row] for h, row in enumerate(survivors)]
    kind = allocate.get("allocate", "adakv" if name in SHARING else "uniform")
    floor = 0.2 if name == "adakv" else 0.0
    rows = retained(kind, left, 14, sink, recent, 4, floor)
    wanted = [[*(survivors[h][j] for j in row), 46] for h, row in enumerate(rows)]
    assert got.reads[2] == wanted


def test_shrink_keeps_decoded_tokens_that_were_never_scored() -> None:
    q, k, v = random_layer(49, seed=2)
    for name in ("snapkv", "kvzip"):
        method = make(spec_of(4, 2), name, **SCORERS[name][0])
        got = drive(method, q, k, v, [44, 1, 1, 1, 1, 1], 24, 5, shrink_to=16)
        assert sum(map(len, got.reads[-1])) == 2 * 17
        assert all(row[-5:] == [44, 45, 46, 47, 48] for row in got.reads[-1])


# ── first layers dense, refusals ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "h2o", "rkv", "keydiff", "kvzip", "tova"])
def test_first_layers_may_stay_dense(name: str) -> None:
    toy = Toy("fff")
    method = make(toy.spec, name, dense_layers=1)
    assert method.layers == (1, 2)
    driver = Driver(toy, {"m": method})
    request = driver.add(0, prompt(48), 3, "m", 20)
    driver.advance([request])
    lens = [driver.cache.lens(0, layer) for layer in range(3)]
    assert set(lens[0]) == {48}
    assert sum(lens[1] + lens[2]) == 4 * 20


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("quest", {"select": "infllm"}, "both select"),
    ("full", {"select": "quest"}, "evicts nothing"),
    ("snapkv", {"select": "keydiff"}, "does not select"),
    ("snapkv", {"select": "omnikv"}, "another layer chose"),
    ("snapkv", {"select": "qest"}, "quest"),
    ("snapkv", {"select": "quest", "select_config": {"dense_layers": 9}}, "acts on no layer"),
    ("snapkv", {"select": "quest", "select_tokens": 0}, "select_tokens=0"),
    ("snapkv", {"select_tokens": 64}, "need select"),
    ("snapkv", {"select": "quest", "select_config": {"sinks": 1}}, "sink_pages"),
    ("snapkv", {"allocate": "page_quantum"}, "page_quanta"),
    ("snapkv", {"allocate": "uniform", "allocate_scope": "layer"}, "needs allocate="),
    ("quest", {"allocate": "adakv"}, "scores no tokens"),
    ("streaming_llm", {"allocate": "uniform"}, "scores no tokens"),
    ("pyramidkv", {"allocate": "page_quanta"}, "itself"),
    ("tova", {"allocate": "adakv"}, "set burst=0"),
    ("snapkv", {"alocate": "adakv"}, "allocate"),
]


@pytest.mark.parametrize(("name", "knobs", "reason"), REFUSED, ids=str)
def test_stages_that_do_not_fit_are_refused_with_the_reason(
    name: str, knobs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        make(Toy("ff").spec, name, **knobs)
