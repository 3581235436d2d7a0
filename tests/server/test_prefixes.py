"""Prompts that begin alike, over HTTP: usage, reasons, salts, keys, counters, the access line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fixtures.servers import Served, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the quick brown fox jumps over the lazy dog and runs into the wood, " * 2
ROUTES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
}


def cached(body: dict[str, Any]) -> int:
    usage = body["usage"]
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if details in usage:
            return int(usage[details]["cached_tokens"])
    return int(usage["cache_read_input_tokens"])


def ask(served: Served, path: str, **extra: Any) -> dict[str, Any]:
    answer = served.post(path, {**ROUTES[path], **extra})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_says_how_much_was_found_and_keeps_salts_apart(
    served: Served, path: str
) -> None:
    first, again = (cached(ask(served, path, cache_salt=f"a{path}")) for _ in range(2))
    assert first == 0
    assert again >= 32
    assert again % 16 == 0
    assert cached(ask(served, path, cache_salt=f"b{path}")) == 0
    assert served.post("/reset_prefix_cache", {}).json() == {"reset": True}
    assert cached(ask(served, path, cache_salt=f"a{path}")) == 0
    refused = served.post(path, {**ROUTES[path], "cache_salt": 5})
    assert refused.status_code == 400


def test_where_a_text_leaves_what_is_stored(served: Served) -> None:
    served.post("/reset_prefix_cache", {})
    told = ask(served, COMPLETIONS)["usage"]["prompt_tokens_details"]
    assert told["cache_miss"] == {"reason": "cold", "at": None, "detail": ""}
    assert "cache_miss" not in ask(served, COMPLETIONS)["usage"]["prompt_tokens_details"]
    other = PROMPT[:60] + "SITS DOWN" + PROMPT[60:]
    told = ask(served, COMPLETIONS, prompt=other)["usage"]["prompt_tokens_details"]
    assert told["cache_miss"]["reason"] == "diverged"
    assert 16 < told["cache_miss"]["at"] < 62
    assert "SITS" in told["cache_miss"]["detail"]


def test_a_compressed_prompt_is_begun_with_on_request(served: Served) -> None:
    served.post("/reset_prefix_cache", {})
    tokens = served.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    body = {"prompt": tokens, "max_tokens": 3, "ignore_eos": True}
    sparse = {"method": "snapkv", "budget": 48, "save_prefix": True}
    served.post(COMPLETIONS, {**body, "sparse": sparse})
    longer = {**body, "prompt": [*tokens, 9, 8]}
    assert cached(served.post(COMPLETIONS, {**longer, "sparse": sparse}).json()) == len(tokens)
    plain = {**sparse, "save_prefix": False}
    assert cached(served.post(COMPLETIONS, {**longer, "sparse": plain}).json()) < len(tokens)
    refused = served.post(COMPLETIONS, {**body, "sparse": {**sparse, "method": "streaming_llm"}})
    assert refused.status_code == 400
    assert "save_prefix" in refused.json()["error"]["message"]
    wrong = served.post(COMPLETIONS, {**body, "sparse": {**sparse, "save_prefix": "yes please"}})
    assert wrong.status_code == 400


def test_a_stream_s_usage_has_it(served: Served) -> None:
    body = {**ROUTES[CHAT], "stream": True, "stream_options": {"include_usage": True}}
    for _ in range(2):
        lines = served.post(CHAT, body).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_keys_do_not_share_counters_count_and_lines_tell(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparseengine.access")
    with serving(checkpoint, api_keys=("one", "two"), access_log=True) as served:
        for key, found in (("one", 0), ("two", 0), ("one", 128), ("two", 128)):
            head = {"Authorization": f"Bearer {key}"}
            body = served.post(COMPLETIONS, ROUTES[COMPLETIONS], headers=head).json()
            assert (cached(body) > 0) == (found > 0)
        served.wait_idle()
        text = served.get("/metrics").text

    def value(start: str, within: str = "") -> float:
        (line,) = [x for x in text.splitlines() if x.startswith(start) and within in x]
        return float(line.split()[-1])

    total = body["usage"]["prompt_tokens"]
    assert value("sparseengine:prefix_cache_queries_total") == 4 * total
    assert value("sparseengine:prefix_cache_hits_total") == 2 * cached(body)
    assert value("sparseengine:prefix_miss_total", 'reason="cold"') == 2
    assert value("sparseengine:prefix_miss_total", 'reason="diverged"') == 0
    lines = [json.loads(r.message) for r in caplog.records if r.name == "sparseengine.access"]
    lines = [line for line in lines if line["path"] == COMPLETIONS]
    assert [line["cache_miss"] for line in lines] == ["cold", "cold", None, None]
    assert [line["cached_tokens"] for line in lines][2:] == [cached(body)] * 2
