"""The engine end to end on tiny seeded checkpoints: what shares a batch changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.engines import (
    BOS,
    EOS,
    VOCAB,
    ToyModel,
    drain,
    make_engine,
    save_checkpoint,
    toy_spec,
)
from fixtures.tiny import reference_model
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.outputs import RequestOutput
from sparseengine.errors import CapacityError, RequestError
from sparseengine.llm import LLM

METHODS = ("full", "snapkv", "adakv", "quest")
MIXED = (
    SparseParams("full"),
    SparseParams("snapkv", budget=40),
    SparseParams("snapkv", budget=24),
    SparseParams("adakv", budget=40),
    SparseParams("quest", budget=48),
    SparseParams("snapkv", ratio=0.5),
)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {
        "attention_backend": "reference",
        "enable_methods": METHODS,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 8 << 20,
    }
    return LLM(str(folder), quiet=True, **{**defaults, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as opened:
        yield opened
        cache = opened.engine.scheduler.cache
        cache.check()
        assert cache.free_pages() == cache.total_pages()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


LENGTHS = (150, 90, 120, 77, 101, 64)


def run(llm: LLM, batch: list[list[int]], params: Any, sparse: Any) -> list[RequestOutput]:
    return llm.generate(batch, params, sparse, use_tqdm=False)


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[c.token_ids for c in o.outputs] for o in outputs]


@pytest.fixture(scope="module")
def solo(llm: LLM) -> list[list[list[int]]]:
    """Every request of the mixed batch on its own."""
    return [ids(run(llm, [p], GREEDY, s))[0] for p, s in zip(prompts(*LENGTHS), MIXED, strict=True)]


# ── one batch, many methods ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 33},
        {"max_num_batched_tokens": 16, "mix": False, "max_decode_stall_steps": 2},
        {"max_num_seqs": 2},
        {"attention_backend": "auto", "max_num_batched_tokens": 50},
    ],
    ids=["whole", "chunks", "alternating", "queueing", "fast-backend"],
)
def test_a_mixed_batch_equals_solo_runs(folder: Path, solo: list, options: dict) -> None:
    with open_llm(folder, **options) as other:
        assert ids(run(other, prompts(*LENGTHS), GREEDY, list(MIXED))) == solo


@pytest.mark.parametrize("method", range(len(MIXED)))
def test_preempted_requests_end_as_if_undisturbed(folder: Path, method: int) -> None:
    """A pool for one or two of six requests, admitted without reserving their output."""
    batch = prompts(45, 48, 44, 47, 46, 45, seed=5)
    params = [
        SamplingParams(
            temperature=t, seed=i, max_tokens=36, ignore_eos=True, repetition_penalty=1.1
        )
        for i, t in enumerate((0.0, 1.0, 0.0, 0.7, 1.0, 0.0))
    ]
    sparse = MIXED[method]
    with open_llm(folder, reserve_output_tokens=0, num_gpu_blocks_override=9) as tight:
        got = run(tight, batch, params, sparse)
        assert tight.get_metrics()["num_preemptions"] > 0
        assert tight.get_metrics()["kv_cache_usage_perc"] == 0.0
    with open_llm(folder) as roomy:
        assert ids(got) == ids(run(roomy, batch, params, sparse))
        assert roomy.get_metrics()["num_preemptions"] == 0


def test_identical_prompts_in_one_prefill_batch(llm: LLM) -> None:
    prompt = prompts(40)[0]
    one = ids(run(llm, [prompt], GREEDY, None))[0]
    assert ids(run(llm, [prompt] * 3, GREEDY, None)) == [one] * 3


def test_short_beside_long_with_eviction(llm: LLM) -> None:
    """Two prompts of 50 and 10 tokens, snapkv (case 57)."""
    batch, sparse = prompts(50, 10), SparseParams("snapkv", budget=16)
    alone = [ids(run(llm, [p], GREEDY, sparse))[0] for p in batch]
    assert ids(run(llm, batch, GREEDY, sparse)) == alone


def test_eviction_frees_memory(llm: LLM) -> None:
    sparse = [SparseParams("full", record=True), SparseParams("snapkv", budget=24, record=True)]
    full, sparse_out = run(llm, prompts(200) * 2, GREEDY, sparse)
    kept, dense = sparse_out.outputs[0].sparse, full.outputs[0].sparse
    assert kept is not None
    assert dense is not None
    assert kept.resident_bytes < dense.resident_bytes / 4
    assert all(len(row) == 24 for rows in kept.retained[0].positions.values() for row in rows)


# ── seeds and n > 1 ───────────────────────────────────────────────────────────────────────────────


def test_seeds_do_not_depend_on_the_batch(llm: LLM) -> None:
    batch = prompts(20, 30, 25)
    params = [SamplingParams(seed=s, max_tokens=8) for s in (1, 2, 3)]
    together = ids(run(llm, batch, params, None))
    assert together == [ids(run(llm, [p], q, None))[0] for p, q in zip(batch, params, strict=True)]
    assert ids(run(llm, [batch[0]], SamplingParams(seed=9, max_tokens=8), None))[0] != together[0]


def test_unseeded_requests_differ_and_engines_repeat_them(folder: Path) -> None:
    prompt, params = prompts(20) * 2, SamplingParams(max_tokens=8)
    with open_llm(folder, seed=3) as first, open_llm(folder, seed=3) as second:
        a, b = ids(run(first, prompt, params, None)), ids(run(second, prompt, params, None))
    assert a == b
    assert a[0] != a[1]


@pytest.mark.parametrize("sparse", MIXED[:5], ids=lambda s: f"{s.method}-{s.budget}")
def test_n_completions_equal_n_runs(llm: LLM, sparse: SparseParams) -> None:
    """Completion i of seed s is the only completion of seed s + i."""
    prompt = prompts(70)
    many = run(llm, prompt, SamplingParams(n=4, seed=50, max_tokens=8), sparse)
    single = [
        ids(run(llm, prompt, SamplingParams(seed=50 + i, max_tokens=8), sparse))[0][0]
        for i in range(4)
    ]
    assert ids(many)[0] == single
    assert [c.index for c in many[0].outputs] == [0, 1, 2, 3]
    assert len({tuple(t) for t in single}) > 1


def test_n_completions_share_the_prompts_pages(llm: LLM) -> None:
    engine = llm.engine
    cache = engine.scheduler.cache

    def peak(n: int, copies: int) -> int:
        params = SamplingParams(n=n, max_tokens=4, seed=1, ignore_eos=True)
        for i in range(copies):  # salts: else copies would share, too
            engine.add_request(prompts(160)[0], params, cache_salt=str(i))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, cache.total_pages() - cache.free_pages())
        return most

    assert peak(4, 1) < 0.5 * peak(1, 4)


# ── ends ──────────────────────────────────────────────────────────────────────────────────────────


def test_eos_lists_stop_ids_and_ignore_eos(llm: LLM) -> None:
    prompt = prompts(30)
    tokens = ids(run(llm, prompt, GREEDY, None))[0][0]
    third = tokens[2]
    first = tokens.index(third)
    stopped = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=[third])
    out = run(llm, prompt, stopped, None)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (
        tokens[: first + 1],
        "stop",
        third,
    )
    bias = {EOS: 100.0}
    out = run(llm, prompt, SamplingParams(temperature=0, logit_bias=bias), None)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([EOS], "stop", None)
    out = run(llm, prompt, SamplingParams(temperature=0, logit_bias=bias, min_tokens=3), None)[
        0
    ].outputs[0]
    assert len(out.token_ids) == 4
    assert EOS not in out.token_ids[:3]
    out = run(llm, prompt, SamplingParams(temperature=0, logit_bias=bias, ignore_eos=True), None)[
        0
    ].outputs[0]
    assert out.token_ids == [EOS] * 16
    assert out.finish_reason == "length"


def test_every_eos_of_generation_config_ends(folder: Path, tmp_path: Path) -> None:
    """Case 37."""
    import json
    import shutil

    copy = shutil.copytree(folder, tmp_path / "eos")
    file = copy / "generation_config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**config, "eos_token_id": [EOS, 106, 50]}))
    with open_llm(copy) as opened:
        for token in (EOS, 106, 50):
            params = SamplingParams(temperature=0, logit_bias={token: 100.0})
            out = run(opened, prompts(8), params, None)[0].outputs[0]
            assert (out.token_ids, out.finish_reason) == ([token], "stop")


def test_max_tokens_none_fills_the_context(folder: Path) -> None:
    with open_llm(folder, max_model_len=40) as small:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        out = run(small, prompts(30, 39), params, None)
    assert [len(o.outputs[0].token_ids) for o in out] == [10, 1]
    assert [o.outputs[0].finish_reason for o in out] == ["length", "length"]


def test_stop_strings_end_a_request_and_cut_its_text(llm: LLM) -> None:
    """Tokens are forced through the bias, so the text is known: "the quick brown"."""
    prompt = "the quick"
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    stop = next(text[i : i + 2] for i in range(3, len(text) - 2) if text[i : i + 2].isascii())
    stopped = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
    out = llm.generate(prompt, stopped, use_tqdm=False)[0].outputs[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.text == text[: text.index(stop)]
    kept = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    assert llm.generate(prompt, kept, use_tqdm=False)[0].outputs[0].text == out.text + stop


def test_bad_words_never_appear(llm: LLM) -> None:
    prompt = prompts(12)
    free = run(llm, prompt, GREEDY, None)[0].outputs[0]
    word = next(
        w for t in free.token_ids if (w := llm.tokenizer.decode([t])).isascii() and w.strip()
    )
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, bad_words=[word])
    assert word not in run(llm, prompt, params, None)[0].outputs[0].text


# ── log-probabilities against transformers ────────────────────────────────────────────────────────


@pytest.mark.parametrize("step_tokens", [2048, 7])
def test_logprobs_equal_transformers(folder: Path, step_tokens: int) -> None:
    model = reference_model(vocab_size=VOCAB, bos_token_id=BOS, eos_token_id=EOS)
    prompt = prompts(33)[0]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    with open_llm(folder, max_num_batched_tokens=step_tokens) as opened:
        out = run(opened, [prompt], params, None)[0]
    whole = prompt + out.outputs[0].token_ids
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0].double().numpy()
    want = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    want -= logits.max(-1, keepdims=True)
    assert out.prompt_logprobs is not None
    assert out.outputs[0].logprobs is not None
    assert out.prompt_logprobs[0] is None
    rows = [*out.prompt_logprobs[1:], *out.outputs[0].logprobs]
    assert len(rows) == len(whole) - 1
    for i, row in enumerate(rows):
        assert row is not None
        assert whole[i + 1] in row
        top = np.argsort(-want[i], kind="stable")[: 2 if i < 32 else 3]
        assert set(row) == {whole[i + 1], *top.tolist()}
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(want[i][token], abs=1e-4)
            assert entry.rank == 1 + int((want[i] > want[i][token]).sum())
    total = sum(r[t].logprob for r, t in zip(out.outputs[0].logprobs, whole[33:], strict=True))
    assert out.outputs[0].cumulative_logprob == pytest.approx(total)


# ── bad input, failures, aborts ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "params", "sparse", "message"),
    [
        ([], GREEDY, None, "empty"),
        ([3, VOCAB], GREEDY, None, f"{VOCAB}"),
        ([3, -1], GREEDY, None, "-1"),
        ([3] * 512, GREEDY, None, "512 tokens.*max_model_len=512"),
        ([3], SamplingParams(logprobs=30), None, "logprobs=30.*max_logprobs=20"),
        ([3], SamplingParams(logit_bias={VOCAB: 1.0}), None, "logit_bias"),
        ([3], SamplingParams(allowed_token_ids=[VOCAB]), None, "allowed_token_ids"),
        ([3], SamplingParams(stop="x", detokenize=False), None, "detokenize"),
        ([3], GREEDY, SparseParams("snapkvv"), "did you mean 'snapkv'"),
        ([3], GREEDY, SparseParams("knorm"), "enable_methods"),
        ([3], GREEDY, SparseParams("snapkv", windoww=3), "window"),
        ([3], GREEDY, SparseParams("full", budget=3), "budget=3"),
        ({"text": "x"}, GREEDY, None, "prompt_token_ids"),
    ],
)
def test_bad_input_is_a_request_error_and_the_engine_serves_on(
    llm: LLM, prompt: Any, params: SamplingParams, sparse: Any, message: str
) -> None:
    steps = llm.get_metrics()["num_steps"]
    given = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
    with pytest.raises(RequestError, match=message):
        llm.generate(
            [{"prompt_token_ids": [5, 6]}, given], [GREEDY, params], [None, sparse], use_tqdm=False
        )
    assert llm.get_metrics()["num_steps"] == steps, "something ran before the error"
    assert not llm.engine.has_work
    assert len(run(llm, prompts(5), GREEDY, None)[0].outputs[0].token_ids) == 10


def test_empty_text_is_a_request_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate("", GREEDY, use_tqdm=False)


def test_never_fits_is_refused_with_both_numbers(folder: Path) -> None:
    with open_llm(folder, num_gpu_blocks_override=10) as small:
        for _ in range(5):
            with pytest.raises(CapacityError, match=r"needs \d+ KV pages, the engine has \d+") as e:
                run(small, prompts(400), GREEDY, None)
            assert e.value.needed > e.value.available
        assert not small.engine.has_work
        assert run(small, prompts(20), GREEDY, None)[0].finished


def test_nan_logits_end_one_request_only() -> None:
    model = ToyModel(toy_spec(), poison=63)
    engine = make_engine(model)
    good = engine.add_request([1, 2, 3], GREEDY)
    bad = engine.add_request([1, 63], SamplingParams(n=2, max_tokens=5))
    found = drain(engine)
    assert {c.finish_reason for c in found[bad].outputs} == {"error"}
    assert "not finite" in str(found[bad].outputs[0].stop_reason)
    tokens = found[good].outputs[0].token_ids
    assert 63 not in tokens
    assert len(tokens) == 10
    assert engine.scheduler.cache.free_pages() == engine.scheduler.cache.total_pages()


def test_abort_at_every_step_frees_everything(llm: LLM) -> None:
    engine = llm.engine
    cache = engine.scheduler.cache
    for steps in range(6):
        params = SamplingParams(n=2, max_tokens=6, ignore_eos=True)
        name = engine.add_request(prompts(60)[0], params, MIXED[1 + steps % 4])
        for _ in range(steps):
            engine.step()
        engine.abort(name)
        engine.abort(name)
        engine.abort("unknown")
        assert cache.free_pages() == cache.total_pages()
        found = drain(engine)
        assert {c.finish_reason for c in found[name].outputs} == {"abort"}


def test_an_id_in_use_is_refused(llm: LLM) -> None:
    llm.engine.add_request([4, 5], GREEDY, request_id="mine")
    with pytest.raises(RequestError, match="mine"):
        llm.engine.add_request([4, 5], GREEDY, request_id="mine")
    assert list(drain(llm.engine)) == ["mine"]
    llm.engine.add_request([4, 5], GREEDY, request_id="mine")
    assert list(drain(llm.engine)) == ["mine"]


def test_a_callers_id_may_look_like_one_of_ours(llm: LLM) -> None:
    first = llm.engine.add_request([4, 5], GREEDY)
    ahead = str(int(first) + 2)
    assert llm.engine.add_request([4, 5], GREEDY, request_id=ahead) == ahead
    own = llm.engine.add_request([4, 5], GREEDY)
    assert len({first, ahead, own}) == 3
    assert set(drain(llm.engine)) == {first, ahead, own}


def test_token_ids_may_be_numpy_integers(llm: LLM) -> None:
    prompt = prompts(9)[0]
    wanted = ids(run(llm, [prompt], GREEDY, None))
    assert ids(run(llm, [list(np.array(prompt))], GREEDY, None)) == wanted
    with pytest.raises(RequestError, match="True"):
        run(llm, [[True, 3]], GREEDY, None)


def test_knobs_are_per_request_and_those_that_change_storage_are_refused(llm: LLM) -> None:
    batch = prompts(90, 90)
    sparse = [SparseParams("snapkv", budget=30, kernel=3), SparseParams("snapkv", budget=30)]
    both = ids(run(llm, batch, GREEDY, sparse))
    assert both == [ids(run(llm, [p], GREEDY, s))[0] for p, s in zip(batch, sparse, strict=True)]
    with pytest.raises(RequestError, match="start the engine"):
        run(llm, batch[:1], GREEDY, SparseParams("snapkv", budget=300, window=128))


def test_dense_equals_a_budget_that_keeps_everything(llm: LLM) -> None:
    batch = prompts(80)
    dense = ids(run(llm, batch, GREEDY, None))
    for method in METHODS[1:]:
        assert ids(run(llm, batch, GREEDY, SparseParams(method, budget=200))) == dense
