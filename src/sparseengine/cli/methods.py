"""`sparseengine methods`: the methods and prefill patterns of SparseParams, from the code."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from sparseengine.console import print_json, table
from sparseengine.errors import ConfigError, nearest


class Methods:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "name", nargs="?", help="one method or pattern, with its knobs explained"
        )
        parser.add_argument("--json", action="store_true", help="JSON instead of a table")

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.methods import METHODS, describe_methods
        from sparseengine.methods.knobs import STAGE_KNOBS
        from sparseengine.methods.prefill import PATTERNS, describe_patterns

        methods, patterns = describe_methods(), describe_patterns()
        rows = methods + patterns
        if args.name is not None:
            if args.name not in METHODS and args.name not in PATTERNS:
                known = nearest(args.name, [*METHODS, *PATTERNS])
                raise ConfigError(f"unknown method or prefill pattern {args.name!r}; {known}")
            is_method = args.name in METHODS  # "dense" is both
            registry, rows = (METHODS, methods) if is_method else (PATTERNS, patterns)
            rows = [row for row in rows if row["name"] == registry.canonical(args.name)]
        if args.json:
            print_json(rows)
        elif args.name is not None:
            print(detail(rows[0]))
        else:
            print(table([overview(row) for row in methods]))
            print("\nfurther stages, beside a method's knobs\n")
            print(table([{"key": name, "meaning": doc} for name, doc in STAGE_KNOBS.items()]))
            print("\nsparse prefill, with any of them\n")
            print(table([pattern_overview(row) for row in patterns]))
        return 0


def overview(row: Mapping[str, Any]) -> dict[str, Any]:
    """One method as one line of the table."""
    traits = row["traits"]
    knobs = ", ".join(f"{k['name']}={k['default']}" for k in row["knobs"])
    return {
        "method": row["name"],
        "aliases": ", ".join(row["aliases"]) or "-",
        "family": traits["family"],
        "budget": traits["takes"],
        "prefill policy": traits["prefill_policy"],
        "sharing": traits["sharing"],
        "acts on": ", ".join(traits["kinds"]),
        "knobs": knobs or "-",
    }


def pattern_overview(row: Mapping[str, Any]) -> dict[str, Any]:
    """One prefill pattern as one line of the table."""
    knobs = ", ".join(f"{k['name']}={k['default']}" for k in row["knobs"])
    return {
        "pattern": row["name"],
        "aliases": ", ".join(row["aliases"]) or "-",
        "chunking does not matter": row["traits"]["invariant"],
        "acts on": ", ".join(row["traits"]["kinds"]),
        "knobs": knobs or "-",
    }


def detail(row: Mapping[str, Any]) -> str:
    """One method: summary, traits, and what each knob means."""
    lines = [f"{row['name']}: {row['summary']}", ""]
    lines += [f"  {name}: {value}" for name, value in row["traits"].items()]
    lines += [f"  kv_error: {row['kv_error']}"] if "kv_error" in row else []
    if row["knobs"]:
        lines += ["", table(row["knobs"], ["name", "default", "doc"])]
    if row.get("presets"):
        lines += ["", 'presets, for preset="name"']
        lines += [f"  {name}: {_shown(knobs)}" for name, knobs in row["presets"].items()]
    return "\n".join(lines)


def _shown(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in knobs.items())


COMMAND = Methods()
