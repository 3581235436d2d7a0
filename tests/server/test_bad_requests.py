"""What a client can get wrong gets a 4xx that says so, and the next request works."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fixtures.servers import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "fox"}]


@pytest.fixture(autouse=True)
def works_afterwards(served: Served) -> Iterator[None]:
    yield
    found = served.post(COMPLETIONS, {"prompt": "fox", "max_tokens": 1})
    assert found.status_code == 200, found.text


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer, which must be valid JSON without NaN."""
    assert response.status_code == status, response.text

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} in an error body")

    body = json.loads(response.text, parse_constant=no_constants)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    return body["error"]


def raw(served: Served, path: str, text: str | bytes, **headers: str) -> httpx.Response:
    content = text.encode() if isinstance(text, str) else text
    return httpx.post(
        served.url + path,
        content=content,
        headers={"content-type": "application/json", **headers},
        timeout=60,
    )


# ── case 1: empty prompts ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[5], []], ["fox", ""]])
def test_empty_prompts(served: Served, prompt: Any) -> None:
    error = refused(served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}))
    assert "prompt" in error["message"]


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "cat", "content": "x"}]])
def test_empty_and_strange_messages(served: Served, messages: Any) -> None:
    error = refused(served.post(CHAT, {"messages": messages}))
    assert error["param"] == "messages"


@pytest.mark.parametrize("prompt", [[-1], [300], [2**40], [2**70], [[5], [999]]])
def test_token_ids_outside_the_vocabulary(served: Served, prompt: Any) -> None:
    refused(served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}))


@pytest.mark.parametrize("prompt", [[True], [1.5], ["a", 1], {"a": 1}, None, 5, [None]])
def test_prompts_of_a_wrong_type(served: Served, prompt: Any) -> None:
    refused(served.post(COMPLETIONS, {"prompt": prompt}))


# ── cases 3 to 5: numbers that are none ───────────────────────────────────────────────────────────

NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"nan"', '"0.5"', "1e999"])
def test_numbers_that_are_none(served: Served, field: str, value: str) -> None:
    body = f'{{"prompt": "fox", "max_tokens": 2, "{field}": {value}}}'
    error = refused(raw(served, COMPLETIONS, body))
    assert not any(math.isnan(v) for v in error.values() if isinstance(v, float))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", -1),
        ("n", 10**7),
        ("n", 9),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**12),
        ("max_tokens", 10**30),
        ("min_tokens", 5),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("seed", 2**70),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("allowed_token_ids", []),
        ("logit_bias", {"1": 200}),
        ("logit_bias", {"fox": 1}),
        ("logit_bias", {"99999": 1}),
        ("best_of", 3),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("stream", "yes"),
        ("echo", 1),
    ],
)
def test_values_out_of_range_name_their_field(served: Served, field: str, value: Any) -> None:
    """Cases 4 and 9, by field."""
    body = {"prompt": "fox", "max_tokens": 2, field: value}
    error = refused(served.post(COMPLETIONS, body))
    assert error["param"] in (field, "max_tokens")


def test_unknown_fields_name_the_nearest(served: Served) -> None:
    error = refused(served.post(COMPLETIONS, {"prompt": "fox", "max_token": 2}))
    assert "max_tokens" in error["message"]
    assert error["param"] == "max_token"
    fine = served.post(COMPLETIONS, {"prompt": "fox", "max_tokens": 1, "audio": None})
    assert fine.status_code == 200


def test_an_unknown_model(served: Served) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "fox"}), (CHAT, {"messages": TALK})):
        error = refused(served.post(path, {**body, "model": "gpt-4"}), 404)
        assert error["code"] == "model_not_found"
        assert "tiny" in error["message"]


# ── case 28, 29: grammars ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "given",
    [
        {"json_object": False},
        {"json": ""},
        {"json": {"type": "no-such-type"}},
        {"regex": "("},
        {"choice": []},
        {"grammar": "("},
        {},
        {"no_such": 1},
        {"regex": "a", "choice": ["a"]},
    ],
)
def test_bad_grammars(served: Served, given: dict[str, Any]) -> None:
    body = {"prompt": "fox", "max_tokens": 4, "structured_outputs": given}
    for stream in (False, True):
        refused(served.post(COMPLETIONS, {**body, "stream": stream}))
    good = {**body, "structured_outputs": {"choice": ["fox"]}, "max_tokens": 8}
    assert served.post(COMPLETIONS, good).json()["choices"][0]["text"] == "fox"


def test_a_regex_of_nothing_or_anything_behind_a_good_grammar(served: Served) -> None:
    body = {"prompt": "fox", "max_tokens": 8}
    good = {**body, "structured_outputs": {"choice": ["fox"]}}
    odd = {**body, "structured_outputs": {"regex": "^(|.*)$"}}
    for _ in range(2):
        assert served.post(COMPLETIONS, good).json()["choices"][0]["text"] == "fox"
        assert served.post(COMPLETIONS, odd).status_code in (200, 400)


@pytest.mark.parametrize(
    "given",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 5}},
        {},
    ],
)
def test_bad_response_formats(served: Served, given: dict[str, Any]) -> None:
    error = refused(served.post(CHAT, {"messages": TALK, "response_format": given}))
    assert error["param"] == "response_format"


# ── case 34: lengths ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "works"),
    [
        (257, None, False),
        (256, None, False),
        (256, 1, False),
        (255, 1, True),
        (200, 57, False),
        (200, 56, True),
    ],
)
def test_prompts_at_the_limit(
    served: Served, prompt: int, max_tokens: int | None, works: bool
) -> None:
    body = {"prompt": [5] * prompt, "max_tokens": max_tokens}
    found = served.post(COMPLETIONS, body)
    if works:
        assert found.status_code == 200
        return
    error = refused(found)
    assert error["code"] == "context_length_exceeded"
    assert str(prompt) in error["message"]
    assert "256" in error["message"]


def test_a_text_far_too_long_is_refused_without_encoding(served: Served) -> None:
    found = served.post(COMPLETIONS, {"prompt": "fox " * 2_000_000, "max_tokens": 1})
    assert refused(found)["code"] == "context_length_exceeded"
    talk = [{"role": "user", "content": "fox " * 1000}]
    assert refused(served.post(CHAT, {"messages": talk}))["code"] == "context_length_exceeded"


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"prompt": "fo',
        b"null",
        b"[]",
        b'"fox"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ["\\udfff"]}',
        b'{"prompt": "a", "\\ud800": 1}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} trailing',
    ],
)
def test_bodies_that_are_not_requests(served: Served, text: bytes) -> None:
    refused(raw(served, COMPLETIONS, text))


def test_wrong_content_types(served: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        body = raw(served, COMPLETIONS, '{"prompt": "fox"}', **{"content-type": kind})
        refused(body, 415)
    named = raw(
        served,
        COMPLETIONS,
        '{"prompt": "fox", "max_tokens": 1}',
        **{"content-type": "application/json; charset=utf-8"},
    )
    assert named.status_code == 200


def test_bodies_that_are_too_large(served: Served) -> None:
    limit = served.server.settings.max_body_bytes

    def chunks() -> Iterator[bytes]:
        for _ in range(limit // (1 << 20) + 2):
            yield b" " * (1 << 20)

    try:
        found = httpx.post(served.url + COMPLETIONS, content=chunks(), timeout=60)
    except httpx.TransportError:
        return  # the server closed the connection before all was sent
    refused(found, 413)


def test_wrong_routes_and_verbs(served: Served) -> None:
    refused(served.get("/v1/nothing"), 404)
    refused(served.get(COMPLETIONS), 405)
    refused(served.post("/health", {}), 405)


def test_pictures_are_refused(served: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}
    error = refused(served.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}))
    assert "image_url" in error["message"]


@pytest.mark.parametrize("kwargs", [{"tokenize": True}, {"messages": []}, {"chat_template": "x"}])
def test_template_arguments_cannot_replace_ours(served: Served, kwargs: Any) -> None:
    refused(served.post(CHAT, {"messages": TALK, "chat_template_kwargs": kwargs}))


@pytest.mark.parametrize(
    "body",
    [
        {"input": "fox", "store": True},
        {"input": "fox", "previous_response_id": "resp_1"},
        {"input": "fox", "background": True},
        {"input": []},
        {"input": [{"type": "input_image"}]},
        {"input": "fox", "tools": [{"type": "web_search"}]},
        {"input": "fox", "max_output_tokens": 0},
        {"input": "fox", "max_output_tokens": -5},
    ],
)
def test_responses_refuses_what_it_cannot_do(served: Served, body: Any) -> None:
    refused(served.post("/v1/responses", body))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": TALK},
        {"messages": [], "max_tokens": 4},
        {"messages": TALK, "max_tokens": 0},
        {"messages": [{"role": "system", "content": "x"}], "max_tokens": 4},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 4},
        {"messages": TALK, "max_tokens": 4, "temperature": -1},
    ],
)
def test_messages_answers_in_its_own_format(served: Served, body: Any) -> None:
    found = served.post("/v1/messages", body)
    assert found.status_code == 400
    assert found.json()["type"] == "error"
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_tokens_and_back(served: Served) -> None:
    ids = served.post("/tokenize", {"prompt": "the quick 안녕"}).json()
    assert ids["count"] == len(ids["tokens"])
    text = served.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"]
    assert text == "<s>the quick 안녕"
    chat = served.post("/tokenize", {"messages": TALK, "return_token_strs": True}).json()
    assert chat["tokens"].count(0) == 1  # one BOS
    assert len(chat["token_strs"]) == chat["count"]
    refused(served.post("/tokenize", {}))
    refused(served.post("/tokenize", {"prompt": "a", "messages": TALK}))
    refused(served.post("/detokenize", {"tokens": [999]}))
    refused(served.post("/detokenize", {"tokens": ["a"]}))
