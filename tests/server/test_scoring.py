"""Log-probabilities of prompts as evaluation harnesses read them; special tokens on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import BOS
from fixtures.servers import Served, save_chat_checkpoint, serving
from sparseengine.core.params import SamplingParams
from sparseengine.llm import LLM

COMPLETIONS = "/v1/completions"
TEXTS = ["the quick brown fox", "own fox 안녕", "stop! ..."]


def score(served: Served, prompt: Any, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0, **options}
    found = served.post(COMPLETIONS, body)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.fixture(scope="module")
def offline(checkpoint: Path) -> dict[str, Any]:
    with LLM(str(checkpoint), attention_backend="reference", quiet=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
        outputs = llm.generate(TEXTS, params, use_tqdm=False)
    return dict(zip(TEXTS, outputs, strict=True))


@pytest.mark.parametrize("text", TEXTS)
def test_scores_equal_the_offline_ones(served: Served, offline: dict[str, Any], text: str) -> None:
    """Cases 11 and 12: with max_tokens 0 the prompt alone, with 1 one entry more."""
    wanted = offline[text]
    ids = wanted.prompt_token_ids
    own = [row[t].logprob for t, row in zip(ids[1:], wanted.prompt_logprobs[1:], strict=True)]
    alone = score(served, text, max_tokens=0)
    logprobs = alone["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(own, abs=1e-5)
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["text"] == text or alone["choices"][0]["text"].endswith(text)
    more = score(served, text, max_tokens=1)["choices"][0]["logprobs"]
    assert len(more["tokens"]) == len(ids) + 1
    assert more["token_logprobs"][1 : len(ids)] == logprobs["token_logprobs"][1:]
    for column in ("token_logprobs", "top_logprobs", "text_offset"):
        assert len(more[column]) == len(ids) + 1


def test_a_harness_finds_greedy_tokens(served: Served, offline: dict[str, Any]) -> None:
    """lm-eval's rule: a token is greedy when its log-probability is the largest shown."""
    ids = offline[TEXTS[0]].prompt_token_ids
    greedy = served.post(
        COMPLETIONS,
        {
            "prompt": ids,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    ).json()["choices"][0]["token_ids"]
    logprobs = score(served, ids + greedy, max_tokens=1)["choices"][0]["logprobs"]
    span = slice(len(ids), -1)
    own, top = logprobs["token_logprobs"][span], logprobs["top_logprobs"][span]
    assert len(own) == len(greedy)
    assert all(o == max(t.values()) for o, t in zip(own, top, strict=True))


def test_the_requests_of_lm_eval(served: Served, offline: dict[str, Any]) -> None:
    """What lm-eval 0.4.13 sends when it finds a tokenizer here, in its order.

    scripts/lm_eval_server.py runs lm-eval itself; this keeps what it relies on.
    """
    info = served.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert "{% for m in messages %}" in info["chat_template"]
    encoded = [
        served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        for text in ("test", "</s>", "", TEXTS[0], "the quick")
    ]
    assert encoded[1] == [1]
    assert encoded[2] == []
    whole, context = encoded[3], len(encoded[4])
    assert served.post("/detokenize", {"tokens": whole}).json()["prompt"] == TEXTS[0]
    body = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    header = {"Authorization": "Bearer none"}
    found = served.post(
        COMPLETIONS, {**body, "prompt": [[0, *whole]], "echo": True}, headers=header
    ).json()["choices"]
    wanted = offline[TEXTS[0]]
    assert wanted.prompt_token_ids == [0, *whole]
    own = [row[t] for t, row in zip(whole, wanted.prompt_logprobs[1:], strict=True)][context:]
    span = slice(1 + context, -1)
    logprobs = found[0]["logprobs"]
    assert sum(logprobs["token_logprobs"][span]) == pytest.approx(
        sum(p.logprob for p in own), abs=1e-5
    )
    pairs = zip(logprobs["token_logprobs"][span], logprobs["top_logprobs"][span], strict=True)
    assert [a == max(top.values()) for a, top in pairs] == [p.rank == 1 for p in own]
    ask = {"model": "tiny", "max_tokens": 5, "temperature": 0, "seed": 1234}
    texts = {**ask, "prompt": [whole, encoded[0]], "stop": ["\n\n"]}
    choices = served.post(COMPLETIONS, texts, headers=header).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1]
    talk = {"role": "user", "content": "fox"}
    chat = {**ask, "messages": [talk], "stop": ["\n\n", "</s>"]}
    answer = served.post("/v1/chat/completions", chat, headers=header)
    assert isinstance(answer.json()["choices"][0]["message"]["content"], str)


def test_batches_of_token_prompts_with_choices(served: Served) -> None:
    prompts = [[0, 5, 6, 7], [0, 9], [0, 44, 45]]
    both = score(served, prompts, max_tokens=1, n=2)["choices"]
    assert [c["index"] for c in both] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = score(served, [prompt], max_tokens=1)["choices"][0]["logprobs"]
        for choice in both[2 * i : 2 * i + 2]:
            assert choice["logprobs"]["token_logprobs"][0] is None
            prompt_part = slice(1, len(prompt))
            assert choice["logprobs"]["token_logprobs"][prompt_part] == pytest.approx(
                alone["token_logprobs"][prompt_part], abs=1e-5
            )


def test_prompt_logprobs_field(served: Served) -> None:
    found = served.post(
        COMPLETIONS, {"prompt": [0, 5, 6], "max_tokens": 1, "prompt_logprobs": 2}
    ).json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert [str(t) in row for t, row in zip((5, 6), found[1:], strict=True)] == [True, True]
    assert all(2 <= len(row) <= 3 for row in found[1:])


def test_exactly_one_bos_on_every_path(served: Served) -> None:
    """Case 33: the template writes one and the tokenizer adds one."""
    talk = [{"role": "user", "content": "fox"}]
    chat = served.post("/tokenize", {"messages": talk}).json()["tokens"]
    plain = served.post("/tokenize", {"prompt": "fox"}).json()["tokens"]
    again = served.post("/tokenize", {"prompt": "<s>fox"}).json()["tokens"]
    assert [x.count(BOS) for x in (chat, plain, again)] == [1, 1, 1]
    completion = score(served, "fox", max_tokens=1)["usage"]["prompt_tokens"]
    assert completion == len(plain)
    answered = served.post(
        "/v1/chat/completions", {"messages": talk, "max_tokens": 1, "return_token_ids": True}
    ).json()
    assert answered["prompt_token_ids"] == chat
    response = served.post("/v1/responses", {"input": "fox", "max_output_tokens": 1}).json()
    message = served.post("/v1/messages", {"messages": talk, "max_tokens": 1}).json()
    assert response["usage"]["input_tokens"] == len(chat)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(chat)


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    """Case 32: chat says which flag helps; completions work."""
    folder = save_chat_checkpoint(tmp_path / "bare", template=None, num_hidden_layers=1)
    talk = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 2}
    with serving(folder) as served:
        for path in ("/v1/chat/completions", "/v1/messages"):
            found = served.post(path, talk)
            assert found.status_code == 400
            assert "--chat-template" in found.text
        assert served.post(COMPLETIONS, {"prompt": "fox", "max_tokens": 2}).status_code == 200
    with serving(
        folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    ) as served:
        assert served.post("/v1/chat/completions", talk).status_code == 200
