"""Sampling against formulas written down independently, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sparseengine.core.params import SamplingParams
from sparseengine.core.plan import Request
from sparseengine.engine.sampling import Sampler, SamplingExtras, top_logprobs, uniform
from sparseengine.errors import RequestError

V = 40


def logits_of(rows: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, V, generator=generator) * 2


def request_of(
    params: SamplingParams, *, id: int = 0, prompt: tuple[int, ...] = (1, 2, 3), output: tuple = ()
) -> Request:
    return Request(
        id=id,
        tokens=[*prompt, *output],
        prompt_len=len(prompt),
        max_tokens=100,
        sampling=params,
    )


def draw(params: SamplingParams, logits: Tensor, seed: int = 0, **request: object) -> int:
    sampler = Sampler()
    made = request_of(params, **request)  # type: ignore[arg-type]
    sampler.add(made, SamplingExtras(seed=seed))
    return sampler.sample(logits, [made])[0].token


def distribution(params: SamplingParams, logits: Tensor, count: int = 4000) -> np.ndarray:
    """Frequencies over seeds; one call, so the rows are independent requests."""
    sampler = Sampler()
    requests = [request_of(params, id=i) for i in range(count)]
    for i, r in enumerate(requests):
        sampler.add(r, SamplingExtras(seed=i))
    tokens = [s.token for s in sampler.sample(logits.expand(count, -1), requests)]
    return np.bincount(tokens, minlength=V) / count


def expected(logits: Tensor, t: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Temperature, min_p, top_k, top_p, one token at a time, in float64."""
    x = logits[0].double().numpy() / t
    p = np.exp(x - x.max())
    p /= p.sum()
    p = np.where(p < min_p * p.max(), 0.0, p)
    order = sorted(range(V), key=lambda i: (-p[i], i))
    if top_k > 0:
        order = order[:top_k]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass < top_p * total:
            kept.append(i)
        mass += p[i]
    out = np.zeros(V)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize(
    ("t", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.3, 8, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.5, -1, 0.95, 0.05),
    ],
)
def test_distribution_is_the_formulas(t: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(seed=4)
    params = SamplingParams(temperature=t, top_k=top_k, top_p=top_p, min_p=min_p)
    want = expected(logits, t, top_k, top_p, min_p)
    got = distribution(params, logits)
    assert not got[want == 0].any(), "a token outside the allowed set was drawn"
    sigma = np.sqrt(want * (1 - want) / 4000)
    assert (np.abs(got - want) <= 5 * sigma + 3 / 4000).all()  # rare tokens: a few hits


def test_flat_nucleus_of_a_large_vocabulary() -> None:
    """top_p over more tokens than are ranked at first."""
    logits = torch.zeros(1, 4000)
    params = SamplingParams(top_p=0.5)
    sampler = Sampler()
    requests = [request_of(params, id=i) for i in range(500)]
    for i, r in enumerate(requests):
        sampler.add(r, SamplingExtras(seed=i))
    tokens = [s.token for s in sampler.sample(logits.expand(500, -1), requests)]
    assert max(tokens) < 2000  # equal logits: the smaller ids are the nucleus
    assert max(tokens) > 1900


def test_top_k_ties_go_to_the_smaller_id() -> None:
    logits = torch.zeros(1, V)
    got = distribution(SamplingParams(top_k=3), logits, count=300)
    assert set(np.flatnonzero(got)) == {0, 1, 2}


def test_greedy_is_the_argmax_and_ties_go_to_the_smaller_id() -> None:
    logits = torch.zeros(1, V)
    logits[0, [7, 11]] = 5.0
    assert draw(SamplingParams(temperature=0), logits) == 7


def test_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    logits = logits_of() * 100
    best = int(logits.argmax())
    assert draw(SamplingParams(temperature=1e-5), logits, seed=3) == best


def test_seeds_reproduce_and_differ() -> None:
    logits = logits_of() * 0.1
    params = SamplingParams()
    first = [draw(params, logits, seed=s) for s in range(30)]
    assert first == [draw(params, logits, seed=s) for s in range(30)]
    assert len(set(first)) > 5
    steps = [draw(params, logits, seed=1, output=(5,) * n) for n in range(20)]
    assert len(set(steps)) > 5


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    assert uniform(3, 4) == uniform(3, 4)
    assert uniform(-1, 0) != uniform(1, 0)
    many = np.array([uniform(s, i) for s in range(40) for i in range(40)])
    assert ((many >= 0) & (many < 1)).all()
    assert abs(many.mean() - 0.5) < 0.03
    assert abs(many.var() - 1 / 12) < 0.01


def test_the_batch_changes_nothing() -> None:
    """Greedy rows beside sampled ones, banned tokens beside free ones (case 7)."""
    logits = logits_of(6, seed=9)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0, allowed_token_ids=[3, 4]),
        SamplingParams(temperature=0.7, top_k=4, top_p=0.9),
        SamplingParams(temperature=0, logit_bias={5: -100.0, 6: 100.0}),
        SamplingParams(temperature=2.0, min_p=0.1, repetition_penalty=1.3),
    ]
    sampler = Sampler()
    requests = [request_of(p, id=i) for i, p in enumerate(params)]
    for r in requests:
        sampler.add(r, SamplingExtras(seed=100 + r.id))
    together = [s.token for s in sampler.sample(logits, requests)]
    alone = [sampler.sample(logits[i : i + 1], [r])[0].token for i, r in enumerate(requests)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    assert together[2] in (3, 4)
    assert together[4] == 6


def test_logits_are_left_alone() -> None:
    logits = logits_of()
    before = logits.clone()
    draw(
        SamplingParams(repetition_penalty=2.0, logit_bias={1: 3.0}, allowed_token_ids=[1, 2]),
        logits,
    )
    assert torch.equal(logits, before)


def test_penalties_follow_the_formulas() -> None:
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3
    )
    prompt, output = (1, 2, 2, 9), (5, 5, 5, 2, 7)
    logits = logits_of(seed=12)
    want = logits[0].double().numpy().copy()
    for t in set(prompt) | set(output):
        want[t] = want[t] / 1.5 if want[t] > 0 else want[t] * 1.5
    for t in set(output):
        want[t] -= 0.3 * output.count(t) + 0.4
    sampler = Sampler()
    row = logits[0].clone()
    sampler._process(row, request_of(params, prompt=prompt, output=output))
    np.testing.assert_allclose(row.numpy(), want, rtol=1e-6, atol=1e-6)


def test_min_tokens_masks_eos_and_stop_ids_until_reached() -> None:
    logits = torch.zeros(1, V)
    logits[0, 3], logits[0, 8], logits[0, 5] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[8])
    sampler = Sampler()
    tokens = []
    for output in ((), (1,), (1, 1)):
        request = request_of(params, output=output)
        sampler.add(request, SamplingExtras(stop_ids=frozenset({3, 8})))
        tokens.append(sampler.sample(logits, [request])[0].token)
    assert tokens == [5, 5, 3]


def test_bad_words_ban_the_last_token_behind_the_others() -> None:
    logits = torch.zeros(1, V)
    logits[0, 4], logits[0, 6] = 5.0, 4.0
    params = SamplingParams(temperature=0, bad_words=["x"])
    extras = SamplingExtras(bad_words=((2, 3, 4), (9,)))
    sampler = Sampler()
    for output, want in (((2, 3), 6), ((3, 2), 4), ((3,), 4), ((), 4), ((7, 2, 3), 6)):
        request = request_of(params, output=output, prompt=(2, 3))
        sampler.add(request, extras)
        assert sampler.sample(logits, [request])[0].token == want


def test_nan_logits_end_that_row_only() -> None:
    logits = logits_of(4)
    logits[1, 3] = math.nan
    logits[2, 0] = math.inf
    requests = [request_of(SamplingParams(temperature=t), id=i) for i, t in enumerate((0, 0, 1, 1))]
    samples = Sampler().sample(logits, requests)
    assert [s.error is not None for s in samples] == [False, True, True, False]
    assert "not finite" in str(samples[1].error)
    assert samples[0].token == int(logits[0].argmax())


def test_nothing_allowed_is_an_error_not_token_zero() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[3], min_tokens=1)
    sampler = Sampler()
    request = request_of(params)
    sampler.add(request, SamplingExtras(stop_ids=frozenset({3})))
    assert "no token is allowed" in str(sampler.sample(logits_of(), [request])[0].error)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(seed=3)
    params = SamplingParams(temperature=0.3, logprobs=4, logit_bias={17: 100.0})
    request = request_of(params)
    sample = Sampler().sample(logits, [request])[0]
    assert sample.token == 17
    x = logits[0].double().numpy()
    want = x - (x.max() + math.log(np.exp(x - x.max()).sum()))
    order = sorted(range(V), key=lambda i: (-x[i], i))
    assert sample.logprobs is not None
    assert list(sample.logprobs) == [17, *[t for t in order[:4] if t != 17]]
    for token, entry in sample.logprobs.items():
        assert entry.logprob == pytest.approx(want[token], abs=1e-5)
        assert entry.rank == 1 + order.index(token)


def test_logprobs_zero_gives_the_sampled_token_only() -> None:
    found = top_logprobs(logits_of(2), [5, 6], [0, 2])
    assert list(found[0]) == [5]
    assert len(found[1]) in (2, 3)


@pytest.mark.parametrize("name", ["top_p", "min_p", "temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1])
def test_values_that_are_no_numbers_in_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("values", [{"n": 10_000_000}, {"max_tokens": 10**12}, {"n": 0}])
def test_absurd_sizes_are_refused_at_once(values: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        SamplingParams(**values)  # type: ignore[arg-type]
