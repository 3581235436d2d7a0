"""`kv_error` in place of a budget: the fewest tokens that lose no more attention than it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from contract import oracles
from contract.driver import PAGE, Driver, is_done, make, solo
from contract.reads import drive, random_layer, spec_of
from contract.test_contract import prompt
from contract.toy import Toy, toy_spec
from sparseengine.core.params import SparseParams
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.engine.admission import charge
from sparseengine.errors import RequestError
from sparseengine.methods import METHODS, make_method, resolve_budget
from sparseengine.methods.error_targets import Target
from sparseengine.methods.pending import Pending

LENGTH, NEW = 45, 7
Masses = Sequence[Sequence[float]]


class Family(NamedTuple):
    """A method, what its oracle keeps under a budget, and the attention that it measures."""

    method: str
    knobs: dict[str, Any]
    rows: Callable[[Tensor, Tensor, int], oracles.Rows]
    masses: Callable[[Tensor, Tensor], Masses]
    shared: bool = False
    mixes: tuple[str, ...] = ("ff", "wf", "ll")


def grouped(q: Tensor, k: Tensor, last: int) -> Masses:
    return oracles.attention(q, k, last).unflatten(0, (k.shape[1], -1)).mean(1).tolist()


def newest(q: Tensor, k: Tensor) -> Masses:
    return [oracles.attention(q, k, 1).mean(0).tolist()] * k.shape[1]


def expected(q: Tensor, k: Tensor) -> Masses:
    return oracles.expected_attention_scores(q, k, None, 3, first=0)


REPEAT = {"chunk": 16, "lead": 3, "sink": 3, "recent": 5}
FAMILIES = {
    "snapkv": Family(
        "snapkv",
        {"window": 8, "kernel": 5, "sink": 3},
        lambda q, k, b: oracles.evict(oracles.snapkv_scores(q, k, 8, 5), b, 3, 8),
        lambda q, k: grouped(q, k, 8),
    ),
    "pyramidkv": Family(
        "pyramidkv",
        {"window": 8, "kernel": 5, "sink": 3},
        lambda q, k, b: oracles.evict(oracles.snapkv_scores(q, k, 8, 5), b, 3, 8),
        lambda q, k: grouped(q, k, 8),
    ),
    "tova": Family(
        "tova",
        {},
        lambda q, k, b: oracles.evict(oracles.tova_scores(q, k), b, 0, 1),
        newest,
    ),
    "h2o": Family(
        "h2o", {}, lambda q, k, b: oracles.h2o(q, k, b, len(k)), lambda q, k: grouped(q, k, len(q))
    ),
    "h2o_prompt": Family(
        "h2o",
        {"interval": 0, "average": True},
        lambda q, k, b: oracles.h2o(q, k, b, len(k), average=True),
        lambda q, k: grouped(q, k, len(q)),
    ),
    "rkv": Family(
        "rkv", {}, lambda q, k, b: oracles.rkv(q, k, b, len(k)), lambda q, k: grouped(q, k, 8)
    ),
    "skipkv": Family(
        "skipkv",
        {"importance": 0.07},
        lambda q, k, b: oracles.rkv(q, k, b, len(k)),
        lambda q, k: grouped(q, k, 8),
    ),
    "expected_attention": Family(
        "expected_attention",
        {"sink": 3, "value_norm": False},
        lambda q, k, b: oracles.evict(oracles.expected_attention_scores(q, k, None, 3), b, 3, 0),
        expected,
        mixes=("ff", "wf"),
    ),
    "kvzip_uniform": Family(
        "kvzip",
        {**REPEAT, "form": "uniform"},
        lambda q, k, b: oracles.evict(oracles.kvzip_scores(q, k, 16, 3, 3), b, 3, 5),
        lambda q, k: oracles.kvzip_scores(q, k, 16, 3, 3, mean=True),
    ),
    "kvzip": Family(
        "kvzip",
        REPEAT,
        lambda q, k, b: oracles.adakv(oracles.kvzip_scores(q, k, 16, 3, 3), b, 0.0, 3, 5),
        lambda q, k: oracles.kvzip_scores(q, k, 16, 3, 3, mean=True),
        shared=True,
    ),
    "adakv": Family(
        "adakv",
        {"window": 8, "kernel": 5, "sink": 3},
        lambda q, k, b: oracles.adakv(oracles.snapkv_scores(q, k, 8, 5), b, 0.2, 3, 8),
        lambda q, k: grouped(q, k, 8),
        shared=True,
        mixes=("ff", "wf"),
    ),
    "adakv_model": Family(
        "adakv",
        {"window": 8, "kernel": 5, "sink": 3, "scope": "model", "alpha": 0.0},
        lambda q, k, b: oracles.adakv(oracles.snapkv_scores(q, k, 8, 5), b, 0.0, 3, 8),
        lambda q, k: grouped(q, k, 8),
        shared=True,
        mixes=("ff", "wf"),
    ),
    "adakv_expected": Family(
        "adakv",
        {"scorer": "expected_attention", "sink": 3, "value_norm": False},
        lambda q, k, b: oracles.adakv(
            oracles.expected_attention_scores(q, k, None, 3), b, 0.2, 3, 0
        ),
        expected,
        shared=True,
        mixes=("ff", "wf"),
    ),
    "snapkv_adakv": Family(
        "snapkv",
        {"window": 8, "kernel": 5, "sink": 3, "allocate": "adakv"},
        lambda q, k, b: oracles.adakv(oracles.snapkv_scores(q, k, 8, 5), b, 0.2, 3, 8),
        lambda q, k: grouped(q, k, 8),
        shared=True,
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # no oracle of their own here
    "kvzip_layers": ("kvzip", {**REPEAT, "form": "layer"}),
    "kvzip_heads": ("kvzip", {**REPEAT, "form": "head"}),
    "adakv_share": ("adakv", {"window": 8, "sink": 3, "form": "share"}),
    "snapkv_pages": ("snapkv", {"window": 8, "allocate": "page_quanta", "allocate_scope": "model"}),
    "snapkv_pyramid": ("snapkv", {"window": 8, "allocate": "pyramid"}),
    "snapkv_quest": (
        "snapkv",
        {"window": 8, "select": "quest", "select_tokens": 16, "select_config": {"dense_layers": 0}},
    ),
}
CELLS = [
    *(
        pytest.param(family.method, family.knobs, mix, id=f"{name}-{mix}")
        for name, family in FAMILIES.items()
        for mix in family.mixes
    ),
    *(pytest.param(name, knobs, "ff", id=n) for n, (name, knobs) in OTHERS.items()),
]


def peaked(heads: tuple[int, int], seed: int = 0, length: int = LENGTH) -> tuple[Tensor, ...]:
    """Queries of the first half of the heads are sharp, those of the others broad."""
    q, k, v = random_layer(length + 1, *heads, seed=seed)
    q[:, : heads[0] // 2] *= 3
    return q, k, v


def kept(
    name: str, knobs: dict[str, Any], qkv: Any, error: float, steps: Sequence[int], **kw: Any
) -> oracles.Rows:
    """Positions of each row when the prompt is over."""
    q, k, v = qkv
    method = make(spec_of(q.shape[1], k.shape[1]), name, **knobs)
    asked = SparseParams(kv_error=error)
    found = drive(method, q, k, v, [*steps, 1], None, 1, sparse=asked, **kw)
    return [row[:-1] for row in found.reads[-1]]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("error", [0.6, 0.25, 0.05, 0.0])
def test_the_oracle_finds_the_same_tokens(name: str, heads: tuple[int, int], error: float) -> None:
    family, qkv = FAMILIES[name], peaked(heads)
    q, k = qkv[0][:LENGTH], qkv[1][:LENGTH]
    steps = [LENGTH] if heads == (8, 2) else [19, 19, 7]
    got = kept(family.method, family.knobs, qkv, error, steps)
    if error == 0:
        assert got == [list(range(LENGTH))] * heads[1]
        return
    masses = family.masses(q, k)
    page = None if family.shared else PAGE
    method = make(spec_of(*heads), family.method, **family.knobs)
    least = getattr(method, "scorer", method).least(LENGTH)
    wanted = oracles.least_by_error(lambda b: family.rows(q, k, max(b, least)), masses, error, page)
    if page:  # the smallest budget is whole pages, too
        low = family.rows(q, k, -(-least // PAGE) * PAGE)
        wanted = [a if len(a) >= len(b) else b for a, b in zip(wanted, low, strict=True)]
    assert got == wanted
    assert min(map(len, got)) < LENGTH or error < 0.1, "something was cut"
    lost = [sum(row) - sum(row[j] for j in mine) for row, mine in zip(masses, got, strict=True)]
    assert (sum(lost) / len(lost) if family.shared else max(lost)) <= error


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_a_smaller_error_never_keeps_less(name: str, seed: int) -> None:
    method, knobs = OTHERS[name] if name in OTHERS else FAMILIES[name][:2]
    if "select" in knobs:
        return  # reads fewer than it keeps; the same eviction as without
    qkv = peaked((4, 2), seed)
    sizes = [
        [len(row) for row in kept(method, knobs, qkv, error, [LENGTH], attend=False)]
        for error in (1.0, 0.5, 0.2, 0.1, 0.03, 0.003, 0.0)
    ]
    rounds = name == "adakv_share"  # whose remainders may take a token from a row
    for few, many in pairwise(sizes):
        assert rounds or all(a <= b for a, b in zip(few, many, strict=True))
        assert sum(few) <= sum(many)
    assert sizes[-1] == [LENGTH] * 2
    assert sum(sizes[0]) < sum(sizes[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_short_prompts_are_kept_whole(name: str) -> None:
    family = FAMILIES[name]
    for length in (1, 3) if family.shared else (1, 3, PAGE):
        got = kept(family.method, family.knobs, peaked((4, 2), length=length), 0.2, [length])
        assert got == [list(range(length))] * 2


def tokens_of(
    method: str, knobs: dict[str, Any], mix: str, tokens: list[int], error: float
) -> list[int]:
    toy = Toy(mix)
    driver = Driver(toy, {"m": make(toy.spec, method, **knobs)})
    asked = SparseParams(kv_error=error)
    return driver.finish([driver.add(0, tokens, NEW, "m", None, sparse=asked)])[0]


@pytest.mark.parametrize(("method", "knobs", "mix"), CELLS)
def test_in_a_batch_in_chunks_and_after_a_preemption_as_alone(
    method: str, knobs: dict[str, Any], mix: str
) -> None:
    lengths, error = (48, 7, 33), 0.3
    alone = [tokens_of(method, knobs, mix, prompt(n), error) for n in lengths]
    toy = Toy(mix)
    driver = Driver(toy, {"m": make(toy.spec, method, **knobs)})
    free = driver.cache.free_pages()
    asked = SparseParams(kv_error=error)
    requests = [
        driver.add(i, prompt(n), NEW, "m", None, sparse=asked) for i, n in enumerate(lengths)
    ]
    for steps in (2, 5):  # in the prompt, while decoding
        for _ in range(steps):
            driver.advance([r for r in requests if not is_done(r)], 13)
        driver.drop(requests[0])
        driver.resume(requests[0])
    for request in (r for r in requests if is_done(r)):
        driver.drop(request)
    assert driver.finish(requests, 17) == alone
    assert driver.cache.free_pages() == free
    for r in requests:
        demand = charge(driver.cache, driver.methods["m"], r.prompt_len, NEW, None)
        assert driver.peak_pages[r.id] <= demand.most
    assert not getattr(driver.methods["m"], "_pending", {})
    assert not getattr(driver.methods["m"], "_paid", {})


@pytest.mark.parametrize(("method", "knobs", "mix"), CELLS)
def test_no_error_is_dense(method: str, knobs: dict[str, Any], mix: str) -> None:
    whole = {k: 64 if k == "select_tokens" else v for k, v in knobs.items()}
    dense = solo(mix, "full", prompt(48), NEW, None)
    assert tokens_of(method, whole, mix, prompt(48), 0.0) == dense


BURSTS = [("tova", {"burst": 3}), ("h2o", {"interval": 3}), ("rkv", {"window": 4, "interval": 3})]
BURSTS.append(("skipkv", {"window": 4, "interval": 3, "segment": 4, "likeness": 0.2}))


@pytest.mark.parametrize(("method", "knobs"), BURSTS, ids=lambda x: x if type(x) is str else "")
def test_a_budget_beside_it_is_a_ceiling_while_decoding_too(
    method: str, knobs: dict[str, Any]
) -> None:
    toy, new = Toy("ff"), 16

    def longest(error: float | None) -> tuple[list[int], int]:
        driver = Driver(toy, {"m": make(toy.spec, method, **knobs)})
        request = driver.add(0, prompt(48), new, "m", 20, sparse=SparseParams(kv_error=error))
        held = []

        def note() -> None:
            if not request.in_prefill:
                held.append(max(n for la in (0, 1) for n in driver.cache.lens(0, la)))

        return driver.finish([request], each=note)[0], max(held)

    plain, most = longest(None)
    same, as_long = longest(0.0)
    assert (same, as_long) == (plain, most), "an error of nothing is the budget alone"
    _, shorter = longest(0.4)
    assert shorter <= most == 22, "budget + burst - 1 behind each step"


def test_methods_say_whether_they_measure_attention() -> None:
    able = {n for n in METHODS if METHODS.get(n).traits.measures is not None}
    assert able == {FAMILIES[f].method for f in FAMILIES}
    for name in set(METHODS) - able:
        with pytest.raises(RequestError, match=r"kv_error=0.1 is not possible .* snapkv"):
            resolve_budget(METHODS.get(name), SparseParams(name, kv_error=0.1), 100)
    spec = spec_of(4, 2)
    by_keys = make_method("adakv", {"scorer": "keydiff"}, spec)
    assert by_keys.traits.measures is None
    with pytest.raises(RequestError, match=r"'adakv' \(refused: it ranks tokens"):
        resolve_budget(by_keys, SparseParams("adakv", scorer="keydiff", kv_error=0.1), 100)
    for scorer in sorted(able - {"adakv"}):
        once = {"burst": 0} if scorer == "tova" else {}
        method = make_method("adakv", {"scorer": scorer, **once}, spec)
        assert method.traits.measures == METHODS.get(scorer).traits.measures
        assert resolve_budget(method, SparseParams("adakv", kv_error=0.1), 100) is None
    assert resolve_budget(method, SparseParams("adakv", kv_error=0.1, ratio=0.5), 100) == 50


@pytest.mark.parametrize("scorer", ["tova", "h2o", "rkv", "pyramidkv", "kvzip"])
def test_any_scorer_may_be_shared_out_by_an_error(scorer: str) -> None:
    qkv = peaked((4, 2))
    knobs = {"scorer": scorer, **({"burst": 0} if scorer == "tova" else {})}
    few = kept("adakv", knobs, qkv, 0.5, [LENGTH])
    many = kept("adakv", knobs, qkv, 0.1, [20, 25])
    assert sum(map(len, few)) < sum(map(len, many)) < 2 * LENGTH
    assert all(set(a) <= set(b) for a, b in zip(few, many, strict=True))


def test_the_newest_tokens_of_h2o_follow_what_is_found() -> None:
    """Half of the ceiling is not forced to stay: a loose error keeps less than that."""
    rows = kept("h2o", {}, peaked((4, 2)), 0.8, [LENGTH])
    assert max(map(len, rows)) < LENGTH // 2
    assert all(row[-1] == LENGTH - 1 for row in rows)


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_what_shares_a_budget_shares_the_error(scope: str) -> None:
    """Two layers of two heads, one broad and one sharp; 12 of 40 tokens are protected."""
    error, spec = 0.2, toy_spec("ff")
    knobs = {"window": 8, "sink": 4, "allocate": "adakv", "allocate_scope": scope}
    method = make(spec, "snapkv", **knobs)
    rng = torch.Generator().manual_seed(0)
    masses = [(torch.randn(2, 40, generator=rng) * sharp).softmax(-1) for sharp in (0.3, 4.0)]
    request = Request(0, [0] * 40, 40, 1, sparse=SparseParams(kv_error=error))
    chunk = Chunk(request, (0,) * 40, 0, Purpose.PREFILL, True)
    method._pending[0] = {
        layer: Pending(mass, (40, 40), 40, Target(mass, error)) for layer, mass in enumerate(masses)
    }
    keeps = {keep.layer: torch.stack(list(keep.masks)) for keep in method.evict(StepPlan((chunk,)))}
    lost = [float((masses[i] * ~keeps[i]).sum(-1).mean()) for i in (0, 1)]
    if scope == "layer":
        assert max(lost) <= error
        assert keeps[0].sum() > keeps[1].sum()
    else:
        assert sum(lost) / 2 <= error < max(lost)
    assert sum(lost) > error, "no more is kept than that takes"


def test_a_broad_head_gets_more_than_a_sharp_one() -> None:
    """Heads of one layer that share: the broad one gets more."""
    qkv = peaked((4, 2))
    sharp, broad = kept("adakv", {"window": 8, "sink": 3}, qkv, 0.1, [LENGTH])
    assert len(sharp) < len(broad)
    assert torch.tensor(sharp).diff().min() > 0
