"""`sparseengine config show|explain`: every value, its source and what lost."""

from __future__ import annotations

import argparse
from typing import Any

from sparseengine.config import BY_KEYWORD, BY_PATH, PARAMS
from sparseengine.console import add_engine_arguments, engine_config, print_json, table
from sparseengine.errors import ConfigError, nearest
from sparseengine.provenance import Value


class Config:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("action", choices=("show", "explain"), help="all values, or one")
        parser.add_argument("name", nargs="?", help="with explain: a flag or a section.name")
        parser.add_argument("--json", action="store_true", help="JSON instead of text")
        add_engine_arguments(parser, positional_model=False)

    def run(self, args: argparse.Namespace) -> int:
        origins = engine_config(args).origins
        if args.action == "show":
            rows = [_row(p.path, origins[p.path]) for p in PARAMS]
            if args.json:
                print_json(rows)
            else:
                print(table([{**r, "value": repr(r["value"])} for r in rows]))
            return 0
        path = _path(args.name)
        if args.json:
            print_json({**_row(path, origins[path]), "doc": BY_PATH[path].doc})
        else:
            print(f"{path} ({BY_PATH[path].flag}): {BY_PATH[path].doc}")
            print(f"  in force: {origins[path]}")
        return 0


def _path(name: str | None) -> str:
    if name is None:
        raise ConfigError("config explain needs a name, e.g. max-model-len")
    key = name.lstrip("-").replace("-", "_")
    if key in BY_PATH:
        return key
    if key not in BY_KEYWORD:
        raise ConfigError(f"unknown parameter {name!r}; {nearest(key, BY_KEYWORD)}")
    return BY_KEYWORD[key].path


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
