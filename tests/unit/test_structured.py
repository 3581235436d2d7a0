"""Structured outputs end to end: what is generated fits what was asked for, by either backend."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.engines import EOS, save_checkpoint
from sparseengine import LLM, SamplingParams, SparseParams, StructuredOutputs
from sparseengine.engine.grammars import plain_schema
from sparseengine.errors import RequestError
from sparseengine.server.tools.choice import plan_tools

BACKENDS = ("xgrammar", "llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kinds": {"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 2},
        "more": {"$ref": "#/$defs/more"},
    },
    "required": ["name", "size"],
    "$defs": {"more": {"type": ["null", "boolean"]}},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("structured")
    with LLM(str(save_checkpoint(folder)), quiet=True) as made:
        yield made


def texts(llm: LLM, structured: StructuredOutputs, *, n: int = 4, **params) -> list[str]:
    """Of the completions that came to their end: the others were cut off by max_tokens."""
    given = {"max_tokens": 150, "seed": 1, "n": n, **params}
    sampling = SamplingParams(structured_outputs=structured, **given)
    (output,) = llm.generate("the quick", sampling, use_tqdm=False)
    ended = [c for c in output.outputs if c.finish_reason == "stop"]
    assert all(c.token_ids[-1] == EOS and c.stop_reason is None for c in ended)
    return [c.text for c in ended]


def is_sized(value: dict) -> bool:
    name_ok = isinstance(value["name"], str) and len(value["name"]) <= 6
    kinds_ok = all(k in ("a", "b", 1) for k in value.get("kinds", ()))
    more_ok = value.get("more") in (None, True, False)
    unknown = value.keys() - SCHEMA["properties"].keys()
    return name_ok and 0 <= value["size"] <= 99 and kinds_ok and more_ok and not unknown


@pytest.mark.parametrize("form", [SCHEMA, json.dumps(SCHEMA)], ids=["mapping", "text"])
def test_json_schema(llm: LLM, form) -> None:
    found = texts(llm, StructuredOutputs(json=form), n=6, max_tokens=200)
    assert len(found) > 3
    assert all(is_sized(json.loads(text)) for text in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_json_object(llm: LLM, backend: str) -> None:
    found = texts(llm, StructuredOutputs(json_object=True, backend=backend), n=12)
    assert len(found) > 1
    assert all(isinstance(json.loads(text), dict) for text in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_regex_is_the_whole_text(llm: LLM, backend: str) -> None:
    pattern = r"[0-9]{3}-[a-f]{2,4}(x|안녕)"
    found = texts(llm, StructuredOutputs(regex=pattern, backend=backend))
    assert len(found) == 4
    assert all(re.fullmatch(pattern, text) for text in found)
    assert len(set(found)) > 1, "siblings draw for themselves"


@pytest.mark.parametrize("backend", BACKENDS)
def test_choice_takes_texts_as_they_are(llm: LLM, backend: str) -> None:
    choices = ['say "no" \\ {', "안녕\n세계 😀", "fox", "foxes"]
    found = texts(llm, StructuredOutputs(choice=choices, backend=backend), n=12, temperature=4.0)
    assert len(found) == 12
    assert set(found) <= set(choices)
    assert len(set(found)) > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "grammar", ['root ::= "x" item+\nitem ::= [0-9] ";"', 'start: "x" item+\nitem: /[0-9]/ ";"']
)
def test_grammars_in_both_notations(llm: LLM, backend: str, grammar: str) -> None:
    found = texts(llm, StructuredOutputs(grammar=grammar, backend=backend))
    assert found
    assert all(re.fullmatch(r"x([0-9];)+", text) for text in found)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.2}, {"top_k": 3}])
def test_it_holds_for_every_kind_of_sampling(llm: LLM, sampling: dict) -> None:
    found = texts(llm, StructuredOutputs(regex="[ab]{4}"), **sampling)
    assert len(found) == 4
    assert all(re.fullmatch("[ab]{4}", text) for text in found)


def test_mappings_are_read_as_requests_give_them(llm: LLM) -> None:
    sampling = SamplingParams.from_dict({"structured_outputs": {"choice": ["fox"]}})
    assert sampling.structured_outputs == StructuredOutputs(choice=("fox",))
    (output,) = llm.generate("a", sampling, use_tqdm=False)
    assert output.outputs[0].text == "fox"


def test_beside_a_free_request_and_streamed(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    held = SamplingParams(
        temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputs(regex="[0-9]{5}")
    )
    alone = llm.generate("own fox", free, use_tqdm=False)[0].outputs[0].token_ids
    beside, digits = llm.generate(["own fox", "own fox"], [free, held], use_tqdm=False)
    assert beside.outputs[0].token_ids == alone
    assert re.fullmatch("[0-9]{5}", digits.outputs[0].text)
    parts = [o.outputs[0].text for o in llm.stream("own fox", held)]
    assert parts[-1] == digits.outputs[0].text
    assert [len(p) for p in parts] == [1, 2, 3, 4, 5, 5]


def test_log_probabilities_are_those_of_the_free_model(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    held = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=20,
        structured_outputs=StructuredOutputs(choice=["z"]),
    )  # fmt: skip
    (raw,), (row,) = (
        llm.generate("own fox", p, use_tqdm=False)[0].outputs[0].logprobs for p in (free, held)
    )
    forced = next(iter(row))
    assert row[forced].decoded_token == "z"
    assert {t: p.logprob for t, p in raw.items()} == {
        t: p.logprob for t, p in row.items() if p.rank <= 20 and t in raw
    }


def test_stop_strings_and_stop_tokens_still_end_a_text(llm: LLM) -> None:
    held = StructuredOutputs(regex="a{3}b{3}")
    sampling = SamplingParams(structured_outputs=held, stop="ab")
    (output,) = llm.generate("a", sampling, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("aa", "ab")
    b = llm.tokenizer.encode("b", add_special_tokens=False)[0]
    sampling = SamplingParams(structured_outputs=held, stop_token_ids=(b,))
    (output,) = llm.generate("a", sampling, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("aaa", b)


def test_a_complete_text_ends_before_min_tokens_and_pads_with_eos(llm: LLM) -> None:
    held = StructuredOutputs(choice=["ab"])
    for params in ({"min_tokens": 6, "max_tokens": 8}, {"ignore_eos": True, "max_tokens": 6}):
        sampling = SamplingParams(structured_outputs=held, **params)
        (output,) = llm.generate("a", sampling, use_tqdm=False)
        assert output.outputs[0].text == "ab"
        assert output.outputs[0].token_ids[2:] == [EOS] * 4
    longer = SamplingParams(
        structured_outputs=StructuredOutputs(regex="a+"), min_tokens=9, max_tokens=9
    )
    (output,) = llm.generate("a", longer, use_tqdm=False)
    assert output.outputs[0].text == "a" * 9


def test_what_excludes_everything_is_an_error_of_that_request(llm: LLM) -> None:
    b = llm.tokenizer.encode("b", add_special_tokens=False)[0]
    held = SamplingParams(structured_outputs=StructuredOutputs(regex="a"), allowed_token_ids=(b,))
    free = SamplingParams(max_tokens=2)
    bad, good = llm.generate(["a", "a"], [held, free], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "structured_outputs" in str(bad.outputs[0].stop_reason)
    assert len(good.outputs[0].token_ids) == 2


def test_the_structure_may_begin_behind_a_mark(llm: LLM) -> None:
    """What comes before it is free, siblings find their own."""
    mark = "o"
    held = StructuredOutputs(regex="[0-9]{3}", after=mark)
    assert held != StructuredOutputs(regex="[0-9]{3}")
    sampling = SamplingParams(
        structured_outputs=held, n=4, seed=2, max_tokens=400, temperature=1.5, logit_bias={EOS: 20}
    )
    (output,) = llm.generate("the quick", sampling, use_tqdm=False)
    for completion in output.outputs:
        _, found, behind = completion.text.partition(mark)
        assert found, "EOS, however likely, does not end what is free"
        assert re.fullmatch(r"\S*[0-9]{3}", behind.replace(" ", ""))
    assert len({len(c.token_ids) for c in output.outputs}) > 1


def test_with_eviction(llm: LLM) -> None:
    held = SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]{40}"), max_tokens=60)
    with LLM(llm.resolved.source.name, enable_methods="keydiff", quiet=True) as sparse:
        ids = list(range(2, 200))
        (output,) = sparse.generate(
            {"prompt_token_ids": ids}, held, SparseParams("keydiff", budget=40), use_tqdm=False
        )
    assert re.fullmatch("[0-9]{40}", output.outputs[0].text)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar"),
        ({"json_object": False}, "given: none"),
        ({"json": ""}, "is not JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": 5}, "must be a JSON schema"),
        ({"json": {"a": {1}}}, "is not JSON"),
        ({"json": {"minimum": float("nan")}}, "is not JSON"),
        ({"json": "[" * 100_000}, "is not JSON"),
        ({"json": {}, "regex": "a"}, "given: json, regex"),
        ({"regex": " "}, "non-empty text"),
        ({"regex": 5}, "non-empty text"),
        ({"grammar": ""}, "non-empty text"),
        ({"choice": []}, "list of non-empty texts"),
        ({"choice": "ab"}, "list of non-empty texts"),
        ({"choice": ["a", ""]}, "list of non-empty texts"),
        ({"json_object": "yes"}, "True"),
        ({"regex": "a", "after": ""}, "after='' is not allowed"),
        ({"regex": "a", "backend": "outlines"}, "auto, xgrammar, llguidance"),
        ({"regexp": "a"}, "did you mean 'regex'"),
    ],
)
def test_malformed_parameters(values: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"regex": "("}, "xgrammar: .*parenthesis.*; llguidance: .*unclosed group"),
        ({"regex": "(", "backend": "llguidance"}, "regex cannot be used: llguidance"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "no rules"}, "grammar cannot be used"),
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json": {"enum": []}}, "empty"),
        ({"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "no text fits it"),
        ({"grammar": "root ::= a\na ::= root"}, "no text fits it"),
        ({"json": {"$ref": "https://example.com/a.json"}}, "another document"),
        ({"regex": "(" * 100_000 + "a" + ")" * 100_000}, "regex cannot be used"),
        ({"grammar": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000}, "grammar cannot be"),
        ({"choice": ["\ud800"]}, "surrogates not allowed"),
        ({"json": {"type": 5, "properties": [], "required": "x", "enum": {}}}, "cannot be used"),
        ({"json": {"not": {}}}, "xgrammar: it does not enforce not; llguidance: "),
        ({"json": {"multipleOf": 3}, "backend": "xgrammar"}, "does not enforce multipleOf"),
    ],
)
def test_what_does_not_compile_fails_its_request_only(llm: LLM, values, message: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError, match=message):
            llm.generate("a", SamplingParams(structured_outputs=values), use_tqdm=False)
    # an expression that is odd and fine, behind a valid one and bad ones
    found = texts(llm, StructuredOutputs(regex="^(|.*)$"), max_tokens=2)
    assert isinstance(found, list)
    assert texts(llm, StructuredOutputs(choice=["ok"]), n=1) == ["ok"]


def test_a_model_without_tokenizer_says_so(llm: LLM) -> None:
    from fixtures.engines import make_engine, make_tokenizer

    held = SamplingParams(structured_outputs=StructuredOutputs(choice=["a"]))
    with pytest.raises(RequestError, match="need a tokenizer"):
        make_engine().add_request([1], held)
    with pytest.raises(RequestError, match="a token that ends a text"):
        make_engine(tokenizer=make_tokenizer()).add_request([1], held)


def test_a_missing_library_names_the_extra(llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr("sparseengine.engine.grammars.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"xgrammar or llguidance.*sparseengine\[grammar\]"):
        texts(llm, StructuredOutputs(choice=["never compiled"]))


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        (SCHEMA, {"maxLength"}),
        ({"type": "string", "pattern": "a"}, {"pattern without ^ and $"}),
        ({"type": "string", "pattern": "^a$"}, set()),
        ({"uniqueItems": False, "title": "multipleOf"}, set()),
        ({"properties": {"not": {"type": "string"}}}, set()),
        ({"items": [{"multipleOf": 2}], "anyOf": [{"contains": {}}]}, {"multipleOf", "contains",
            "items beside anyOf"}),
        ({"required": ["b"], "properties": {"a": {}}}, {"required 'b' that is no property"}),
        ({"$ref": "#/$defs/a", "description": "x", "$defs": {"a": {}}}, set()),
        ({"enum": ["a"], "type": "string", "maxLength": 0}, {"maxLength", "maxLength beside enum"}),
    ],
)  # fmt: skip
def test_keywords_that_would_be_passed_over_are_found(schema: dict, ignored: set) -> None:
    assert plain_schema(json.dumps(schema))[1] == ignored


def test_objects_that_list_properties_are_closed() -> None:
    listed = {"properties": {"a": {"properties": {"b": {}}}}}
    schema = json.loads(plain_schema(json.dumps(listed))[0])
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"]["additionalProperties"] is False
    for opened in ({"type": "object"}, {"properties": {}, "additionalProperties": True}):
        assert json.loads(plain_schema(json.dumps(opened))[0]) == opened
    parts = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert json.loads(plain_schema(json.dumps(parts))[0]) == parts


# ── tools ─────────────────────────────────────────────────────────────────────────────────────────

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}},
    "required": ["at"],
    "$defs": {
        "point": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
                  "minItems": 2, "maxItems": 2},
    },
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": POINT}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("choice", ["required", {"type": "tool", "name": "go"}])
def test_forced_tool_calls_fit_their_schemas(llm: LLM, choice, backend: str) -> None:
    plan = plan_tools(choice, TOOLS, None, parallel=False)
    held = replace(plan.structured, backend=backend)
    found = texts(llm, held, n=6, max_tokens=200)
    assert found
    for text in found:
        (call,) = plan.parser.parse(text, TOOLS).calls
        arguments = json.loads(call.arguments)
        assert call.name in ("go", "now")
        assert arguments == {} if call.name == "now" else len(arguments["at"]) == 2
