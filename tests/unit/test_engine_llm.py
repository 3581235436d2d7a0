"""The offline API around the engine: prompts, chat, streaming, life cycle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from fixtures.engines import BOS, make_tokenizer, save_checkpoint
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError, RequestError, SparseEngineError
from sparseengine.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "the quick brown fox"}]
OPTIONS: dict[str, Any] = {
    "attention_backend": "reference",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "quiet": True,
}


def adds_bos(folder: Path, template: str | None) -> Path:
    """A checkpoint whose tokenizer puts <s> in front of every text."""
    save_checkpoint(folder)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(adds_bos(tmp_path_factory.mktemp("bos"), TEMPLATE)), **OPTIONS) as opened:
        yield opened


def test_every_kind_of_prompt_gives_the_same_answer(llm: LLM) -> None:
    text = "the lazy dog"
    ids = llm.tokenizer.encode(text)
    kinds: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(kinds, GREEDY, use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == [text, None, text, None]
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    for single in kinds:
        assert len(llm.generate(single, GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_outputs_keep_the_order_of_the_prompts_and_their_own_parameters(llm: LLM) -> None:
    lengths = [9, 1, 5, 3, 7, 2]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["fox"] * 6, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    for wrong in (params[:2], [GREEDY] * 7):
        with pytest.raises(RequestError, match="for 6 prompts"):
            llm.generate(["fox"] * 6, wrong, use_tqdm=False)


def test_text_is_the_decode_of_the_token_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=4, ignore_eos=True)
    completion = llm.generate("안녕", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert len(completion.token_ids) == 60
    without = SamplingParams(max_tokens=60, seed=4, ignore_eos=True, detokenize=False)
    bare = llm.generate("안녕", without, use_tqdm=False)[0].outputs[0]
    assert (bare.text, bare.token_ids) == ("", completion.token_ids)


def test_streaming_adds_up_to_the_batch_result(llm: LLM) -> None:
    whole = llm.generate("the quick", GREEDY, use_tqdm=False)[0].outputs[0]
    shown, texts = "", []
    for output in llm.stream("the quick", GREEDY):
        completion = output.outputs[0]
        assert completion.text.startswith(shown)
        texts.append(completion.text[len(shown) :])
        shown = completion.text
    assert "".join(texts) == whole.text
    assert len(texts) == 12
    assert output.finished


def test_leaving_a_stream_early_aborts_the_request(llm: LLM) -> None:
    stream = llm.stream("the quick", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    cache = llm.engine.scheduler.cache
    assert cache.free_pages() == cache.total_pages()


# ── chat ──────────────────────────────────────────────────────────────────────────────────────────


def test_exactly_one_bos_on_every_path(llm: LLM) -> None:
    """Case 33: the template writes a BOS and the tokenizer would add one."""
    rendered = llm.render_chat(CHAT)
    assert rendered.startswith("<s>")
    by_chat = llm.chat(CHAT, GREEDY, use_tqdm=False)[0]
    by_text = llm.generate(rendered, GREEDY, use_tqdm=False)[0]
    *_, by_stream = llm.stream_chat(CHAT, GREEDY)
    plain = llm.generate("fox", GREEDY, use_tqdm=False)[0]
    for output in (by_chat, by_text, by_stream, plain):
        assert output.prompt_token_ids.count(BOS) == 1
        assert output.prompt_token_ids[0] == BOS
    assert by_chat.prompt_token_ids == by_text.prompt_token_ids == by_stream.prompt_token_ids
    assert by_chat.outputs[0].token_ids == by_text.outputs[0].token_ids


def test_a_template_without_bos_gets_the_tokenizers(llm: LLM) -> None:
    template = TEMPLATE.replace("{{ bos_token }}", "")
    output = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=template)[0]
    assert output.prompt_token_ids[0] == BOS
    assert output.prompt_token_ids.count(BOS) == 1


def test_several_conversations_at_once(llm: LLM) -> None:
    other = [*CHAT, {"role": "assistant", "content": "jumps"}, {"role": "user", "content": "over"}]
    both = llm.chat([CHAT, other], GREEDY, use_tqdm=False)
    assert [o.prompt for o in both] == [llm.render_chat(CHAT), llm.render_chat(other)]


def test_chat_without_a_template_says_so(tmp_path: Path) -> None:
    with LLM(str(adds_bos(tmp_path, None)), **OPTIONS) as plain:
        with pytest.raises(RequestError, match="chat template"):
            plain.chat(CHAT, GREEDY, use_tqdm=False)
        assert plain.generate("fox", GREEDY, use_tqdm=False)[0].finished


def test_messages_that_the_template_refuses(llm: LLM) -> None:
    with pytest.raises(RequestError, match="at least one message"):
        llm.chat([], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="refuses these messages: no"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template="{{ raise_exception('no') }}")


# ── life cycle, facts ─────────────────────────────────────────────────────────────────────────────


def test_close_is_idempotent_and_final(tmp_path: Path) -> None:
    llm = LLM(str(save_checkpoint(tmp_path)), **OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(SparseEngineError, match="closed"):
        llm.generate("fox", GREEDY)


def test_the_default_method_and_budget_apply(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    options = {**OPTIONS, "sparse_method": "snapkv", "kv_budget": 20}
    with LLM(str(folder), **options) as sparse, LLM(str(folder), **OPTIONS) as dense:
        prompt = [*range(3, 100)]
        record = SparseParams("snapkv", budget=20, record=True)
        by_default = sparse.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
        named = sparse.generate(prompt, GREEDY, record, use_tqdm=False)[0].outputs[0]
        full = dense.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    assert by_default.token_ids == named.token_ids
    assert by_default.token_ids != full.token_ids
    assert named.sparse is not None
    assert {len(r) for rows in named.sparse.retained[0].positions.values() for r in rows} == {20}


def test_the_memory_table_tells_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**OPTIONS, "sparse_method": "snapkv", "kv_budget": 16, "quiet": False}
    with LLM(str(save_checkpoint(tmp_path)), **options) as llm:
        table = capsys.readouterr().err
        assert llm.explain()["memory"]["total"] == llm.memory.total
        cache = llm.engine.scheduler.cache
        fits = {fit.method: fit.requests for fit in llm.memory.fits}
        assert fits["full"] == cache.total_pages() // cache.pages_for(256)
    for word in ("weights", "activations", "KV pages", "side tensors", "tables", "snapkv", "full"):
        assert word in table
    assert fits["snapkv"] > fits["full"] > 0


def test_unknown_engine_arguments_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(tmp_path), max_modell_len=3)


def test_a_failing_forward_raises_and_the_engine_serves_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("broken backend")

    want = llm.generate("the quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", broken)
        with pytest.raises(ArithmeticError):
            llm.generate(["fox", "dog"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    assert llm.generate("the quick", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want
    cache = llm.engine.scheduler.cache
    cache.check()
    assert cache.free_pages() == cache.total_pages()


def test_metrics_add_up(llm: LLM) -> None:
    before = llm.get_metrics()
    llm.generate([[5] * 7, [6] * 9], GREEDY, use_tqdm=False)
    after = llm.get_metrics()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 16
    assert after["generation_tokens"] - before["generation_tokens"] == 24
    assert after["request_success_length"] - before["request_success_length"] == 2
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
