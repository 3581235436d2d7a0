"""What the HTTP side of `serve` may be told, apart from the engine's parameters."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparseengine.console import server_values
from sparseengine.errors import ConfigError
from sparseengine.provenance import Value
from sparseengine.server.tracing import check_tracing
from sparseengine.server_params import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Names, access, limits and times of a server. Times are seconds.

    origins: where the values come from, by keyword and without secrets.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_queue: int = 512
    max_n: int = 64
    max_stop: int = 16
    max_body_bytes: int = 32 << 20
    health_timeout: float = 60.0
    drain_timeout: float = 30.0
    client_timeout: float = 60.0
    log_requests: bool = False
    log_text: bool = False
    access_log: bool = True
    otlp_traces_endpoint: str | None = None
    origins: Mapping[str, Value] = field(default_factory=dict, compare=False, repr=False)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings behind flags, --config and the environment. Raises `ConfigError`."""
    values = server_values(args)
    given = {name: value.value for name, value in values.items()}
    if given["log_text"] and not given["log_requests"]:
        raise ConfigError("--log-text adds texts to --log-requests: give that, too")
    if given.pop("enable_auto_tool_choice") and given["tool_call_parser"] is None:
        raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser NAME")
    _check_parsers(given["tool_call_parser"], given["reasoning_parser"])
    if given["otlp_traces_endpoint"] is not None:
        check_tracing(given["otlp_traces_endpoint"])
    given["chat_template"] = _template(given["chat_template"])
    given["served_model_names"] = given.pop("served_model_name")
    given["api_keys"] = given.pop("api_key")
    return ServerSettings(**given, origins={n: shown(n, v) for n, v in values.items()})


def _check_parsers(tools: str | None, reasoning: str | None) -> None:
    """Unknown parsers are found before a model is loaded."""
    from sparseengine.server.reasoning import splitter_for
    from sparseengine.server.tools import parser_for

    if tools is not None:
        parser_for(tools)
    if reasoning is not None:
        splitter_for(reasoning)


def _template(given: str | None) -> str | None:
    """The text of a template: a file's, or `given` itself when it holds Jinja marks."""
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given}: cannot be read: {error}") from None
