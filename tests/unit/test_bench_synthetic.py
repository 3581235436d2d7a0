"""Requests whose history was not computed are like those whose history was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fixtures.engines import save_checkpoint
from sparseengine.bench.batch import make_prompts, run_batch
from sparseengine.bench.synthetic import fill, probe, randomise
from sparseengine.core.params import SamplingParams
from sparseengine.errors import ConfigError
from sparseengine.llm import LLM
from sparseengine.methods import METHODS

LENGTH, BUDGET, OUTPUT = 200, 48, 9


def engine_of(folder: Path, method: str, **extra: object) -> LLM:
    takes = METHODS.get(method).traits.takes
    budget = {} if takes == "none" else {"kv_budget": BUDGET}
    return LLM(
        str(folder),
        quiet=True,
        sparse_method=method,
        max_model_len=256,
        num_gpu_blocks_override=80,
        enable_prefix_caching=False,
        **{**budget, **extra},
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("synthetic")
    return {f: save_checkpoint(root / f, f, tie_word_embeddings=False) for f in ("llama", "gemma3")}


def filled(llm: LLM, batch: int) -> Iterator[int]:
    """Ids of requests that were filled in, before their first decode step."""
    prompt = make_prompts(300, LENGTH, 1, seed=1)[0]
    randomise(llm.engine)
    like = probe(llm, prompt)
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    names = [llm.engine.add_request(prompt, sampling) for _ in range(batch)]
    fill(llm.engine, names, like)
    return map(int, names)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS.get(m).traits.reads_tokens])
def test_rows_and_bytes_are_those_of_computed_requests(
    method, family, folders, monkeypatch
) -> None:
    """Rows that share a budget by scores may differ, and pages with them; their sum may not."""
    monkeypatch.setattr("sparseengine.engine.record.MAX_POSITIONS", 8)  # long rows are probed
    with engine_of(folders[family], method) as llm:
        computed = probe(llm, make_prompts(300, LENGTH, 1, seed=1)[0], compute=True)
        cache, layers = llm.engine.scheduler.cache, llm.resolved.spec.kv_layers
        tokens = sum(map(sum, computed.row_lens.values()))
        rows = sum(map(len, computed.row_lens.values()))
        token = sum(llm.resolved.spec.layers[0].stored_dims) * 4
        for request in filled(llm, 2):
            lens = {la: cache.lens(request, la) for la in layers}
            assert abs(sum(map(sum, lens.values())) - tokens) <= 16 * (method == "kvzip")
            assert cache.usage(request).bytes == pytest.approx(
                computed.resident_bytes, abs=rows * 16 * token
            )
        cache.check()
        while llm.engine.has_work:
            done = llm.engine.step()
        assert {o.outputs[0].finish_reason for o in done} == {"length"}
        assert cache.free_pages() == cache.total_pages()


def test_methods_that_read_the_text_are_refused(folders) -> None:
    name = next(m for m in METHODS if METHODS.get(m).traits.reads_tokens)
    prompt = make_prompts(300, LENGTH, 1, seed=1)[0]
    with (
        engine_of(folders["llama"], name) as llm,
        pytest.raises(ConfigError, match=f"--synthetic-kv is not possible with method '{name}'"),
    ):
        probe(llm, prompt)


def test_summaries_of_made_up_pages_are_those_of_their_keys(folders) -> None:
    with engine_of(folders["llama"], "quest") as llm:
        next(filled(llm, 1))
        (group,) = llm.engine.scheduler.cache.groups
        full = group.rows.tables.arena[group.rows.live_entries([group_slot(llm)])]
        pages = torch.from_numpy(full[: LENGTH // 16]).long()
        keys = group.payload[0][pages]
        assert torch.equal(group.page_aux["kmin"][pages], keys.amin(2))
        assert keys.std() == pytest.approx(1.0, rel=0.05)


def group_slot(llm: LLM) -> int:
    (slot,) = llm.engine.scheduler.cache._slot_of.values()
    return slot


def test_what_does_not_fit_is_said(folders) -> None:
    with (
        engine_of(folders["llama"], "full") as llm,
        pytest.raises(ConfigError, match="5 of 9 requests fit"),
    ):
        list(filled(llm, 9))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_filled_batch_is_timed_without_a_prefill(overlap: bool, folders) -> None:
    with engine_of(folders["llama"], "snapkv") as llm:
        llm.engine.overlap = overlap
        prompts = make_prompts(300, LENGTH, 1, seed=1)
        randomise(llm.engine)
        like = probe(llm, prompts[0])
        timing = run_batch(llm, prompts * 3, OUTPUT, like)
        assert timing.prefill_s is None
        assert len(timing.steps_s) == OUTPUT - 1 - 2
        assert timing.resident_bytes == like.resident_bytes
        assert like.read_bytes == pytest.approx(like.resident_bytes, rel=0.4)
