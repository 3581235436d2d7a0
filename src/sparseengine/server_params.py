"""Parameters of `serve` beside the engine's: one table for flags, the config file and `config`.

They stand in the same --config file as the engine's, at its top level or in a section `server`.
Commands other than `serve` check them and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparseengine import env
from sparseengine.errors import ConfigError, nearest
from sparseengine.provenance import Given, Param, Source, Value, at_least, pick

SECTION = "server"


def _port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else "in [0, 65535]"


def _seconds(value: float) -> str | None:
    return None if 0 < value < 1e9 else "seconds above 0"


def _param(name: str, kind: Any, default: Any, doc: str, check: Any = None) -> Param:
    flag = "--" + name.replace("_", "-")
    path = f"{SECTION}.{name}"
    return Param(path=path, flag=flag, kind=kind, default=default, doc=doc, check=check)


SERVER_PARAMS: tuple[Param, ...] = (
    _param("host", "str", "127.0.0.1", "address to listen on"),
    _param("port", "int", 8000, "port; 0 takes a free one", _port),
    _param("served_model_name", "names", (), "names that requests may use; the first is shown"),
    _param("api_key", "names", (), "keys that clients must send (or SPARSEENGINE_API_KEY)"),
    _param("allowed_origins", "names", (), "origins of web pages that may call the server"),
    _param("chat_template", "str", None, "a Jinja chat template, or its text"),
    _param("tool_call_parser", "str", None, "how the model writes tool calls, e.g. hermes"),
    _param(
        "enable_auto_tool_choice", "bool", False, "as vLLM's; --tool-call-parser alone is enough"
    ),
    _param("reasoning_parser", "str", None, "how the model marks its reasoning, e.g. qwen3"),
    _param(
        "max_queue", "int", 512,
        "completions that may wait beside those that run; more get 429", at_least(0),
    ),
    _param("max_n", "int", 64, "most answers per prompt", at_least(1)),
    _param("max_stop", "int", 16, "most stop strings per request", at_least(0)),
    _param("max_body_bytes", "size", 32 << 20, "largest request body", at_least(1)),
    _param(
        "health_timeout", "float", 60.0,
        "/health says 503 when the engine stands still for so many seconds", _seconds,
    ),
    _param(
        "drain_timeout", "float", 30.0,
        "seconds that running requests have to end after SIGTERM", _seconds,
    ),
    _param(
        "client_timeout", "float", 60.0,
        "seconds after which a client that neither sends nor reads is cut", _seconds,
    ),
    _param(
        "log_requests", "bool", False,
        "log every request's parameters, with lengths in place of texts",
    ),
    _param("log_text", "bool", False, "with --log-requests: log the texts, too"),
    _param("access_log", "bool", True, "one JSON line per request on standard error"),
    _param(
        "otlp_traces_endpoint", "str", None,
        "send a span per request there, OTLP over HTTP (extra: otel)",
    ),
)  # fmt: skip
SERVER_BY_KEYWORD: Mapping[str, Param] = {p.keyword: p for p in SERVER_PARAMS}


def is_server_key(name: str) -> bool:
    """Whether a top-level name of a config file is one of these, or their section."""
    return name == SECTION or name.replace("-", "_") in SERVER_BY_KEYWORD


def server_values_of(data: Mapping[Any, Any], file: Path) -> dict[str, tuple[Any, str]]:
    """{keyword: (checked value, origin)} of a config file's content. Raises `ConfigError`."""
    section = data.get(SECTION) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"--config {file}: {SECTION} must hold names and values")
    flat = [(str(k), v) for k, v in data.items() if k != SECTION and is_server_key(str(k))]
    found: dict[str, tuple[Any, str]] = {}
    for name, raw in [*flat, *((str(k), v) for k, v in section.items())]:
        key = name.replace("-", "_")
        if key not in SERVER_BY_KEYWORD:
            known = nearest(key, SERVER_BY_KEYWORD)
            raise ConfigError(f"unknown key {name!r} in section {SECTION} of {file}; {known}")
        if key in found:
            raise ConfigError(f"{file}: {name!r} is given twice")
        origin = f"{file}: {name}"
        found[key] = (_parse(SERVER_BY_KEYWORD[key], raw, origin), origin)
    return found


def collect_server(
    cli: Mapping[str, Any], file: str | Path | None, load: Callable[[Path], Mapping[Any, Any]]
) -> dict[str, Value]:
    """{keyword: value with its provenance}: flags, then the file, then the environment.

    cli: keywords of given flags. load: reads a config file. Raises `ConfigError`.
    """
    in_file = {} if file is None else server_values_of(load(Path(file)), Path(file))
    found = {}
    for param in SERVER_PARAMS:
        name = param.keyword
        given = [Given(param.default, Source.DEFAULT, "built in")]
        if cli.get(name) is not None:
            given.append(Given(_parse(param, cli[name], param.flag), Source.CLI, param.flag))
        if name in in_file and in_file[name][0] is not None:
            given.append(Given(in_file[name][0], Source.FILE, in_file[name][1]))
        found[name] = pick(given)
    key = env.api_key()
    if key is not None:  # one more key beside the others: nobody is locked out
        known = found["api_key"]
        found["api_key"] = Value((*known.value, key), known.source, known.origin, known.shadowed)
        if known.source is Source.DEFAULT:
            found["api_key"] = known.outrank((key,), Source.ENV, "SPARSEENGINE_API_KEY")
    return found


def shown(name: str, value: Value) -> Value:
    """The same without secrets: keys show as their number."""
    if name != "api_key":
        return value
    lost = tuple(Given(_counted(g.value), g.source, g.origin) for g in value.shadowed)
    return Value(_counted(value.value), value.source, value.origin, lost)


def _counted(keys: tuple[str, ...]) -> str:
    return f"<{len(keys)} keys>"


def _parse(param: Param, raw: Any, origin: str) -> Any:
    if param.kind == "names":
        raw = [raw] if isinstance(raw, str) else raw  # a comma may be part of a key
        if param.keyword == "api_key" and not _are_texts(raw):
            raise ConfigError(f"{origin}: it must be a text or a list of texts")  # not shown
    return param.parse(raw, origin)


def _are_texts(raw: Any) -> bool:
    return raw is None or (isinstance(raw, list) and all(isinstance(k, str) for k in raw))
