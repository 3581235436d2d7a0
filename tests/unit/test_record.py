"""Records as they grow: what is new since the last look, and where they end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fixtures.engines import save_checkpoint
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.engine.record import Read, RecordReader, Retained, SparseOutput
from sparseengine.llm import LLM

STEPS = 8


def record(retained: list[Retained], reads: list[Read]) -> SparseOutput:
    return SparseOutput("m", None, 4, 0, retained=retained, reads=reads)


def kept(event: str, computed: int) -> Retained:
    return Retained(event, computed, {0: [[0, computed - 1]]}, 8)


def test_news_adds_up_also_when_a_record_begins_anew() -> None:
    growing = record([kept("prefill", 4)], [])
    reader = RecordReader()
    whole = reader.news(growing).added_to(None)
    growing.reads.append(Read(4, {}, 3))
    whole = reader.news(growing).added_to(whole)
    growing.retained.append(kept("evict", 6))
    growing.reads.append(Read(5, {}, 4))
    news = reader.news(growing)
    assert (len(news.retained), len(news.reads)) == (1, 1)
    whole = news.added_to(whole)
    assert whole == growing
    nothing = reader.news(replace(growing, resident_bytes=9))
    assert (nothing.retained, nothing.reads, nothing.resident_bytes) == ([], [], 9)
    resumed = record([kept("prefill", 6), kept("evict", 7)], [Read(6, {}, 5)])
    assert reader.news(resumed).added_to(whole) == resumed


def test_a_replaced_prompt_entry_is_news() -> None:
    """Methods that replay the prompt keep once more after the first token is out."""
    growing = record([kept("prefill", 4)], [])
    reader = RecordReader()
    whole = reader.news(growing).added_to(None)
    growing.retained[0] = kept("prefill", 3)
    assert reader.news(growing).added_to(whole).retained == growing.retained


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_checkpoint(tmp_path_factory.mktemp("record"), num_hidden_layers=2)
    engine = {"num_gpu_blocks_override": 400, "attention_backend": "reference"}
    return LLM(
        str(folder), max_model_len=64, quiet=True, enable_methods=["streaming_llm"], **engine
    )


def recorded(llm: LLM) -> SparseOutput:
    sampling = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True)
    sparse = SparseParams("streaming_llm", budget=8, record=True)
    ids = {"prompt_token_ids": list(range(4, 24))}
    found = llm.generate(ids, sampling, sparse, use_tqdm=False)[0].outputs[0].sparse
    assert found is not None
    return found


def test_a_record_ends_at_the_limit_and_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded(llm)
    assert not whole.truncated
    assert (len(whole.retained), len(whole.reads)) == (STEPS + 1, STEPS)
    entry = sum(len(h) for heads in whole.retained[0].positions.values() for h in heads)
    recorder = llm.engine.controller.recorder
    monkeypatch.setattr(recorder, "max_positions", 3 * entry)
    cut = recorded(llm)
    assert cut.truncated
    assert cut.retained == whole.retained[:3]
    assert cut.reads == whole.reads[: len(cut.reads)]
    assert len(cut.reads) < STEPS
    for name in ("resident_bytes", "dense_bytes"):
        assert getattr(cut, name) == getattr(whole, name) > 0
    monkeypatch.setattr(recorder, "max_positions", 0)
    empty = recorded(llm)
    assert (empty.truncated, empty.retained) == (True, [])


def test_dense_bytes_are_those_of_a_dense_cache(llm: LLM) -> None:
    whole = recorded(llm)
    spec = llm.engine.controller.model
    per_token = sum(s.kv_heads * sum(s.stored_dims) for s in spec.layers) * spec.dtype.itemsize
    assert whole.dense_bytes == (20 + STEPS) * per_token
    plain = json.loads(json.dumps(whole.to_dict()))
    assert plain["dense_bytes"] == whole.dense_bytes
    assert plain["retained"][0]["positions"]["0"] == whole.retained[0].positions[0]
    assert plain["reads"][-1]["bytes_read"] == whole.reads[-1].bytes_read
