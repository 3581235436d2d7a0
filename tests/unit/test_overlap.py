"""The overlapped loop gives the tokens of the plain one, whatever happens between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fixtures.engines import VOCAB, drain, save_checkpoint
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import UNKNOWN
from sparseengine.engine.outputs import RequestOutput
from sparseengine.llm import LLM
from sparseengine.methods import METHODS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


def open_llm(folder: Path, overlap: bool, **options: object) -> LLM:
    defaults = {
        "kv_cache_memory_bytes": 8 << 20,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "attention_backend": "reference",
    }
    llm = LLM(str(folder), quiet=True, **{**defaults, **options})
    llm.engine.overlap = overlap
    return llm


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (150, 33, 90, 120, 61)
    ]


def facts(outputs: Sequence[RequestOutput]) -> list:
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in o.outputs]
        for o in outputs
    ]


def both(
    folder: Path,
    sampling: SamplingParams | list[SamplingParams],
    sparse: SparseParams | list[SparseParams] | None = None,
    **options: object,
) -> tuple[list, list]:
    """What the plain loop and the overlapped one return, and that nothing is left over."""
    found = []
    for overlap in (False, True):
        with open_llm(folder, overlap, **options) as llm:
            found.append(facts(llm.generate(prompts(), sampling, sparse, use_tqdm=False)))
            cache = llm.engine.scheduler.cache
            cache.check()
            assert not llm.engine.has_work
            assert cache.free_pages() == cache.total_pages()
    return found[0], found[1]


@pytest.mark.parametrize("method", METHODS)
def test_every_method(folder: Path, method: str) -> None:
    takes = METHODS.get(method).traits.takes
    sparse = SparseParams(method) if takes == "none" else SparseParams(method, budget=64)
    plain, ahead = both(folder, GREEDY, sparse, enable_methods=(method,))
    assert plain == ahead


def test_sampling_of_every_kind_in_one_batch(folder: Path) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=4, top_k=5, top_p=0.9, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=14, min_tokens=9),
        SamplingParams(temperature=1.2, seed=5, min_p=0.1, n=2, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=1),
    ]
    plain, ahead = both(folder, params)
    assert plain == ahead


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=15, ignore_eos=True),
        SamplingParams(temperature=1, seed=1, presence_penalty=1.0, max_tokens=15, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0, bad_words=["a b", "c"], max_tokens=15, ignore_eos=True),
    ],
)
def test_what_needs_the_last_token_on_the_host(folder: Path, params: SamplingParams) -> None:
    mixed = [params, GREEDY, params, GREEDY, GREEDY]
    plain, ahead = both(folder, mixed)
    assert plain == ahead


def test_requests_end_at_stop_tokens_and_strings(folder: Path) -> None:
    with open_llm(folder, overlap=False) as llm:
        free = llm.generate(prompts(), GREEDY, use_tqdm=False)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=12,
            ignore_eos=True,
            stop_token_ids=[o.outputs[0].token_ids[i]],
        )
        for i, o in zip((0, 3, 5, 11, 7), free, strict=True)
    ]
    params[2] = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop=[free[2].outputs[0].text[4:8]]
    )
    plain, ahead = both(folder, params)
    assert plain == ahead
    assert {row[0][2] for row in ahead} == {"stop"}


def test_queueing_and_preemption(folder: Path) -> None:
    for options in (
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 16, "mix": False, "max_decode_stall_steps": 2},
        {"num_gpu_blocks_override": 13, "reserve_output_tokens": 0},
    ):
        plain, ahead = both(folder, GREEDY, **options)
        assert plain == ahead


def test_preemptions_happen_while_running_ahead(folder: Path) -> None:
    batch = [[5 + i] * 45 for i in range(6)]
    sampling = SamplingParams(temperature=1, seed=2, max_tokens=36, ignore_eos=True)
    options = {"reserve_output_tokens": 0, "num_gpu_blocks_override": 9}
    found = []
    for overlap in (False, True):
        with open_llm(folder, overlap, **options) as llm:
            found.append(facts(llm.generate(batch, sampling, use_tqdm=False)))
            assert llm.get_metrics()["num_preemptions"] > 0
    assert found[0] == found[1]


def test_aborts_between_steps(folder: Path) -> None:
    with open_llm(folder, overlap=True) as llm:
        whole = facts(llm.generate(prompts(), GREEDY, use_tqdm=False))
        engine = llm.engine
        names = [engine.add_request(p, GREEDY) for p in prompts()]
        outputs: dict[str, RequestOutput] = {}
        for step in range(8):
            outputs.update((o.request_id, o) for o in engine.step())
            if step in (2, 5, 7):
                engine.abort(names[step // 2])
        outputs.update(drain(engine))
        ended = [outputs[n] for n in names]
        cache = engine.scheduler.cache
        assert cache.free_pages() == cache.total_pages()
        for i, output in enumerate(ended):
            completion = output.outputs[0]
            assert UNKNOWN not in completion.token_ids
            aborted = i in (1, 2, 3)
            assert completion.finish_reason == ("abort" if aborted else "length")
            assert completion.token_ids == whole[i][0][0][: len(completion.token_ids)]


@pytest.mark.parametrize(
    ("sparse", "waits"),
    [
        (SparseParams(), False),
        (SparseParams("skipkv", budget=4000), False),  # cuts nothing, so reads nothing
        (SparseParams("skipkv", budget=40), True),
    ],
    ids=["dense", "whole", "cut"],
)
def test_a_step_is_planned_before_the_last_one_is_booked(
    sparse: SparseParams, waits: bool, folder: Path
) -> None:
    """The order of events: what makes the loop overlap, but for methods that read the text."""
    events: list[str] = []
    with open_llm(folder, overlap=True, enable_methods=("full", "skipkv")) as llm:
        engine = llm.engine
        launch, collect = engine.runner.launch, engine.runner.collect
        engine.runner.launch = lambda *a: (events.append("launch"), launch(*a))[1]  # type: ignore
        engine.runner.collect = lambda *a: (events.append("collect"), collect(*a))[1]  # type: ignore
        llm.generate([prompts()[1]], GREEDY, sparse, use_tqdm=False)
    if waits:
        assert events == ["launch", "collect"] * GREEDY.max_tokens
        return
    assert events[:5] == ["launch", "launch", "collect", "launch", "collect"]
    assert events.count("launch") == events.count("collect") == GREEDY.max_tokens


def test_recorded_requests_are_not_run_ahead(folder: Path) -> None:
    sparse = [SparseParams("snapkv", budget=40, record=True), *[SparseParams("full")] * 4]
    plain, ahead = both(folder, GREEDY, sparse, enable_methods=("snapkv", "full"))
    assert plain == ahead
