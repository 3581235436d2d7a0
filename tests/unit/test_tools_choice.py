"""tool_choice: what generation is held to and how the text is read."""

from __future__ import annotations

import json

import pytest

from sparseengine.errors import RequestError
from sparseengine.server.tools import gather, parser_for
from sparseengine.server.tools.choice import plan_tools

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}},
    "$defs": {"point": {"type": "array", "items": {"type": "number"}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": POINT}},
    {"type": "function", "function": {"name": "now"}},
]
HERMES = parser_for("hermes")


def read(parser, text: str) -> list[tuple[str, dict]]:
    stream = parser.stream(TOOLS)
    by_character = gather([e for c in text for e in stream.push(c)] + stream.finish())
    whole = parser.parse(text, TOOLS)
    calls = [(c.name, json.loads(c.arguments)) for c in whole.calls]
    assert [(c.name, json.loads(c.arguments)) for c in by_character.calls] == calls
    assert whole.content == by_character.content
    return calls if calls else [("", {"content": whole.content})]


def test_none_offers_nothing_and_auto_follows_the_model() -> None:
    assert plan_tools("none", TOOLS, HERMES).tools == ()
    assert plan_tools(None, None, None).parser is None
    for choice in (None, "auto", {"type": "auto"}):
        plan = plan_tools(choice, TOOLS, HERMES)
        assert (plan.parser, plan.structured, list(plan.tools)) == (HERMES, None, TOOLS)


@pytest.mark.parametrize("choice", ["required", {"type": "any"}])
def test_required_is_a_list_of_calls(choice) -> None:
    plan = plan_tools(choice, TOOLS, None)
    schema = json.loads(plan.structured.json)
    go, now = schema["items"]["anyOf"]
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert go["properties"]["name"]["enum"] == ["go"]
    assert go["properties"]["parameters"] == {"$ref": "#/$defs/tool0"}
    assert schema["$defs"]["tool0"]["properties"]["at"]["$ref"] == "#/$defs/tool0/$defs/point"
    assert now["properties"]["parameters"]["additionalProperties"] is False
    text = '[{"name": "go", "parameters": {"at": [1, 2]}},\n {"name": "now", "parameters": {}}]'
    assert read(plan.parser, text) == [("go", {"at": [1, 2]}), ("now", {})]
    assert read(plan.parser, text[:50]) == [("go", {"at": [1, 2]})]
    assert read(plan.parser, text[:20]) == [("", {"content": text[:20]})]
    assert (
        json.loads(plan_tools(choice, TOOLS, None, parallel=False).structured.json)["maxItems"] == 1
    )


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "go"}},
        {"type": "function", "name": "go"},
        {"type": "tool", "name": "go"},
    ],
)
def test_a_named_tool_is_its_arguments(choice) -> None:
    plan = plan_tools(choice, TOOLS, None)
    assert json.loads(plan.structured.json) == POINT
    assert read(plan.parser, '{"at": [0.5, "}"]}') == [("go", {"at": [0.5, "}"]})]
    assert read(plan.parser, '{"at": [0.5') == [("", {"content": '{"at": [0.5'})]


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("auto", TOOLS, "--tool-call-parser"),
        ("required", None, "needs tools"),
        ("sometimes", TOOLS, "'none', 'auto', 'required'"),
        ({"type": "function"}, TOOLS, "not allowed"),
        ({"type": "tool", "name": "fly"}, TOOLS, "tools are go, now"),
        (5, TOOLS, "not allowed"),
    ],
)
def test_wrong_choices_say_what_is_possible(choice, tools, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_tools(choice, tools, None)
