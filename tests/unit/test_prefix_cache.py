"""The prefix cache: what is kept, what is found, what is said about the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.cache_harness import Mirror, request
from fixtures.engines import ToyModel, drain, make_engine, save_checkpoint, toy_spec
from sparseengine import LLM, SamplingParams, SparseParams
from sparseengine.cache import kept
from sparseengine.core.cache import PrefixHit
from sparseengine.core.plan import MISS_REASONS, Miss
from sparseengine.core.specs import Ragged
from sparseengine.engine.engine import Engine
from sparseengine.errors import RequestError

PAGE = 4


@pytest.fixture
def engine() -> Engine:
    return make_engine(ToyModel(toy_spec()), num_pages=40, keeps=True)


def run(engine: Engine, tokens: list[int], salt: str = "", new: int = 1, **kw):
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, **kw)
    name = engine.add_request(tokens, sampling, cache_salt=salt)
    output = drain(engine)[name]
    engine.scheduler.cache.check()
    return output


TEXT = [5 + i % 40 for i in range(30)]


def test_a_hit_is_whole_pages_and_leaves_a_token_to_run(engine: Engine) -> None:
    assert run(engine, TEXT).num_cached_tokens == 0
    for length, found in ((30, 28), (29, 28), (28, 24), (6, 4), (5, 4), (4, 0)):
        assert run(engine, TEXT[:length]).num_cached_tokens == found
    assert run(engine, [*TEXT, 3, 4, 5]).num_cached_tokens == 28
    assert run(engine, [*TEXT, 3, 4, 5, 6, 7]).num_cached_tokens == 32


def test_what_was_generated_is_found_in_the_next_turn(engine: Engine) -> None:
    first = run(engine, TEXT, new=7)
    turn = [*TEXT, *first.outputs[0].token_ids, 2, 3]
    assert run(engine, turn).num_cached_tokens == 36  # the last token was never run


def test_every_miss_says_why(engine: Engine) -> None:
    assert run(engine, TEXT).cache_miss == Miss("cold")
    assert run(engine, TEXT).cache_miss is None
    assert run(engine, [*TEXT, 9, 9, 9, 9, 9]).cache_miss is None, "all that is stored was found"
    assert run(engine, [*TEXT[:10], *[9] * 9]).cache_miss == Miss("diverged", 10)
    assert run(engine, [*TEXT[:2], *[8] * 9]).cache_miss == Miss("below_page", 2)
    assert run(engine, [7]).cache_miss == run(engine, TEXT[:4]).cache_miss == Miss("below_page")
    scored = run(engine, TEXT, prompt_logprobs=0)
    assert scored.cache_miss == Miss("bypassed", detail="prompt_logprobs")
    assert len(scored.prompt_logprobs) == len(TEXT)
    values = engine.metrics()
    assert values["prefix_miss_cold"] == values["prefix_miss_diverged"] == 1
    assert values["prefix_cache_hits"] > 50
    named = {k.removeprefix("prefix_miss_") for k in values if k.startswith("prefix_miss_")}
    assert named <= set(MISS_REASONS)


def test_what_made_room_for_others_is_called_evicted(engine: Engine) -> None:
    run(engine, TEXT)
    for i in range(8):  # each prompt takes a fifth of the memory
        run(engine, [50 + i, *TEXT])
    gone = run(engine, TEXT)
    assert gone.num_cached_tokens < 28
    assert gone.cache_miss == Miss("evicted", 29)
    assert engine.scheduler.cache.free_pages() == engine.scheduler.cache.total_pages()


def test_rows_give_up_their_tails_first() -> None:
    """One long row and a request that needs a third of the memory: the beginning stays."""
    engine = make_engine(ToyModel(toy_spec()), num_pages=600, max_model_len=2400, keeps=True)
    long = [5 + i % 41 for i in range(1600)]
    run(engine, long)
    run(engine, [4, *long[:999]])
    found = run(engine, long)
    assert found.num_cached_tokens == 800
    assert found.cache_miss == Miss("evicted", 1599)


@pytest.mark.parametrize(("limit", "value"), [("MAX_ROWS", 3), ("MAX_BYTES", 300)])
def test_rows_are_bounded_in_number_and_host_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(kept, limit, value)
    texts = [[40 + i, *TEXT[:14]] for i in range(6)]
    for text in texts:
        run(engine, text)
    found = [run(engine, text, new=1).num_cached_tokens for text in reversed(texts)]
    assert found[:2] == [12, 12]
    assert found[-1] == 0
    assert engine.scheduler.cache.memory().tables > 0


def test_salts_do_not_share_and_do_not_tell(engine: Engine) -> None:
    run(engine, TEXT, salt="a")
    other = run(engine, TEXT, salt="b")
    assert (other.num_cached_tokens, other.cache_miss) == (0, Miss("cold"))
    assert run(engine, TEXT, salt="a").num_cached_tokens == 28


def test_reset_forgets_and_running_requests_go_on(engine: Engine) -> None:
    run(engine, TEXT)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    name = engine.add_request([*TEXT, 3], sampling)
    engine.step()
    assert engine.reset_prefix_cache()
    engine.scheduler.cache.check()
    kept = drain(engine)[name].outputs[0].token_ids
    engine.reset_prefix_cache()
    assert run(engine, [*TEXT, 3], new=6).outputs[0].token_ids == kept
    assert run(engine, [*TEXT, 3], new=6).cache_miss is None


def test_requests_that_share_a_prefix_fit_where_they_would_not_alone(engine: Engine) -> None:
    """40 pages, prompts of 30: with 28 tokens in common, eight run at once instead of four."""
    new = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    for keeps, most in ((False, 4), (True, 8)):
        engine = make_engine(ToyModel(toy_spec()), num_pages=40, keeps=keeps)
        engine.add_request(TEXT, new)
        drain(engine)
        names = [engine.add_request([*TEXT[:-1], 50 + i], new) for i in range(8)]
        seen, found = 0, {}
        while engine.has_work:
            for output in engine.step():
                found[output.request_id] = output
            seen = max(seen, len(engine.scheduler.running))
            engine.scheduler.cache.check()
        assert seen == most
        assert all(len(found[name].outputs[0].token_ids) == 10 for name in names)
        assert engine.scheduler.num_preemptions == 0


def test_nothing_is_kept_of_a_request_that_failed(monkeypatch) -> None:
    """Its rows may hold anything: what began with the same page is forgotten, too."""
    model = ToyModel(toy_spec())
    engine = make_engine(model, num_pages=40, keeps=True)
    run(engine, TEXT)
    name = engine.add_request([*TEXT, 3], SamplingParams(max_tokens=4))
    sample = engine.runner.sampler.collect

    def bad(*args):
        return [type(s)(error="not a number") for s in sample(*args)]

    monkeypatch.setattr(engine.runner.sampler, "collect", bad)
    assert drain(engine)[name].outputs[0].finish_reason == "error"
    monkeypatch.undo()
    assert run(engine, TEXT).cache_miss == Miss("cold")


def test_a_kept_row_outlives_its_request_and_is_given_out_cut_back() -> None:
    mirror = Mirror(Ragged.HEAD, 60)
    mirror.step({mirror.admit(): 2 * PAGE + 2})
    cache, tokens = mirror.cache, list(range(2 * PAGE + 2))
    cache.keep(1, tokens)
    cache.release(1)
    cache.check()
    assert cache.free_pages() == cache.total_pages(), "kept pages can be had"
    other = request(9)
    other.tokens = [*tokens[: PAGE + 1], 99, 98]
    hit = cache.match(other, 2 * PAGE)
    assert (hit.tokens, hit.miss) == (PAGE, Miss("diverged", PAGE + 1))
    cache.admit(other, hit)
    assert cache.lens(9, 1) == (PAGE, PAGE)
    cache.forget_kept()
    cache.check()
    assert cache.total_pages() - cache.free_pages() == cache.usage(9).pages
    assert cache.match(other, 2 * PAGE) == PrefixHit(miss=Miss("cold"))
    assert cache.match(other, 0) == PrefixHit()


# ── through the API ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with open_llm(tiny_folder) as made:
        yield made


def open_llm(folder: Path, **options) -> LLM:
    return LLM(
        str(folder), quiet=True, max_model_len=256, kv_cache_memory_bytes="8MiB",
        enable_methods="full,snapkv,h2o", **options,
    )  # fmt: skip


ONE = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def generate(llm: LLM, prompt, sparse: SparseParams | None = None):
    return llm.generate(prompt, ONE, sparse, use_tqdm=False)[0]


def test_it_is_on_and_a_method_takes_dense_rows(llm: LLM) -> None:
    ids = [3 + i % 50 for i in range(100)]
    cold = generate(llm, ids, SparseParams("snapkv", budget=60))
    assert (cold.num_cached_tokens, cold.cache_miss.reason) == (0, "cold")
    again = generate(llm, [*ids, 5], SparseParams("snapkv", budget=60, record=True))
    assert again.num_cached_tokens == 64  # 101 tokens without the window of 32, in pages of 16
    record = again.outputs[0].sparse
    assert record.retained[0].computed == 101
    assert {len(h) for rows in record.retained[0].positions.values() for h in rows} == {60}
    assert generate(llm, ids, SparseParams("h2o", budget=60)).cache_miss == Miss(
        "fingerprint", detail="method"
    )
    llm.reset_prefix_cache()
    fresh = generate(llm, [*ids, 5], SparseParams("snapkv", budget=60, record=True))
    assert fresh.outputs[0].sparse.retained == record.retained
    assert fresh.outputs[0].token_ids == again.outputs[0].token_ids


def test_prompts_may_carry_a_salt(llm: LLM) -> None:
    ids = [60 + i % 30 for i in range(40)]
    generate(llm, {"prompt_token_ids": ids, "cache_salt": "a"})
    assert generate(llm, {"prompt_token_ids": ids, "cache_salt": "b"}).num_cached_tokens == 0
    assert generate(llm, {"prompt_token_ids": ids, "cache_salt": "a"}).num_cached_tokens == 32
    with pytest.raises(RequestError, match="cache_salt=5"):
        generate(llm, {"prompt_token_ids": ids, "cache_salt": 5})


def test_it_can_be_switched_off(tiny_folder: Path) -> None:
    with open_llm(tiny_folder, enable_prefix_caching=False) as llm:
        for _ in range(2):
            found = generate(llm, list(range(3, 60)))
            assert (found.num_cached_tokens, found.cache_miss) == (0, None)
        assert llm.get_metrics()["prefix_cache_queries"] == 0


def test_sparse_prefill_neither_takes_nor_leaves_rows(llm: LLM) -> None:
    ids = [3 + i % 31 for i in range(64)]
    sparse = SparseParams("full", prefill="a_shape", prefill_config={"min_tokens": 16})
    for _ in range(2):
        assert generate(llm, ids, sparse).cache_miss == Miss("fingerprint", detail="prefill")
    assert generate(llm, ids).cache_miss.reason in ("cold", "below_page", "diverged")
