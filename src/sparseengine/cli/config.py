"""`sparseengine config show|explain`: every value, its source and what lost."""

from __future__ import annotations

import argparse
from typing import Any

from sparseengine.config import BY_KEYWORD, PARAMS
from sparseengine.console import (
    add_engine_arguments,
    add_server_arguments,
    engine_config,
    print_json,
    server_values,
    table,
)
from sparseengine.errors import ConfigError, nearest
from sparseengine.provenance import Value
from sparseengine.server_params import SERVER_BY_KEYWORD, SERVER_PARAMS, shown

_BY_PATH = {p.path: p for p in (*PARAMS, *SERVER_PARAMS)}


class Config:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=("show", "explain"), help="all values, or one")
        parser.add_argument("name", nargs="?", help="with explain: a flag or a section.name")
        parser.add_argument("--json", action="store_true", help="JSON instead of text")
        add_engine_arguments(parser, positional_model=False)
        add_server_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        origins = dict(engine_config(args).origins)
        for name, value in server_values(args).items():
            origins[SERVER_BY_KEYWORD[name].path] = shown(name, value)
        if args.action == "show":
            rows = [_row(path, origins[path]) for path in _BY_PATH]
            if args.json:
                print_json(rows)
            else:
                print(table([{**r, "value": repr(r["value"])} for r in rows]))
            return 0
        path = _path(args.name)
        if args.json:
            print_json({**_row(path, origins[path]), "doc": _BY_PATH[path].doc})
        else:
            print(f"{path} ({_BY_PATH[path].flag}): {_BY_PATH[path].doc}")
            print(f"  in force: {origins[path]}")
        return 0


def _path(name: str | None) -> str:
    if name is None:
        raise ConfigError("config explain needs a name, e.g. max-model-len")
    key = name.lstrip("-").replace("-", "_")
    if key in _BY_PATH:
        return key
    known = {**BY_KEYWORD, **SERVER_BY_KEYWORD}
    if key not in known:
        raise ConfigError(f"unknown parameter {name!r}; {nearest(key, known)}")
    return known[key].path


def _row(path: str, value: Value) -> dict[str, Any]:
    lost = [f"{g.value!r} from {g.origin}" for g in value.shadowed]
    return {
        "name": path,
        "value": value.value,
        "source": str(value.source),
        "origin": value.origin,
        "over": "; ".join(lost) or None,
    }


COMMAND = Config()
