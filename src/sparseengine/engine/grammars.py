"""Grammar backends: from what a request asks for to masks over the vocabulary.

Both are optional libraries (the extra `grammar`), imported when the first grammar is compiled.
xgrammar compiles a pushdown automaton with precomputed masks and passes over some JSON schema
keywords; those are refused here, so that nothing is ignored silently. llguidance computes masks as
it goes, says itself what it lacks, and reads more of JSON schema.

Schemas mean the same in both: properties come in their declared order, those that are not listed
are not generated unless `additionalProperties` says so, and `oneOf` is read as `anyOf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from sparseengine.core.params import StructuredOutputs
from sparseengine.errors import RequestError

MAX_SPACES = 64  # white space between two parts of a JSON text: a model must not pad for ever
_INSTALL = 'pip install "sparseengine[grammar]"'
_MAX_MESSAGE = 300


class Matcher(Protocol):
    """How far one text has come in its grammar."""

    def accept(self, token: int) -> bool:
        """Go on by a token; False when it may not stand here."""
        ...

    def fill(self, bits: Tensor) -> None:
        """Set `bits` int32 [ceil(V / 32)]: bit t % 32 of word t // 32 says if t may come next."""
        ...


class Grammar(Protocol):
    """A compiled grammar; any number of texts may follow it at once."""

    @property
    def size_bytes(self) -> int: ...

    def matcher(self) -> Matcher: ...


class Backend(Protocol):
    """Compiles for one vocabulary. `compile` raises ValueError with the reason."""

    def compile(self, spec: StructuredOutputs) -> Grammar: ...


def available(backend: str) -> tuple[str, ...]:
    """Installed backends to try, in this order. Raises `RequestError` when there is none."""
    names = ("xgrammar", "llguidance") if backend == "auto" else (backend,)
    found = tuple(n for n in names if find_spec(n) is not None)
    if not found:
        raise RequestError(
            f"structured_outputs needs {' or '.join(names)}, which is not installed: {_INSTALL}"
        )
    return found


def make_backend(name: str, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> Backend:
    """Prepare a vocabulary (seconds for a large one)."""
    made = XGrammar if name == "xgrammar" else LLGuidance
    return made(tokenizer, vocab_size, stop_ids)


# ── xgrammar ──────────────────────────────────────────────────────────────────────────────────────


class XGrammar:
    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._lib = import_module("xgrammar")
        info = self._lib.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_ids)
        )
        self._compiler = self._lib.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: StructuredOutputs) -> Grammar:
        try:
            compiled = self._compile(spec)
        except (RuntimeError, TypeError) as error:  # what the library raises for its user's faults
            raise ValueError(_message(error)) from error
        return _XGrammar(self._lib, compiled)

    def _compile(self, spec: StructuredOutputs) -> Any:
        compiler = self._compiler
        if spec.json is not None or spec.json_object:
            schema, ignored = plain_schema(_schema(spec))
            if ignored:
                raise ValueError(f"it does not enforce {', '.join(sorted(ignored))}")
            return compiler.compile_json_schema(
                schema, strict_mode=False, max_whitespace_cnt=MAX_SPACES
            )
        if spec.regex is not None:
            return compiler.compile_regex(spec.regex)
        if spec.choice is not None:
            return compiler.compile_grammar(f"root ::= {_alternatives(spec.choice)}")
        grammar = spec.grammar or ""
        is_ebnf = "::=" in grammar
        return compiler.compile_grammar(grammar) if is_ebnf else compiler.compile_lark(grammar)


class _XGrammar:
    def __init__(self, lib: Any, compiled: Any) -> None:
        self._lib = lib
        self._compiled = compiled
        self._size_bytes = int(compiled.memory_size_bytes)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def matcher(self) -> Matcher:
        return _XMatcher(self._lib.GrammarMatcher(self._compiled))


class _XMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def fill(self, bits: Tensor) -> None:
        bits.fill_(-1)  # the library leaves a mask that allows all untouched
        self._matcher.fill_next_token_bitmask(bits[None])


# ── llguidance ────────────────────────────────────────────────────────────────────────────────────


class LLGuidance:
    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._lib = import_module("llguidance")
        self._tokenizer = import_module("llguidance.hf").from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(stop_ids)
        )

    def compile(self, spec: StructuredOutputs) -> Grammar:
        matcher = self._lib.LLMatcher(self._tokenizer, self._source(spec), log_level=0)
        if matcher.is_error():
            raise ValueError(_message(matcher.get_error()))
        return _LLGrammar(matcher)

    def _source(self, spec: StructuredOutputs) -> str:
        lib = self._lib
        if spec.json is not None or spec.json_object:
            schema, _ = plain_schema(_schema(spec))
            options = {"coerce_one_of": True, "whitespace_flexible": True}
            return str(lib.LLMatcher.grammar_from_json_schema(schema, overrides=options))
        if spec.regex is not None:
            return str(lib.grammar_from("regex", spec.regex))
        if spec.choice is not None:
            return str(lib.grammar_from("lark", f"start: {_alternatives(spec.choice)}"))
        return str(lib.grammar_from("grammar", spec.grammar))


class _LLGrammar:
    size_bytes = 1 << 20  # the library does not say

    def __init__(self, prototype: Any) -> None:
        self._prototype = prototype

    def matcher(self) -> Matcher:
        return _LLMatcher(self._prototype.deep_copy())


class _LLMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def fill(self, bits: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel() * bits.element_size())
        if self._matcher.is_error():
            raise RuntimeError(_message(self._matcher.get_error()))


# ── details ───────────────────────────────────────────────────────────────────────────────────────


def _schema(spec: StructuredOutputs) -> str:
    return str(spec.json or '{"type": "object"}')  # kept as text


def _alternatives(texts: Sequence[str]) -> str:
    return " | ".join(json.dumps(t, ensure_ascii=False) for t in texts)


def _message(error: object) -> str:
    """A library's message on one line, without its time stamp and source position."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error))
    return " ".join(text.split())[:_MAX_MESSAGE]


_ONE = (
    *("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems", "additionalItems"),
)
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref")
# Passed over, and lengths: with them it lets control characters into strings.
_NOT_ENFORCED = {
    *("multipleOf", "contains", "minContains", "maxContains", "not", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas", "dependencies", "minLength", "maxLength"),
}
# These hide whatever stands beside them, except what says nothing about values.
_HIDING = {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"}
_SILENT = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "$comment", "$schema", "$id", "$defs", "definitions"),
}


def plain_schema(text: str) -> tuple[str, set[str]]:
    """The schema with its objects closed, and the keywords in it that xgrammar does not enforce.

    An object that lists properties and says nothing about others has no others. Raises ValueError.
    """
    ignored: set[str] = set()
    try:
        return json.dumps(_plain(json.loads(text), ignored, closes=True)), ignored
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _plain(schema: Any, ignored: set[str], *, closes: bool) -> Any:
    """`closes`: False inside allOf, whose parts must leave room for each other."""
    if not isinstance(schema, Mapping):
        return schema
    ignored |= _not_enforced(schema)
    found = dict(schema)
    for key, value in schema.items():
        is_part = key == "allOf" or not closes
        if key in _ONE and isinstance(value, Mapping):
            found[key] = _plain(value, ignored, closes=True)
        elif key in _MANY and isinstance(value, list):
            found[key] = [_plain(v, ignored, closes=not is_part) for v in value]
        elif key in _NAMED and isinstance(value, Mapping):
            found[key] = {n: _plain(v, ignored, closes=True) for n, v in value.items()}
    is_whole = closes and "allOf" not in schema
    if is_whole and "properties" in schema and not any(key in schema for key in _OPEN):
        found["additionalProperties"] = False
    return found


def _not_enforced(schema: Mapping[str, Any]) -> set[str]:
    """Keywords of one schema that xgrammar passes over."""
    found = _NOT_ENFORCED & schema.keys()
    if schema.get("uniqueItems") is True:
        found.add("uniqueItems")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        found.add("allOf")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not (pattern.startswith("^") and pattern.endswith("$")):
        found.add("pattern without ^ and $")
    required, listed = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and isinstance(listed, Mapping):
        found |= {f"required {name!r} that is no property" for name in required} - {
            f"required {name!r} that is no property" for name in listed
        }
    ref = schema.get("$ref")
    if isinstance(ref, str) and not ref.startswith("#"):
        found.add("$ref to another document")
    for key in _HIDING & schema.keys():
        beside = schema.keys() - _SILENT - {key}
        if key in ("enum", "const"):
            beside -= {"type"}
        found |= {f"{other} beside {key}" for other in beside}
    return found
