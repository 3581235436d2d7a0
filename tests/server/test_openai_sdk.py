"""The unmodified `openai` package against a real server: sync, async, streaming."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from fixtures.servers import Served
from sparseengine.core.params import SamplingParams
from sparseengine.llm import LLM

TALK: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["fox", "dog"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
COMPACT = {"bad_words": [" ", "\n", "\r", "\t"]}  # JSON of a random model is mostly white space
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=30)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_completion_equals_the_offline_one(client: openai.OpenAI, checkpoint: Any) -> None:
    found = client.completions.create(
        model="tiny",
        prompt="the quick",
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": 1 > 0},
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(checkpoint), attention_backend="reference", quiet=True) as llm:
        offline = llm.generate("the quick", params, use_tqdm=False)[0]
    assert found.choices[0].text == offline.outputs[0].text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == len(offline.prompt_token_ids)
    assert found.usage.completion_tokens == 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + 12


def test_many_prompts_and_choices_come_in_order(client: openai.OpenAI) -> None:
    prompts = ["the quick", "lazy dog", "own fox"]
    both = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=6, seed=5, temperature=1
    )
    assert [c.index for c in both.choices] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = client.completions.create(
            model="tiny", prompt=prompt, n=2, max_tokens=6, seed=5, temperature=1
        )
        pair = [c.text for c in both.choices[2 * i : 2 * i + 2]]
        assert pair == [c.text for c in alone.choices]
    assert both.choices[0].text != both.choices[1].text


def test_token_prompts_and_text_prompts_agree(client: openai.OpenAI, served: Served) -> None:
    ids = served.post("/tokenize", {"prompt": "the quick"}).json()["tokens"]
    kinds: list[Any] = ["the quick", ids, ["the quick"], [ids]]
    texts = {
        client.completions.create(model="tiny", prompt=p, max_tokens=8, temperature=0)
        .choices[0]
        .text
        for p in kinds
    }
    assert len(texts) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_completions_add_up(client: openai.OpenAI, n: int) -> None:
    options: Any = {"model": "tiny", "prompt": "fox", "max_tokens": 20, "seed": 9, "n": n}
    whole = client.completions.create(**options)
    texts, reasons = [""] * n, [None] * n
    for chunk in client.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            assert choice.text == ""
            reasons[choice.index] = choice.finish_reason
    assert texts == [c.text for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_chat_adds_up_and_ends_in_order(client: openai.OpenAI, n: int) -> None:
    """Case 25: role, contents, an empty delta with the reason, usage last."""
    options: Any = {"model": "tiny", "messages": TALK, "max_tokens": 20, "seed": 4, "n": n}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    *body, last = chunks
    assert last.choices == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(last.usage, c) for c in counts] == [getattr(whole.usage, c) for c in counts]
    assert all(c.usage is None for c in body)
    for i in range(n):
        mine = [c.choices[0] for c in body if c.choices[0].index == i]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == whole.choices[i].finish_reason
        assert mine[-1].delta.content is None
        assert all(c.finish_reason is None for c in mine[:-1])
        text = "".join(c.delta.content or "" for c in mine)
        assert text == whole.choices[i].message.content


def test_chat_logprobs_have_openais_shape(client: openai.OpenAI) -> None:
    """Case 14: without top_logprobs the lists are empty, not an error."""
    options: Any = {"model": "tiny", "messages": TALK, "max_tokens": 5, "temperature": 0}
    plain = client.chat.completions.create(**options, logprobs=True).choices[0].logprobs
    assert [t.top_logprobs for t in plain.content] == [[]] * 5
    two = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    for token in two.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert bytes(token.bytes).decode() == token.token
    streamed = [
        entry
        for chunk in client.chat.completions.create(
            **options, logprobs=True, top_logprobs=2, stream=True
        )
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == two.choices[0].logprobs.content


def test_json_schema(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="tiny",
        messages=TALK,
        max_tokens=100,
        seed=2,
        n=2,
        response_format=FORMAT,  # type: ignore[arg-type]
        extra_body={"sparse": {"method": "streaming_llm", "budget": 16}, **COMPACT},
    )
    for choice in found.choices:
        if choice.finish_reason == "stop":
            value = json.loads(choice.message.content)
            assert isinstance(value["ok"], bool)
            assert value["kind"] in ("fox", "dog")
    assert any(c.finish_reason == "stop" for c in found.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {
        "model": "tiny",
        "messages": TALK,
        "max_tokens": 100,
        "seed": 1,
        "extra_body": COMPACT,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    }
    if not stream:
        choice = client.chat.completions.create(**options).choices[0]
        (call,) = choice.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
    else:
        name, arguments, reason = "", "", None
        for chunk in client.chat.completions.create(**options, stream=True):
            delta = chunk.choices[0].delta
            for call in delta.tool_calls or ():
                assert call.index == 0
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    assert name == "look"
    assert reason == "tool_calls"
    assert isinstance(json.loads(arguments)["ok"], bool)


def test_sparse_parameters_ride_in_extra_body(client: openai.OpenAI) -> None:
    """A budget changes what is kept, and `record` tells it."""
    prompt = "the quick brown fox jumps over the lazy dog " * 3
    found = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=4,
        temperature=0,
        extra_body={"sparse": {"method": "streaming_llm", "budget": 16, "record": True}},
    )
    sparse = found.choices[0].model_extra["sparse"]
    assert sparse["method"] == "streaming_llm"
    assert len(sparse["retained"][0]["positions"]["0"][0]) == 16
    assert found.usage.prompt_tokens > 40


def test_stages_ride_in_extra_body(client: openai.OpenAI) -> None:
    """Rows differ in length, and their pages are what rows of the budget would take."""
    stages = {"method": "snapkv", "budget": 48, "allocate": "page_quanta", "record": True}
    found = client.completions.create(
        model="tiny",
        prompt="the quick brown fox jumps over the lazy dog " * 5,
        max_tokens=2,
        extra_body={"sparse": {**stages, "allocate_scope": "model"}},
    )
    positions = found.choices[0].model_extra["sparse"]["retained"][0]["positions"]
    rows = [len(row) for layer in positions.values() for row in layer]
    assert found.usage.prompt_tokens > 60
    assert sum(-(-n // 16) for n in rows) == 3 * len(rows)


READ = {"dense_layers": 0}


@pytest.mark.parametrize(
    ("sparse", "word"),
    [
        ({"method": "no_such"}, "no_such"),
        ({"method": "h2o"}, "not enabled"),
        ({"method": "snapkv", "budget": 0}, "budget"),
        ({"method": "snapkv", "ratio": 1.5}, "ratio"),
        ({"method": "snapkv", "budget": 8, "ratio": 0.5}, "not both"),
        ({"method": "snapkv", "budget": 16, "windo": 4}, "windo"),
        ({"method": "snapkv", "budget": "16"}, "budget"),
        ({"method": "full", "budget": 16}, "full"),
        ({"method": "snapkv", "allocate": "pages"}, "page_quanta"),
        ({"method": "snapkv", "select": "quest", "select_config": READ}, "side tensors"),
        ({"method": "snapkv", "select": "streaming_llm"}, "does not select"),
        ({"prefill": "no_such"}, "no_such"),
        ({"prefill": 3}, "prefill"),
    ],
)
def test_wrong_sparse_fields_name_themselves(
    client: openai.OpenAI, sparse: dict[str, Any], word: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="tiny", prompt="fox", max_tokens=2, extra_body={"sparse": sparse}
        )
    assert word in caught.value.message
    assert caught.value.param == "sparse"


def test_responses(client: openai.OpenAI) -> None:
    found = client.responses.create(
        model="tiny", input="the quick", instructions="be brief", max_output_tokens=6, temperature=0
    )
    assert found.status == "incomplete"
    assert found.usage.output_tokens == 6
    events = list(
        client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": "the quick"}],
            instructions="be brief",
            max_output_tokens=6,
            temperature=0,
            stream=True,
        )
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == found.output_text == events[-1].response.output_text


def test_responses_that_are_cut_say_so(client: openai.OpenAI) -> None:
    """Case 26: one token is enough to be incomplete, and is counted."""
    found = client.responses.create(model="tiny", input="fox", max_output_tokens=1)
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 1
    assert found.usage.input_tokens > 3


def test_responses_with_tools_and_their_results(client: openai.OpenAI) -> None:
    flat: Any = {"type": "function", "name": "look", "parameters": SCHEMA}
    found = client.responses.create(
        model="tiny",
        input="fox",
        max_output_tokens=230,
        tools=[flat],
        tool_choice={"type": "function", "name": "look"},
        extra_body={"seed": 3},
    )
    (call,) = found.output
    assert call.type == "function_call"
    assert found.status == "completed"
    assert json.loads(call.arguments)["kind"] in ("fox", "dog")
    talk: Any = [
        {"role": "user", "content": "fox"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "a fox"},
    ]
    again = client.responses.create(
        model="tiny", input=talk, max_output_tokens=3, extra_body={"seed": 3}
    )
    assert again.usage.output_tokens <= 3
    assert again.usage.input_tokens > found.usage.input_tokens


def test_the_async_client_runs_many_at_once(served: Served) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=10, seed=seed, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.v1, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i % 4) for i in range(12)))

    texts = asyncio.run(main())
    assert texts[:4] * 3 == texts
    assert len(set(texts)) == 4
