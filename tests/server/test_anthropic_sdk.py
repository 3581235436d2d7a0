"""The unmodified `anthropic` package against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from fixtures.servers import Served

TALK: list[Any] = [{"role": "user", "content": "the quick"}]
TOOL: Any = {
    "name": "look",
    "description": "looks",
    "input_schema": {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60)


def _input(usage: Any) -> int:
    """All tokens of a prompt: those found stored are counted apart."""
    return usage.input_tokens + usage.cache_read_input_tokens


def test_a_message_streamed_and_whole(client: anthropic.Anthropic) -> None:
    options: Any = {
        "model": "tiny",
        "max_tokens": 8,
        "messages": TALK,
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**options, system="be brief")
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 8
    with client.messages.stream(**options, system=[{"type": "text", "text": "be brief"}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert _input(final.usage) == _input(whole.usage)
    assert final.usage.output_tokens == 8


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    options: Any = {
        "model": "tiny",
        "max_tokens": 30,
        "messages": TALK,
        "extra_body": {"temperature": 0},
    }
    text = client.messages.create(**options).content[0].text
    stop = text[4:7]
    cut = client.messages.create(**options, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.find(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(client: anthropic.Anthropic, stream: bool) -> None:
    options: Any = {
        "model": "tiny",
        "max_tokens": 220,
        "messages": TALK,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look"},
        "extra_body": {"temperature": 0.3},
    }
    if stream:
        with client.messages.stream(**options) as running:
            found = running.get_final_message()
    else:
        found = client.messages.create(**options)
    (block,) = found.content
    assert found.stop_reason == "tool_use"
    assert block.type == "tool_use"
    assert isinstance(block.input["ok"], bool)
    talk = [
        *TALK,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": block.id, "content": "a fox"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    talk[1]["content"][0].pop("caller", None)
    again = client.messages.create(model="tiny", max_tokens=4, messages=talk, tools=[TOOL])
    assert _input(again.usage) > _input(found.usage)


def test_tokens_are_counted_as_they_are_billed(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=TALK, system="be brief")
    sent = client.messages.create(model="tiny", max_tokens=1, messages=TALK, system="be brief")
    assert counted.input_tokens == _input(sent.usage)


def test_errors_are_the_sdks_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=4, messages=TALK)
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(model="tiny", max_tokens=4000, messages=TALK)


def test_the_async_client(served: Served) -> None:
    async def main() -> str:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="x") as client:
            text = ""
            stream = await client.messages.create(
                model="tiny",
                max_tokens=6,
                messages=TALK,
                extra_body={"temperature": 0},
                stream=True,
            )
            async for event in stream:
                if event.type == "content_block_delta":
                    text += event.delta.text
            whole = await client.messages.create(
                model="tiny", max_tokens=6, messages=TALK, extra_body={"temperature": 0}
            )
            assert whole.content[0].text == text
            return text

    assert asyncio.run(main())
