"""Tool calls in a model's text: parsers by vLLM's --tool-call-parser names."""

from __future__ import annotations

from collections.abc import Callable

from sparseengine.errors import ConfigError, nearest
from sparseengine.server.tools.calls import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    ParsedTools,
    ToolCall,
    ToolEvent,
    gather,
)
from sparseengine.server.tools.jsons import DeepSeek, Hermes, Llama3
from sparseengine.server.tools.stream import ToolParser, ToolStream
from sparseengine.server.tools.tagged import GLM, QWEN_CODER, Tagged

_MAKERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": lambda: ToolParser(Hermes()),
    "qwen3_coder": lambda: ToolParser(Tagged(QWEN_CODER)),
    "llama3_json": lambda: ToolParser(Llama3(), needs_special_tokens=False),
    "glm45": lambda: ToolParser(Tagged(GLM)),
    "deepseek_v3": lambda: ToolParser(DeepSeek()),
}
_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "glm": "glm45",
    "glm47": "glm45",
    "deepseek": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
}


def parser_names() -> tuple[str, ...]:
    """Every name that `parser_for` takes."""
    return tuple(sorted((*_MAKERS, *_ALIASES)))


def parser_for(name: str) -> ToolParser:
    """The parser with that name, "-" and "_" alike. Raises `ConfigError` for an unknown one."""
    key = name.strip().lower().replace("-", "_")
    key = _ALIASES.get(key, key)
    if key not in _MAKERS:
        raise ConfigError(f"unknown tool-call parser {name!r}; {nearest(key, parser_names())}")
    return _MAKERS[key]()


__all__ = [
    "ArgumentsDelta",
    "CallStart",
    "ContentDelta",
    "ParsedTools",
    "ToolCall",
    "ToolEvent",
    "ToolParser",
    "ToolStream",
    "gather",
    "parser_for",
    "parser_names",
]
