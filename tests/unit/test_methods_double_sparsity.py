"""Double Sparsity: labels, built-in and given channels, steps shared with a method of pages."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from contract.driver import Driver, make, solo
from contract.reads import drive, mark, random_layer, spec_of
from contract.toy import KINDS, VOCAB, Toy
from sparseengine.core.specs import AuxSpec, Per
from sparseengine.errors import RequestError
from sparseengine.methods.double_sparsity import builtin_channels

LENGTH, DIM, PAGE = 512, 64, 16


def test_the_slowest_rotary_pairs_are_the_builtin_labels() -> None:
    spec = spec_of(2, 1, 64).layers[0]
    assert builtin_channels(spec, 6) == [29, 30, 31, 61, 62, 63]
    assert builtin_channels(spec, 3) == [30, 31, 63]
    assert builtin_channels(spec, 64) == list(range(64))
    assert builtin_channels(KINDS["l"], 4) == [0, 4, 8, 12], "a latent: equal distances"


def test_labels_are_a_side_tensor_of_pages_in_the_dtype_of_keys() -> None:
    method = make(spec_of(2, 1, 64, torch.bfloat16), "double_sparsity", PAGE, dense_layers=0)
    (group,) = method.cache_plan()
    expected = AuxSpec(name="labels", per=Per.PAGE, shape=(PAGE, 16), dtype=torch.bfloat16)
    assert group.aux == (expected,)
    assert method.traits.sharing == "radix"


def test_all_channels_are_exact_top_k() -> None:
    """With pages of one token: nothing is open but the newest token."""
    length, budget = 40, 9
    q, k, v = random_layer(length + 1, 2, 2)
    method = make(spec_of(2, 2), "double_sparsity", 1, dense_layers=0, group_factor=1, sink=0)
    got = drive(method, q, k, v, [length, 1], budget, 1, 1)
    for h, row in enumerate(got.reads[-1]):
        logits = (k[:length, h].double() @ q[length, h].double()).tolist()
        order = sorted(range(length), key=[-x for x in logits].__getitem__)
        assert row == sorted([*order[: budget - 1], length])


@pytest.mark.parametrize("layers", [{"dense_layers": 1}, {"dense_layers": 0, "group_factor": 64}])
def test_a_budget_of_everything_is_dense_and_one_label_is_enough_to_run(
    layers: dict[str, int],
) -> None:
    tokens = _prompt(40)
    dense = solo("ff", "full", tokens, 5, None)
    assert solo("ff", "double_sparsity", tokens, 5, 64, **layers) == dense
    assert len(solo("ff", "double_sparsity", tokens, 5, 12, **layers)) == 5


def test_wrong_channels_are_refused() -> None:
    with pytest.raises(RequestError, match=r"keys of this model have channels 0\.\.7"):
        make(spec_of(2, 1), "double_sparsity", channels=[3, 8], dense_layers=0)


def _needle(channels: list[int], seed: int) -> tuple[Tensor, Tensor, int]:
    """q, k and the position of a key that the last query asks for, in these channels alone."""
    rng = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(LENGTH + 1, h, DIM, generator=rng) for h in (4, 2))
    needle = torch.zeros(DIM)
    needle[channels] = torch.randn(len(channels), generator=rng)
    needle /= needle.norm()
    k -= (k @ needle)[..., None] * needle
    position = int(torch.randint(50, 400, (), generator=rng))
    k[position] = 12 * needle
    q[-1] = math.sqrt(DIM) * needle + 0.1 * q[-1]
    return mark(q, k), k, position


def _found(direction: list[int], **knobs: object) -> float:
    hits = 0
    for seed in range(6):
        q, k, position = _needle(direction, seed)
        method = make(spec_of(4, 2, DIM), "double_sparsity", PAGE, dense_layers=0, **knobs)
        got = drive(method, q, k, k, [LENGTH, 1], 48, 1, PAGE, attend=False)
        hits += sum(position in row for row in got.reads[-1])
    return hits / 12


def test_a_needle_is_found_if_and_only_if_the_labels_see_it() -> None:
    assert _found(list(range(1, DIM))) == 1.0, "a quarter of all channels is enough"
    assert _found([30, 31, 62, 63]) == 1.0
    assert _found([3, 4, 5, 6]) < 0.5, "outside the labels: found by chance alone"
    assert _found([3, 4, 5, 6], channels=[3, 4, 5, 6, 40]) == 1.0, "calibrated"


def test_slots_and_pages_share_a_step() -> None:
    """Requests of a method that selects slots, of one that selects pages, and dense ones."""
    toy = Toy("wf")
    jobs = [
        ("double_sparsity", {"dense_layers": 0, "sink": 2}, 20, 48),
        ("quest", {"dense_layers": 0}, 20, 47),
        ("full", {}, None, 30),
        ("double_sparsity", {"dense_layers": 0, "sink": 2}, 9, 33),
    ]
    methods = {name: make(toy.spec, name, **knobs) for name, knobs, _, _ in jobs}
    driver = Driver(toy, methods)
    requests = [
        driver.add(i, _prompt(n), 7, name, budget) for i, (name, _, budget, n) in enumerate(jobs)
    ]
    expected = [solo("wf", name, _prompt(n), 7, b, **knobs) for name, knobs, b, n in jobs]
    assert driver.finish(requests, 19) == expected


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]
