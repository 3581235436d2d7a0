"""What a request says about its tools, and values read by a tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_MAX_REFS = 16


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Parameter schema by tool name.

    Reads OpenAI's shape of chat ({"function": {...}}) and of responses (flat), and Anthropic's
    ("input_schema"). Other kinds of tools are left out.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        inner = tool.get("function", tool)
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            schema = inner.get("parameters") or inner.get("input_schema")
            found[inner["name"]] = schema if isinstance(schema, Mapping) else {}
    return found


def is_string(key: str, schema: Mapping[str, Any]) -> bool:
    """Whether the argument `key` can be nothing but a string, by what the tool declares."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(declared, schema, 0) == {"string"}


def typed(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """The argument `key`, which the model wrote as bare text, as a value of its declared type.

    A string stays as it is to the last space. Anything else is read as JSON (True, False and None
    too); what cannot be read, or has no type that is declared, stays a string.
    """
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    allowed = _types(declared, schema, 0)
    if allowed == {"string"}:
        return text
    value = _literal(text.strip())
    if value is _NONE or (allowed and _type_of(value) not in allowed):
        return text
    return text if isinstance(value, str) and "string" in allowed else value


_NONE = object()


def _literal(text: str) -> Any:
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, allow_nan=False)  # 1e999 reads as infinity
    except (ValueError, RecursionError):
        return _NONE
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _types(declared: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Types that a schema allows, "integer" as "number"; empty: any."""
    if not isinstance(declared, Mapping) or depth > _MAX_REFS:
        return set()
    kind = declared.get("type")
    if isinstance(kind, (str, list, tuple)):
        kinds = {kind} if isinstance(kind, str) else {k for k in kind if isinstance(k, str)}
        return {"number" if k == "integer" else k for k in kinds}
    if isinstance(declared.get("enum"), Sequence):
        return {_type_of(v) for v in declared["enum"]}
    if "const" in declared:
        return {_type_of(declared["const"])}
    if isinstance(declared.get("$ref"), str):
        return _types(_follow(declared["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        options = declared.get(word)
        if isinstance(options, Sequence) and options:
            sets = [_types(o, root, depth + 1) for o in options]
            return set().union(*sets) if all(sets) or word == "allOf" else set()
    return set()


def _follow(ref: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for part in ref.removeprefix("#").strip("/").split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
