"""Page recall: digests, what they cost, and that a page comes back as soon as it is asked for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from contract import oracles
from contract.driver import Driver, make, solo
from contract.reads import drive, mark, random_layer, spec_of
from contract.test_planted import BUDGETS, retention
from contract.toy import VOCAB, Toy
from sparseengine.core.method import SealedPages
from sparseengine.core.specs import AuxSpec, Per
from sparseengine.errors import RequestError
from sparseengine.methods import infllm
from sparseengine.methods.infllm import most_distinct

DIGESTS = ("cuboid", "representatives", "mean")


def _method(digest: str, page_size: int = 16, **knobs: Any) -> Any:
    return make(spec_of(4, 2), "infllm", page_size, dense_layers=0, digest=digest, **knobs)


@pytest.mark.parametrize(
    ("digest", "names"),
    [
        ("cuboid", ["digest_low", "digest_high"]),
        ("representatives", ["digest_representatives_4"]),
        ("mean", ["digest_mean"]),
    ],
)
def test_side_tensors_of_pages_are_named_by_what_they_hold(digest: str, names: list[str]) -> None:
    model = spec_of(4, 2, 8, torch.bfloat16)
    method = make(model, "infllm", 16, dense_layers=0, digest=digest)
    (group,) = method.cache_plan()
    assert group.aux == tuple(
        AuxSpec(name=n, per=Per.PAGE, shape=("head_dim",), dtype=torch.bfloat16) for n in names
    )
    assert method.traits.graph_safe
    assert method.traits.sharing == "radix"


@pytest.mark.parametrize("page", [1, 3, 5, 16])
@pytest.mark.parametrize("digest", DIGESTS)
def test_digests_equal_their_definition_one_page_at_a_time_or_many(
    digest: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same in any company, and float64 torch operations agree."""
    method = _method(digest, page)
    keys = torch.randn(9, 2, page, 8, generator=torch.Generator().manual_seed(page))
    ids = torch.tensor([7, 0, 3, 8, 5])
    names = [a.name for a in method.aux()]
    found = {n: torch.full((9, 2, 8), float("nan")) for n in names}
    method.seal(SealedPages((0,), method.model.layers[0], ids, (keys, keys), found))
    assert all(x[[1, 2, 4, 6]].isnan().all() for x in found.values()), "other pages are left alone"
    alone = {n: torch.full((9, 2, 8), float("nan")) for n in names}
    monkeypatch.setattr(infllm, "_SCRATCH", 1)
    method.seal(SealedPages((0,), method.model.layers[0], ids, (keys, keys), alone))
    assert all(torch.equal(found[n][ids], alone[n][ids]) for n in names)
    x = keys[ids].double()
    mean, few = x.mean(2), min(4, page)
    spread = (x - mean[:, :, None]).abs().mean(2) if digest == "cuboid" else 0 * mean
    if digest == "representatives":
        unit = x / x.norm(dim=3, keepdim=True)
        likeness = (unit * unit.mean(2, keepdim=True)).sum(3)
        mean = x[likeness.argsort(2).argsort(2) < few].reshape(5, 2, few, 8).mean(2)
    torch.testing.assert_close(found[names[0]][ids].double(), mean - spread, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[names[-1]][ids].double(), mean + spread, atol=1e-6, rtol=1e-5)


def test_equal_keys_tie_to_the_first_and_zero_keys_are_no_error() -> None:
    assert most_distinct(torch.ones(1, 1, 5, 4), 2).tolist() == [
        [[True, True, False, False, False]]
    ]
    assert most_distinct(torch.zeros(1, 1, 3, 4), 1).tolist() == [[[True, False, False]]]


@pytest.mark.parametrize("digest", DIGESTS)
def test_pages_of_one_token_are_exact_top_k(digest: str) -> None:
    length, budget = 40, 9
    q, k, v = random_layer(length + 1)
    method = _method(digest, 1, sink_pages=0, recent_pages=1, min_pages=1)
    got = drive(method, q, k, v, [length, 1], budget, 1, 1)
    for h, row in enumerate(got.reads[-1]):
        logits = [
            max((k[j, h] @ q[length, g]).item() for g in (2 * h, 2 * h + 1)) for j in range(41)
        ]
        assert row == oracles.best([*logits[:40], float("inf")], budget)


@pytest.mark.parametrize("digest", DIGESTS)
def test_a_page_left_aside_is_recalled_in_the_step_that_asks_for_it(digest: str) -> None:
    length, at, budget, asks = 256, range(96, 112), 80, 3
    rng = torch.Generator().manual_seed(1)
    k = torch.randn(length + 6, 2, 64, generator=rng)
    q = torch.randn(length + 6, 4, 64, generator=rng)
    needle = torch.nn.functional.normalize(torch.randn(64, generator=rng), dim=0)
    q -= (q @ needle)[..., None] * needle + 2 * needle  # all others turn away from it
    k[at] += 4 * needle  # what the page is about
    q[length + asks] = 8 * needle
    method = make(spec_of(4, 2, 64), "infllm", 16, dense_layers=0, digest=digest)
    steps = [length, *[1] * 6]
    got = drive(method, mark(q, k), k, k, steps, budget, 6, 16, attend=False)
    for i in range(6):
        hits = [set(at) <= set(row) for row in got.reads[i - 6]]
        assert hits == [i == asks] * 2, f"decode {i}"
        assert all(len(set(at) & set(row)) == 16 * (i == asks) for row in got.reads[i - 6])


@pytest.mark.parametrize(("digest", "least"), [("cuboid", 0.8), ("representatives", 1.0)])
def test_a_planted_needle_is_found_though_nobody_asked_in_the_prompt(
    digest: str, least: float
) -> None:
    found = [retention("infllm", b, False, dense_layers=0, digest=digest) for b in BUDGETS[1:]]
    assert min(found) >= least


@pytest.mark.parametrize("digest", DIGESTS)
def test_a_budget_of_everything_is_dense(digest: str) -> None:
    tokens = _prompt(40)
    knobs = {"dense_layers": 0, "digest": digest}
    assert solo("ff", "infllm", tokens, 5, 64, **knobs) == solo("ff", "full", tokens, 5, None)


def test_digests_of_other_kinds_share_a_step() -> None:
    toy = Toy("wf")
    few = {"dense_layers": 0, "sink_pages": 1, "min_pages": 3}
    jobs = {
        "a": ("infllm", few, 20),
        "b": ("infllm", {**few, "digest": "representatives", "representatives": 2}, 12),
        "c": ("infllm", {**few, "digest": "representatives", "representatives": 1}, 24),
        "d": ("quest", {"dense_layers": 0}, 20),
        "e": ("full", {}, None),
    }
    driver = Driver(toy, {key: make(toy.spec, name, **k) for key, (name, k, _) in jobs.items()})
    requests = [
        driver.add(i, _prompt(40 + i), 7, key, budget)
        for i, (key, (_, _, budget)) in enumerate(jobs.items())
    ]
    expected = [
        solo("wf", name, _prompt(40 + i), 7, budget, **knobs)
        for i, (name, knobs, budget) in enumerate(jobs.values())
    ]
    assert driver.finish(requests, 19) == expected


@pytest.mark.parametrize("knobs", [{"digest": "minmax"}, {"recent_pages": 0}, {"min_pages": 0}])
def test_wrong_knobs_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(knobs))):
        make(spec_of(4, 2), "infllm", **knobs)


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]
