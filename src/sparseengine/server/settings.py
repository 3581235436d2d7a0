"""What the HTTP side of `serve` may be told, apart from the engine's parameters."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from sparseengine import env
from sparseengine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Names, access, limits and times of a server. Times are seconds."""

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


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    d = ServerSettings()
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default=d.host, help=f"address to listen on [default: {d.host}]")
    add("--port", type=int, default=d.port, help="port; 0 takes a free one [default: 8000]")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use; the first one is shown [default: the model's]",
    )
    add(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="keys that clients must send (or SPARSEENGINE_API_KEY); none: anyone may ask",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins of web pages that may call the server [default: none]",
    )
    add("--chat-template", metavar="FILE", help="a Jinja chat template, or its text")
    add("--tool-call-parser", metavar="NAME", help="how the model writes tool calls, e.g. hermes")
    add(
        "--enable-auto-tool-choice",
        action="store_true",
        help="as vLLM's; --tool-call-parser alone is enough",
    )
    add("--reasoning-parser", metavar="NAME", help="how the model marks its reasoning, e.g. qwen3")
    _add_limits(group, d)


_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("max_queue", int, "completions that may wait beside those that run; more get 429"),
    ("max_n", int, "most answers per prompt"),
    ("max_stop", int, "most stop strings per request"),
    ("max_body_bytes", int, "largest request body"),
    ("health_timeout", float, "/health says 503 when the engine stands still for so many seconds"),
    ("drain_timeout", float, "seconds that running requests have to end after SIGTERM"),
    ("client_timeout", float, "seconds after which a client that neither sends nor reads is cut"),
)


def _add_limits(group: argparse._ArgumentGroup, d: ServerSettings) -> None:
    add = group.add_argument
    for name, kind, doc in _NUMBERS:
        default = getattr(d, name)
        text = f"{doc} [default: {default:g}]" if kind is float else f"{doc} [default: {default}]"
        flag = "--" + name.replace("_", "-")
        add(flag, type=kind, default=default, metavar="N", help=text)
    add(
        "--log-requests",
        action="store_true",
        help="log every request's parameters, with lengths in place of texts",
    )
    add("--log-text", action="store_true", help="with --log-requests: log the texts, too")
    add(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=d.access_log,
        help="one JSON line per request on standard error",
    )


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings behind the flags. Raises `ConfigError`."""
    for name, low in (("max_queue", 0), ("max_n", 1), ("max_stop", 0), ("max_body_bytes", 1)):
        if getattr(args, name) < low:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)} is not allowed; it must be >= {low}")
    for name in ("health_timeout", "drain_timeout", "client_timeout"):
        value = getattr(args, name)
        if not 0 < value < 1e9:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} is not allowed; it must be seconds above 0")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port} is not allowed; it must be in [0, 65535]")
    if args.log_text and not args.log_requests:
        raise ConfigError("--log-text adds texts to --log-requests: give that, too")
    if args.enable_auto_tool_choice and args.tool_call_parser is None:
        raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser NAME")
    _check_parsers(args)
    keys = [k for k in (*args.api_key, env.api_key()) if k]
    return ServerSettings(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name),
        api_keys=tuple(keys),
        allowed_origins=tuple(args.allowed_origins),
        chat_template=_template(args.chat_template),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        max_queue=args.max_queue,
        max_n=args.max_n,
        max_stop=args.max_stop,
        max_body_bytes=args.max_body_bytes,
        health_timeout=args.health_timeout,
        drain_timeout=args.drain_timeout,
        client_timeout=args.client_timeout,
        log_requests=args.log_requests,
        log_text=args.log_text,
        access_log=args.access_log,
    )


def _check_parsers(args: argparse.Namespace) -> None:
    """Unknown parsers are found before a model is loaded."""
    from sparseengine.server.reasoning import splitter_for
    from sparseengine.server.tools import parser_for

    if args.tool_call_parser is not None:
        parser_for(args.tool_call_parser)
    if args.reasoning_parser is not None:
        splitter_for(args.reasoning_parser)


def _template(given: str | None) -> str | None:
    """The text of a template: a file's, or `given` itself when it holds Jinja marks."""
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given}: cannot be read: {error}") from None
