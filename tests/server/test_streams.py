"""What streams show: all of the text, none of a stop string, no broken characters."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fixtures.engines import make_tokenizer
from fixtures.servers import Served, save_chat_checkpoint, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "the quick"}]


def events(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events, the final [DONE] checked and left out."""
    found = []
    with httpx.stream("POST", served.url + path, json=body, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                assert line.startswith("data: ")
                found.append(line.removeprefix("data: "))
    assert found.pop() == "[DONE]"
    return [json.loads(e) for e in found]


def both(served: Served, path: str, body: dict[str, Any]) -> tuple[str, str, list[str], Any]:
    """(text at once, text streamed, its pieces, finish reason and stop reason)."""
    whole = served.post(path, body).json()["choices"][0]
    pieces: list[str] = []
    last: Any = None
    for event in events(served, path, {**body, "stream": True}):
        choice = event["choices"][0]
        pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        last = choice
    text = whole["text"] if "text" in whole else whole["message"]["content"]
    end = (last["finish_reason"], last["stop_reason"])
    assert end == (whole["finish_reason"], whole["stop_reason"])
    return text, "".join(pieces), pieces, end


def request(path: str, **options: Any) -> dict[str, Any]:
    given = {"prompt": "the quick"} if path == COMPLETIONS else {"messages": TALK}
    return {**given, "max_tokens": 40, "seed": 11, "ignore_eos": True, **options}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pieces_add_up_without_broken_characters(served: Served, path: str, seed: int) -> None:
    """Cases 21, 23: U+FFFD only where the whole text has one, too."""
    text, streamed, _, end = both(served, path, request(path, seed=seed))
    assert streamed == text
    assert end == ("length", None)


def test_hangul_survives(served: Served) -> None:
    """Case 21: every syllable spans several tokens; the model is made to copy them."""
    text = "안녕하세요 세계"
    ids = make_tokenizer().encode(text)
    for i in range(0, len(ids), 3):
        only = {"allowed_token_ids": sorted(set(ids[i : i + 3])), "max_tokens": 30}
        whole, streamed, _, _ = both(served, COMPLETIONS, request(COMPLETIONS, **only))
        assert streamed == whole
    exact = {"structured_outputs": {"choice": [text]}, "max_tokens": 60}
    whole, streamed, pieces, _ = both(
        served, COMPLETIONS, {**request(COMPLETIONS, **exact), "ignore_eos": False}
    )
    assert whole == streamed == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_never_show(served: Served, path: str, include: bool) -> None:
    """Cases 15, 16, 19: at any place in the text, across tokens and within one."""
    text, _, _, _ = both(served, path, request(path))
    tried = 0
    for start in range(3, len(text) - 4, 5):
        stop = text[start : start + 4]
        if "\ufffd" in stop:
            continue
        at = text.find(stop)
        options = {"stop": [stop], "include_stop_str_in_output": include}
        whole, streamed, _, end = both(served, path, request(path, **options))
        assert whole == streamed == text[: at + len(stop) * include]
        assert end == ("stop", stop)
        tried += 1
        if tried == 3:
            return
    assert tried, "no place to stop at"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_start_of_a_stop_string_that_is_none_is_shown(served: Served, path: str) -> None:
    """What was held back comes at the end."""
    text, _, _, _ = both(served, path, request(path))
    never = text[-3:] + "\x00never"
    whole, streamed, _, end = both(served, path, request(path, stop=never))
    assert whole == streamed == text
    assert end == ("length", None)


def test_stop_token_ids_and_every_eos_end_a_text(tmp_path: Any) -> None:
    """Case 37: eos_token_id may be a list."""
    folder = save_chat_checkpoint(tmp_path / "eos", num_hidden_layers=1, eos_token_id=[1, 106, 50])
    with serving(folder) as served:
        for eos in (1, 106, 50):
            body = {"prompt": "fox", "logit_bias": {str(eos): 100}, "temperature": 0}
            found = served.post(COMPLETIONS, body).json()
            assert found["choices"][0]["finish_reason"] == "stop"
            assert found["usage"]["completion_tokens"] == 1
        body = {"prompt": "fox", "logit_bias": {"77": 100}, "stop_token_ids": [77]}
        choice = served.post(COMPLETIONS, body).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 77)


def test_usage_comes_last_and_only_when_asked_for(served: Served) -> None:
    for path in (CHAT, COMPLETIONS):
        body = request(path, max_tokens=4, stream=True)
        plain = events(served, path, body)
        assert not any(e.get("usage") for e in plain)
        asked = events(served, path, {**body, "stream_options": {"include_usage": True}})
        assert asked[-1]["choices"] == []
        assert asked[-1]["usage"]["completion_tokens"] == 4
        assert all(e["usage"] is None for e in asked[:-1])
        every = {"include_usage": True, "continuous_usage_stats": True}
        running = events(served, path, {**body, "stream_options": every})
        counts = [e["usage"]["completion_tokens"] for e in running if e["usage"]]
        assert counts == sorted(counts)
        assert counts[-1] == 4


def test_echo_streams_the_prompt_first(served: Served) -> None:
    for extra in ({}, {"logprobs": 1}):
        body = request(COMPLETIONS, echo=True, max_tokens=4, **extra)
        text, streamed, pieces, _ = both(served, COMPLETIONS, body)
        assert streamed == text
        assert text.startswith("the quick")
        assert pieces[0] == "the quick" if not extra else pieces[0].endswith("the quick")


@pytest.mark.parametrize("method", ["full", "snapkv", "streaming_llm"])
def test_every_byte_passes_the_tool_parser(served: Served, method: str) -> None:
    """Case 18: with stop words, tools and streaming, no mark of a call shows."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    calls = ['<tool_call>\n{"name": "f", "arguments": {"x": "a}b{"}}\n</tool_call>']
    body = {
        "messages": TALK,
        "max_tokens": 150,
        "tools": [tool],
        "structured_outputs": {"choice": calls},
        "stop": ["never seen"],
        "sparse": {"method": method} | ({} if method == "full" else {"budget": 32}),
    }
    choice = served.post(CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": "a}b{"}
    text, arguments = "", ""
    for event in events(served, CHAT, {**body, "stream": True}):
        delta = event["choices"][0]["delta"]
        text += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            arguments += part["function"].get("arguments", "")
    assert text == ""
    assert json.loads(arguments) == {"x": "a}b{"}


def test_reasoning_is_split_from_content(served: Served) -> None:
    text = "<think>\nhm hm\n</think>\n\nfox"
    body = {"messages": TALK, "max_tokens": 60, "structured_outputs": {"choice": [text]}}
    message = served.post(CHAT, body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm hm"
    assert message["content"] == "fox"
    reasoning, content = "", ""
    for event in events(served, CHAT, {**body, "stream": True}):
        delta = event["choices"][0]["delta"]
        reasoning += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
    assert (reasoning, content) == ("hm hm", "fox")
