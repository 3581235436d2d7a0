"""Digests and error targets through whole requests: what asks for them, and who pays nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.engines import VOCAB, save_checkpoint
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError, RequestError
from sparseengine.llm import LLM
from sparseengine.methods.budgets import tokens_for_error
from sparseengine.server.errors import ApiError
from sparseengine.server.schemas import SparseFields
from sparseengine.server.service import Service

METHODS = ("full", "snapkv", "tova", "streaming_llm", "kvzip")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
WATCHED = SparseParams("snapkv", budget=40, dropped_mass=True)
MENDED = SparseParams("snapkv", budget=40, dropped_mass=True, compensate=True)
BURSTS = SparseParams("tova", budget=40, dropped_mass=True, compensate=True)
LATE_BURST = SparseParams("tova", budget=40, burst=58, dropped_mass=True, compensate=True)
PLAIN = SparseParams("snapkv", budget=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "enable_methods": METHODS,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "dtype": "float32",
        "attention_backend": "reference",
        "kv_cache_memory_bytes": 8 << 20,
    }
    return LLM(str(folder), quiet=True, **{**defaults, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as opened:
        yield opened


def prompts(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCAB, (n,), generator=random).tolist() for n in lengths]


def run(llm: LLM, batch: list[list[int]], sparse: Any, params: SamplingParams = GREEDY) -> list:
    outputs = llm.generate(batch, params, sparse, use_tqdm=False)
    cache = llm.engine.scheduler.cache
    cache.check()
    assert cache.free_pages() == cache.total_pages()
    return [completion for output in outputs for completion in output.outputs]


def masses(completion: Any) -> list[tuple[float, float]]:
    return [(m.mean, m.max) for m in completion.sparse.dropped_mass]


def test_every_decode_step_is_reported_and_nothing_else_changes(llm: LLM) -> None:
    batch = prompts(150, 30)
    plain, short = run(llm, batch, PLAIN)
    watched, unevicted = run(llm, batch, WATCHED)
    assert plain.sparse is None
    assert watched.token_ids == plain.token_ids
    assert unevicted.token_ids == short.token_ids
    found = watched.sparse.dropped_mass
    assert [m.position for m in found] == list(range(150, 161))
    assert all(0 < m.mean <= m.max < 1 for m in found)
    assert watched.sparse.retained == []
    assert watched.sparse.resident_bytes > 0
    assert masses(unevicted) == [(0.0, 0.0)] * 11, "30 tokens are within the budget"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_others_in_the_batch_are_the_same_bit_for_bit(folder: Path, backend: str) -> None:
    wants = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with open_llm(folder, attention_backend=backend, enable_prefix_caching=False) as other:
        alone = run(other, prompts(150, 90), PLAIN, wants)
        kinds = [PLAIN, MENDED, WATCHED, BURSTS]
        first, second = prompts(150, 90)
        mixed = run(other, [first, first, second, second], kinds, wants)
        assert mixed[0].token_ids == alone[0].token_ids
        assert mixed[0].logprobs == alone[0].logprobs
        assert mixed[2].token_ids == alone[1].token_ids
        assert mixed[2].logprobs == alone[1].logprobs
        assert mixed[1].logprobs != alone[0].logprobs, "compensation acts"
        solo = run(other, [first], MENDED, wants)[0]
        assert mixed[1].token_ids == solo.token_ids
        assert masses(mixed[1]) == [pytest.approx(m, abs=1e-5) for m in masses(solo)]


@pytest.mark.parametrize("sparse", [MENDED, BURSTS], ids=["at the end", "bursts"])
def test_chunks_change_nothing(folder: Path, llm: LLM, sparse: SparseParams) -> None:
    (whole,) = run(llm, prompts(150), sparse)
    with open_llm(folder, max_num_batched_tokens=33) as other:
        (chunked,) = run(other, prompts(150), sparse)
    assert chunked.token_ids == whole.token_ids
    for a, b in zip(masses(chunked), masses(whole), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("sparse", [MENDED, LATE_BURST], ids=["at the end", "bursts"])
def test_preempted_requests_keep_the_same_digests(
    folder: Path, llm: LLM, sparse: SparseParams
) -> None:
    batch = prompts(90, 95, 85)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    roomy = run(llm, batch, sparse, params)
    with open_llm(folder, reserve_output_tokens=0, num_gpu_blocks_override=14) as tight:
        got = run(tight, batch, sparse, params)
        assert tight.get_metrics()["num_preemptions"] > 0
    for a, b in zip(got, roomy, strict=True):
        assert a.token_ids == b.token_ids
        assert masses(a) == [pytest.approx(m, abs=1e-4) for m in masses(b)]


def test_completions_of_one_prompt_share_digests(llm: LLM) -> None:
    three = SamplingParams(n=3, temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    one = run(llm, prompts(150), MENDED, SamplingParams(temperature=0, max_tokens=8))
    forks = run(llm, prompts(150), MENDED, three)
    assert [f.token_ids for f in forks] == [one[0].token_ids] * 3
    assert [masses(f) for f in forks] == [[pytest.approx(m, abs=1e-5) for m in masses(one[0])]] * 3


def test_compensation_comes_nearer_to_dense(llm: LLM) -> None:
    """On random weights attention is broad: means stand well for what they replace."""
    wants = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=20)
    batch = prompts(200, 220, 240, 260)

    def second(sparse: SparseParams) -> list[dict[int, float]]:
        rows = [c.logprobs[1] for c in run(llm, batch, sparse, wants)]
        return [{t: p.logprob for t, p in row.items()} for row in rows]

    dense = second(SparseParams("full"))
    errors = []
    for sparse in (PLAIN, MENDED):
        found = second(sparse)
        common = [(d[t], f[t]) for d, f in zip(dense, found, strict=True) for t in d.keys() & f]
        errors.append(sum(abs(a - b) for a, b in common) / len(common))
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        (SparseParams("full", dropped_mass=True), "dropped_mass=True is not allowed with method"),
        (SparseParams("full", compensate=True), "evicts nothing"),
        (SparseParams("streaming_llm", kv_error=0.1), "measures no attention.*snapkv"),
    ],
)
def test_methods_that_cannot_say_so(llm: LLM, sparse: SparseParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts(20), GREEDY, sparse, use_tqdm=False)


@pytest.mark.parametrize(
    "wrong", [{"dropped_mass": 1}, {"compensate": "yes"}, {"kv_error": -0.1}, {"kv_error": True}]
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(wrong))}="):
        SparseParams("snapkv", **wrong)


def test_a_server_takes_the_fields_and_checks_them() -> None:
    info = SimpleNamespace(methods=("snapkv",), prefill="dense", prefill_config={})
    service: Any = SimpleNamespace(info=info)
    given = SparseFields(budget=40, dropped_mass=True, compensate=True)
    assert Service.sparse(service, given) == MENDED
    with pytest.raises(ApiError, match="kv_error=2"):
        Service.sparse(service, SparseFields(kv_error=2))


def test_an_engine_may_have_them_as_its_default(folder: Path) -> None:
    given = {"dropped_mass": True, "kernel": 3}
    with open_llm(folder, sparse_method="snapkv", kv_budget=40, sparse_config=given) as other:
        (found,) = run(other, prompts(100), None)
        assert len(found.sparse.dropped_mass) == 11
    with pytest.raises(ConfigError, match=r"--sparse-config: kv_error=0\.1.* no attention"):
        open_llm(folder, sparse_method="streaming_llm", sparse_config={"kv_error": 0.1})
    with pytest.raises(ConfigError, match="compensate"):
        open_llm(folder, sparse_method="snapkv", sparse_config={"compensate": 3})


def test_bytes_that_digests_add_to_a_step_are_counted(llm: LLM) -> None:
    """Of every row: its two entries in 16 lost tokens, those that wait, and the kept keys again."""
    batch, plain = prompts(150), SparseParams("snapkv", budget=40, record=True)
    watched = SparseParams("snapkv", budget=40, record=True, dropped_mass=True)
    (before,), (after,) = run(llm, batch, plain), run(llm, batch, watched)
    spec = llm.resolved.spec
    dropped = 150 - 40
    entries, extra = dropped // 16 * 2 + dropped % 16, []
    for step in range(11):
        kept = 41 + step
        extra.append(
            sum(
                layer.kv_heads * 4 * (entries * sum(layer.stored_dims) + kept * layer.head_dim)
                for layer in spec.layers
            )
        )
    pairs = zip(after.sparse.reads, before.sparse.reads, strict=True)
    assert [a.bytes_read - b.bytes_read for a, b in pairs] == extra


def most_at_once(llm: LLM, batch: list[list[int]], params: SamplingParams) -> int:
    """How many requests ran together at most."""
    step, seen = llm.engine.step, [0]

    def watched() -> Any:
        found = step()
        seen.append(len(llm.engine.scheduler.running))
        return found

    llm.engine.step = watched
    run(llm, batch, None, params)
    return max(seen)


def test_the_memory_table_charges_digests_and_as_many_run(folder: Path) -> None:
    fits = {}
    for asked in ({}, {"dropped_mass": True}):
        options = {"sparse_method": "snapkv", "kv_budget": 40, "sparse_config": asked}
        options |= {"max_model_len": 140, "num_gpu_blocks_override": 90, "enable_methods": None}
        with open_llm(folder, max_num_seqs=64, **options) as other:
            table = other.memory
            assert [f.digests for f in table.fits] == [bool(asked), False], "of the default alone"
            assert ("with digests" in table.render()) == bool(asked)
            fits[bool(asked)] = table.fits[0].requests
            params = SamplingParams(temperature=0, max_tokens=table.output_tokens, ignore_eos=True)
            batch = prompts(*[table.prompt_tokens] * (table.fits[0].requests + 2))
            assert most_at_once(other, batch, params) == table.fits[0].requests
            assert other.get_metrics()["num_preemptions"] == 0
    assert fits[True] < fits[False]


# ── error targets ─────────────────────────────────────────────────────────────────────────────────


def kept(llm: LLM, sparse: SparseParams) -> list[int]:
    (found,) = run(llm, prompts(200), sparse)
    rows = found.sparse.retained[0].positions
    return [len(row) for layer in sorted(rows) for row in rows[layer]]


def test_a_smaller_error_keeps_more_and_none_keeps_all(llm: LLM) -> None:
    sizes = [kept(llm, SparseParams("snapkv", kv_error=e, record=True)) for e in (1, 0.3, 0.05, 0)]
    for few, many in pairwise(sizes):
        assert all(a <= b for a, b in zip(few, many, strict=True))
        assert sum(few) < sum(many)
    assert set(sizes[-1]) == {200}
    (dense,) = run(llm, prompts(200), SparseParams("full"))
    (exact,) = run(llm, prompts(200), SparseParams("snapkv", kv_error=0.0))
    assert exact.token_ids == dense.token_ids
    capped = kept(llm, SparseParams("snapkv", kv_error=0.05, budget=64, record=True))
    assert max(capped) <= 64
    assert [min(n, 64) for n in sizes[2]] == capped


def test_an_error_target_stands_behind_a_selection_too(folder: Path) -> None:
    read = {"select": "quest", "select_tokens": 32, "select_config": {"dense_layers": 0}}
    target: dict[str, Any] = {"kv_error": 0.3, "record": True}
    with open_llm(folder, enable_methods=("snapkv", "quest")) as other:
        alone = kept(other, SparseParams("snapkv", **target))
        assert kept(other, SparseParams("snapkv", **target, **read)) == alone
        assert max(alone) < 200
        with pytest.raises(RequestError, match="it evicts nothing"):
            kept(other, SparseParams("quest", **target))


@pytest.mark.parametrize("method", ["snapkv", "tova", "kvzip"])
def test_what_an_error_came_to_is_reported(llm: LLM, method: str) -> None:
    for error in (0.3, 0.0):
        wants = SparseParams(method, kv_error=error, record=True)
        (found,) = run(llm, prompts(200), wants)
        rows = found.sparse.retained[0].positions
        sizes = [len(row) for layer in rows for row in rows[layer]]
        assert found.sparse.found_budget == pytest.approx(sum(sizes) / len(sizes))
        assert (found.sparse.found_budget < 200) == (error > 0)
        assert found.sparse.budget is None, "no ceiling was given"
    three = SamplingParams(n=3, temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    forks = run(llm, prompts(200, 40), SparseParams(method, kv_error=0.3, budget=100), three)
    reports = [f.sparse for f in forks]
    assert [r.retained for r in reports] == [[]] * 6, "nothing else was asked for"
    assert {r.budget for r in reports} == {100}
    assert len({r.found_budget for r in reports[:3]}) == 1
    assert 0 < reports[0].found_budget <= 100
    assert 0 < reports[3].found_budget <= 40
    assert reports[0].to_dict()["found_budget"] == reports[0].found_budget
    (plain,) = run(llm, prompts(200), SparseParams(method, budget=100))
    assert plain.sparse is None


def test_digests_of_what_an_error_dropped(llm: LLM) -> None:
    (found,) = run(llm, prompts(150), SparseParams("snapkv", kv_error=0.2, dropped_mass=True))
    assert all(0 < m.mean <= m.max < 1 for m in found.sparse.dropped_mass)


def test_the_bound_holds_for_the_true_output_error_in_fp64() -> None:
    random = torch.Generator().manual_seed(0)
    for trial in range(40):
        length, dim = 200, 16
        sharpness = torch.tensor([0.2, 1.0, 3.0, 6.0])[:, None]
        logits = torch.randn(4, length, generator=random) * sharpness  # broad heads to peaked ones
        values = torch.randn(4, length, dim, generator=random, dtype=torch.float64)
        scores = logits + torch.randn(4, length, generator=random) * (trial % 3)
        for error in (0.5, 0.1, 0.01, 1e-4):
            counts = tokens_for_error(scores, logits.softmax(-1), error, 4)
            assert bool((counts % 4 == 0).all())
            for h in range(4):
                p = logits[h].double().softmax(-1)
                order = scores[h].argsort(descending=True, stable=True)
                best = order[: int(counts[h])]
                lost = 1 - float(p[best].sum())
                assert lost <= error + 1e-12
                if int(counts[h]) == 0:
                    continue
                full, part = p @ values[h], (p[best] / p[best].sum()) @ values[h][best]
                bound = 2 * error * float(values[h].norm(dim=-1).max())
                assert float((full - part).norm()) <= bound + 1e-12
                fewer = order[: int(counts[h]) - 4]
                assert 1 - float(p[fewer].sum()) > error * (1 - 1e-3) - 1e-12, "a page too many"


def test_a_broad_head_gets_more_pages_than_a_peaked_one() -> None:
    flat, peaked = torch.zeros(256), torch.zeros(256)
    peaked[17] = 12.0
    both = torch.stack([flat, peaked])
    broad, narrow = tokens_for_error(both, both.softmax(-1), 0.1, 16).tolist()
    assert (broad, narrow) == (240, 16)
