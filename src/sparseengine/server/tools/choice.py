"""tool_choice: what the prompt offers, what generation is held to, how its text is read.

none      no tools in the prompt, the text is content
auto      the model decides; its own format is parsed
required  at least one call: a JSON list of {"name", "parameters"}
named     one call of that tool: the JSON object of its arguments
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseengine.core.params import StructuredOutputs
from sparseengine.errors import RequestError
from sparseengine.server.tools.jsons import ObjectScanner, arguments_text, load, read_call
from sparseengine.server.tools.schema import tool_schemas
from sparseengine.server.tools.stream import Scanner, ToolParser, Tools, find_literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """tools: for the chat template. structured: None leaves generation free. parser: None means
    that the text is content."""

    tools: tuple[Mapping[str, Any], ...] = ()
    structured: StructuredOutputs | None = None
    parser: ToolParser | None = None


def plan_tools(
    tool_choice: str | Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    parser: ToolParser | None,
    *,
    parallel: bool = True,
) -> ToolPlan:
    """From a request's fields to a plan.

    tool_choice: OpenAI's strings and {"type": "function", ...}, or Anthropic's {"type": "any"} and
    {"type": "tool", "name": ...}; None means auto when there are tools. parser: of the model's own
    format, None when the server was started without one. Raises `RequestError`.
    """
    schemas = tool_schemas(tools or ())
    kind, name = _read(tool_choice, bool(schemas))
    if kind == "none":
        return ToolPlan()
    if not schemas:
        if kind == "auto":
            return ToolPlan()
        raise RequestError(f"tool_choice={tool_choice!r} needs tools, and the request has none")
    offered = tuple(tools or ())
    if kind == "auto":
        if parser is None:
            raise RequestError(
                "tool_choice='auto' needs a parser of this model's calls; start the server with "
                "--tool-call-parser, or ask for 'required', a named tool or 'none'"
            )
        return ToolPlan(tools=offered, parser=parser)
    if kind == "required":
        schema = _list_schema(schemas, parallel)
        listed = ToolParser(_Listed(), needs_special_tokens=False)
        return ToolPlan(tools=offered, structured=StructuredOutputs(json=schema), parser=listed)
    if name not in schemas:
        raise RequestError(
            f"tool_choice names the tool {name!r}; the request's tools are {', '.join(schemas)}"
        )
    schema = _object(schemas[name])
    named = ToolParser(_Named(name), needs_special_tokens=False)
    return ToolPlan(tools=offered, structured=StructuredOutputs(json=schema), parser=named)


def _read(choice: str | Mapping[str, Any] | None, has_tools: bool) -> tuple[str, str]:
    """(none, auto, required or named; the tool's name)."""
    if choice is None:
        return ("auto" if has_tools else "none"), ""
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if kind in ("function", "tool") and isinstance(name, str) and name:
            return "named", name
        choice = {"any": "required"}.get(str(kind), str(kind))
    elif choice == "any":
        choice = "required"
    if choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice={choice!r} is not allowed; it must be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    return choice, ""


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter schema that allows objects alone."""
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**schema, "type": "object"}


def _list_schema(schemas: Mapping[str, Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """A list of calls. Schemas with references move to $defs, where their paths are known."""
    definitions: dict[str, Any] = {}
    options = []
    for i, (name, schema) in enumerate(schemas.items()):
        parameters = _object(schema)
        place = f"tool{i}"
        moved, has_refs = _moved(parameters, f"#/$defs/{place}")
        if has_refs:
            definitions[place] = moved
            parameters = {"$ref": f"#/$defs/{place}"}
        options.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": options}}
    if not parallel:
        found["maxItems"] = 1
    return {**found, "$defs": definitions} if definitions else found


def _moved(value: Any, place: str) -> tuple[Any, bool]:
    """A schema whose references lead to its new place, and whether it has any."""
    if isinstance(value, Mapping):
        found, any_refs = {}, False
        for key, inner in value.items():
            if key == "$ref" and isinstance(inner, str) and inner.startswith("#"):
                found[key], has_refs = place + inner[1:], True
            else:
                found[key], has_refs = _moved(inner, place)
            any_refs = any_refs or has_refs
        return found, any_refs
    if isinstance(value, (list, tuple)):
        pairs = [_moved(inner, place) for inner in value]
        return [v for v, _ in pairs], any(r for _, r in pairs)
    return value, False


class _Listed:
    """[{"name": ..., "parameters": {...}}, ...]"""

    trailing = (",", "]")

    def find(self, text: str, last: bool) -> tuple[int, bool]:
        return find_literal(text, ("[", "{"), last)

    def scanner(self, text: str, tools: Tools) -> Scanner:
        return ObjectScanner(0, read_call, skip="[")


class _Named:
    """{...}: the arguments of one tool."""

    trailing = ()

    def __init__(self, name: str) -> None:
        self._name = name

    def find(self, text: str, last: bool) -> tuple[int, bool]:
        return find_literal(text, ("{",), last)

    def scanner(self, text: str, tools: Tools) -> Scanner:
        return ObjectScanner(0, self._call, head=lambda text, start: (self._name, start))

    def _call(self, raw: str) -> tuple[str, str] | None:
        try:
            arguments = arguments_text(load(raw))
        except ValueError:
            return None
        return None if arguments is None else (self._name, arguments)
