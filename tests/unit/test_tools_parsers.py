"""Tool parsers: the same calls however the text is cut, valid JSON always, never an exception."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseengine.errors import ConfigError
from sparseengine.server.tools import CallStart, gather, parser_for, parser_names

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "integer"},
                    "tags": {"type": "array"},
                    "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "kind": {"$ref": "#/$defs/kind"},
                    "deep": {"type": ["object", "null"]},
                },
                "$defs": {"kind": {"enum": ["1", "2"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
NASTY = 'mkdir -p test/{a,b\n"}</tool_call> \\" 안녕 😀 {{'
FORMATS = ("hermes", "llama3_json", "glm45", "qwen3_coder", "deepseek_v3", "deepseek_v31")
DS = {k: f"<｜tool▁{v}｜>" for k, v in [("calls", "calls▁begin"), ("end", "calls▁end")]}
DS |= {"call": "<｜tool▁call▁begin｜>", "sep": "<｜tool▁sep｜>", "done": "<｜tool▁call▁end｜>"}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def write(name: str, calls: list[tuple[str, dict]]) -> str:
    """Calls as the chat template of such a model writes them."""
    if name == "hermes":
        made = [f'{{"name": "{n}", "arguments": {_json(a)}}}' for n, a in calls]
        return "\n".join(f"<tool_call>\n{m}\n</tool_call>" for m in made)
    if name == "llama3_json":
        return "; ".join(f'{{"name": "{n}", "parameters": {_json(a)}}}' for n, a in calls)
    if name == "glm45":
        tag = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        made = ["".join(tag.format(k, _bare(v)) for k, v in a.items()) for _, a in calls]
        pairs = zip(calls, made, strict=True)
        return "\n".join(f"<tool_call>{n}\n{m}</tool_call>" for (n, _), m in pairs)
    if name == "qwen3_coder":
        tag = "<parameter={}>\n{}\n</parameter>\n"
        made = ["".join(tag.format(k, _bare(v)) for k, v in a.items()) for _, a in calls]
        pairs = zip(calls, made, strict=True)
        return "\n".join(
            f"<tool_call>\n<function={n}>\n{m}</function>\n</tool_call>" for (n, _), m in pairs
        )
    if name == "deepseek_v3":
        made = [f"{DS['call']}function{DS['sep']}{n}\n```json\n{_json(a)}\n```" for n, a in calls]
        return DS["calls"] + "\n".join(m + DS["done"] for m in made) + DS["end"]
    made = [f"{DS['call']}{n}{DS['sep']}{_json(a)}{DS['done']}" for n, a in calls]
    return DS["calls"] + "".join(made) + DS["end"]


def cut(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(c, len(text)) for c in cuts} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def streamed(name: str, parts: list[str], tools: list = TOOLS):
    stream = parser_for(name).stream(tools)
    return gather([e for part in parts for e in stream.push(part)] + stream.finish())


def eagerly(name: str, parts: list[str], tools: list = TOOLS):
    """(what it adds up to, calls that came to their end, events) of an eager stream."""
    stream = parser_for(name).stream(tools, eager=True)
    events = [e for part in parts for e in stream.push(part)] + stream.finish()
    return gather(events), stream.num_complete, events


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_eager(name: str, text: str, parts: list[str]) -> None:
    """Complete calls are those of a whole parse; a call that is none has no JSON a client runs."""
    whole = parser_for(name).parse(text, TOOLS)
    found, complete, _ = eagerly(name, parts)
    ended = [(c.name, c.arguments) for c in found.calls if is_json(c.arguments)]
    assert ended == [(c.name, c.arguments) for c in whole.calls]
    assert complete == len(ended)
    if len(found.calls) == complete:
        assert found.content == whole.content
    again, _, _ = eagerly(name, list(text))
    assert [(c.name, c.arguments) for c in again.calls] == [
        (c.name, c.arguments) for c in found.calls
    ]
    assert again.content == found.content


def shown(parsed) -> tuple[str | None, list[tuple[str, str]]]:
    """Without the random ids; the ids differ."""
    assert len({c.id for c in parsed.calls}) == len(parsed.calls)
    for call in parsed.calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name
    return parsed.content, [(c.name, c.arguments) for c in parsed.calls]


def decoded(parsed) -> tuple[str | None, list[tuple[str, dict]]]:
    content, calls = shown(parsed)
    return content, [(n, json.loads(a)) for n, a in calls]


CALLS = [
    ("write", {"path": NASTY, "lines": 3, "tags": ["{", 1.5, None], "mode": "5 }"}),
    ("now", {}),
    ("write", {"path": "", "deep": {"a": {"b": "}"}}, "kind": "2"}),
]


@pytest.mark.parametrize("name", FORMATS)
def test_every_split_gives_the_calls_that_were_written(name: str) -> None:
    text = f"Let me see. <tool {{\n\n{write(name, CALLS)}"
    expected = ("Let me see. <tool {", CALLS)
    whole = parser_for(name).parse(text, TOOLS)
    assert decoded(whole) == expected
    for at in range(len(text) + 1):
        assert shown(streamed(name, cut(text, [at]))) == shown(whole)
        assert shown(eagerly(name, cut(text, [at]))[0]) == shown(whole)
    assert shown(streamed(name, list(text))) == shown(whole)
    assert shown(eagerly(name, list(text))[0]) == shown(whole)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
def test_strings_between_tags_come_as_they_are_written(name: str) -> None:
    """A long argument is shown before its end; a key that comes again changes nothing."""
    text = write(name, [("write", {"path": "a line\n" * 40, "lines": 3})])
    half = text[: text.index("a line") + 140]
    found, complete, events = eagerly(name, list(half))
    assert complete == 0
    assert found.calls[0].name == "write"
    assert found.calls[0].arguments.startswith('{"path": "' + "a line\\n" * 19)
    assert len(events) > 100
    again = text.replace("a line\n" * 40, "x").replace("lines", "path")
    _, calls = decoded(parser_for(name).parse(again, TOOLS))
    assert calls == [("write", {"path": "x"})]


@pytest.mark.parametrize("name", FORMATS)
def test_text_behind_calls_is_content(name: str) -> None:
    text = write(name, CALLS[1:2]) + "\nThat is all {.\n"
    for parts in ([text], list(text)):
        assert decoded(streamed(name, parts)) == ("\nThat is all {.", CALLS[1:2])


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_cut_off_anywhere_loses_nothing_and_calls_nothing_half(name: str) -> None:
    text = write(name, CALLS[:2])
    most = shown(parser_for(name).parse(text, TOOLS))[1]
    for end in range(len(text)):
        parsed = parser_for(name).parse(text[:end], TOOLS)
        calls = shown(parsed)[1]
        assert calls == most[: len(calls)]
        if not calls:
            assert parsed.content == text[:end]
        assert shown(streamed(name, list(text[:end]))) == shown(parsed)
        check_eager(name, text[:end], [text[:end]])


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_passes_unchanged_and_at_once(name: str) -> None:
    text = " \n An answer, with { and <tool> in it; 안녕 😀 \n\n"
    for parts in ([text], list(text)):
        assert shown(streamed(name, parts)) == (text, [])
    stream = parser_for(name).stream(TOOLS)
    assert gather(stream.push("word")).content == "word"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call> and on'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>'),
        ("hermes", "use the <tool_call> tag"),
        ("hermes", "<tool_call>" + '{"a":' * 20_000 + "1" + "}" * 20_000),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"answer": {"name": "Bob"}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("glm45", "<tool_call>two words</tool_call>"),
        ("glm45", "<tool_call></tool_call>"),
        ("glm45", "<tool_call>now<arg_key>a</arg_key>no value</tool_call>"),
        ("qwen3_coder", "<tool_call>now</tool_call>"),
        ("qwen3_coder", "<function=now><parameter=a>no end</function>"),
        ("deepseek_v3", f"{DS['calls']} nothing {DS['end']}"),
        ("deepseek_v3", f"{DS['call']}now{DS['sep']}{{bad}}{DS['done']}"),
        ("deepseek_v3", f"{DS['call']}now{DS['sep']}text {{}}"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert shown(parser_for(name).parse(text, TOOLS)) == (text, [])
    if len(text) < 1000:
        assert shown(streamed(name, list(text))) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}', [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}}</tool_call>', [("now", {})]),
        ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', [("f", {"a": "x\ny"})]),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"\\ud800"}}', [("f", {"a": "\ud800"})]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ("llama3_json", '{"type":"function","name":"now","parameters":{}}', [("now", {})]),
        ("llama3_json", '{"type":"function","function":{"name":"now"}}', [("now", {})]),
        ("glm45", "<tool_call>now</tool_call>", [("now", {})]),
        (
            "glm47",
            "<tool_call>write<arg_key>path</arg_key><arg_value> 5\n</arg_value><arg_key>lines"
            "</arg_key><arg_value>seven</arg_value><arg_key>x</arg_key><arg_value>True</arg_value>"
            "<arg_key>mode</arg_key><arg_value>null</arg_value><arg_key>kind</arg_key><arg_value>1"
            "</arg_value></tool_call>",
            [("write", {"path": " 5\n", "lines": "seven", "x": True, "mode": None, "kind": "1"})],
        ),
        ("qwen3_coder", "<function=now>\n</function>", [("now", {})]),
        (
            "qwen3_coder",
            "<tool_call><function=write><parameter=path>\n\n a\n\n</parameter>"
            "<parameter=lines>7</parameter></function></tool_call>",
            [("write", {"path": "\n a\n", "lines": 7})],
        ),
    ],
)
def test_variants_that_models_write(name: str, text: str, calls: list) -> None:
    for parts in ([text], list(text)):
        assert decoded(streamed(name, parts)) == (None, calls)


def test_a_call_is_reported_as_soon_as_it_is_complete() -> None:
    stream = parser_for("hermes").stream(TOOLS)
    assert stream.push('<tool_call>{"name": "now", "arguments": {}') == []
    start = stream.push("}")[0]
    assert isinstance(start, CallStart)
    assert (start.index, start.name, start.id[:5]) == (0, "now", "call_")


EAGER = ("hermes", "llama3_json", "deepseek_v3", "deepseek_v31")


@pytest.mark.parametrize("name", EAGER)
def test_arguments_come_while_they_are_written(name: str) -> None:
    value = "line one\nline two {"
    text = write(name, [("write", {"path": value, "lines": 12, "tags": [True, None]})])
    stream = parser_for(name).stream(TOOLS, eager=True)
    seen, started = "", False
    for at, character in enumerate(text):
        for event in stream.push(character):
            if isinstance(event, CallStart):
                assert event.name == "write"
                assert text[at] == "{", "it begins with its arguments"
                started = True
            else:
                seen += event.text
        if started and seen and "line two" in text[:at]:
            assert "line" in seen, "held back"
    whole = parser_for(name).parse(text, TOOLS).calls[0].arguments
    assert seen + "".join(e.text for e in stream.finish()) == whole
    assert json.loads(whole) == {"path": value, "lines": 12, "tags": [True, None]}
    assert len(eagerly(name, list(text))[2]) > 20


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ('{"a": NaN}', '{"a": '),
        ('{"a": 1e999}', '{"a": '),
        ('{"a": tru, "b": 1}', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ('{"a" 1}', '{"a" '),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a": [1}', '{"a": [1'),
        ('{"a": "\\x"}', '{"a": "'),
        ("{a: 1}", "{"),
        ('{{"a": 1}}', "{"),
        ('{"a": {"b": 1} "c"}', '{"a": {"b": 1} '),
        ('{"a": "b', '{"a": "b}</tool_call>'),
        ('{"a": 12', '{"a": 12'),
        ('{"a": "\\u00', '{"a": "'),
        ('{"a": 1}, "b": nothing', '{"a": 1'),
    ],
)
def test_a_call_that_goes_wrong_is_never_complete(body: str, sent: str) -> None:
    text = f'so <tool_call>{{"name": "now", "arguments": {body}}}</tool_call>'
    for parts in ([text], list(text)):
        found, complete, _ = eagerly("hermes", parts)
        assert (found.content, complete) == ("so", 0)
        assert [c.arguments for c in found.calls] == [sent]
        assert not is_json(sent)
    assert parser_for("hermes").parse(text, TOOLS).calls == ()


MARKS = [
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<function=", "</function>", "<parameter=", "</parameter>", ">", *DS.values(),
    "<|python_tag|>", "function", "```json\n", "\n```", '{"name": "now", "parameters": {', "}}",
    '{"name": "f", "arguments": {"a": "', '"', "{", "}", "\\", ";", "[", "]", " ", "\n", "a", "안",
]  # fmt: skip
PIECES = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=3)), max_size=14)


@settings(max_examples=300, deadline=None)
@given(PIECES.map("".join), st.lists(st.integers(0, 120), max_size=6), st.sampled_from(FORMATS))
def test_any_text_in_any_pieces(text: str, cuts: list[int], name: str) -> None:
    whole = shown(parser_for(name).parse(text, TOOLS))
    assert shown(streamed(name, cut(text, cuts))) == whole
    assert shown(streamed(name, list(text))) == whole
    check_eager(name, text, cut(text, cuts))
    if not whole[1]:
        assert whole[0] == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.text(), VALUES, max_size=4),
    st.lists(st.integers(0, 200), max_size=5),
    st.sampled_from(["hermes", "deepseek_v3", "deepseek_v31"]),
)
def test_any_arguments_come_back(arguments: dict, cuts: list[int], name: str) -> None:
    text = write(name, [("f", arguments), ("f", arguments)])
    assert decoded(streamed(name, cut(text, cuts))) == (None, [("f", arguments)] * 2)
    assert decoded(eagerly(name, cut(text, cuts))[0]) == (None, [("f", arguments)] * 2)
    check_eager(name, text[: cuts[0] if cuts else 40], [text[: cuts[0] if cuts else 40]])


def test_names_are_those_of_vllm_and_unknown_ones_are_refused() -> None:
    for name in (
        "hermes",
        "qwen3_coder",
        "qwen3-xml",
        "llama3_json",
        "glm45",
        "glm47",
        "deepseek_v31",
    ):
        assert parser_for(name).parse("x").content == "x"
    assert "deepseek_v3" in parser_names()
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        parser_for("hermess")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit", ["call", "opening", "half"])
def test_long_outputs_stay_cheap(name: str, unit: str) -> None:
    """200,000 characters in small pieces: one long call, openings, calls without their end."""
    if unit == "call":
        text = write(name, [("write", {"path": "line {\n" * 28_000})])
    else:
        one = write(name, [("write", {"path": "x"})])
        piece = one[: one.index("write") + (5 if unit == "opening" else 25)]
        text = piece * (200_000 // len(piece))
    begin = time.process_time()
    parsed = streamed(name, cut(text, list(range(0, len(text), 16))))
    assert time.process_time() - begin < 20
    if unit == "call":
        assert len(parsed.calls[0].arguments) > 200_000
