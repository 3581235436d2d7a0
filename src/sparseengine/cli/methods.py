"""`sparseengine methods`: what can be named in SparseParams, from the code."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from sparseengine.console import print_json, table


class Methods:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", help="one method, with its knobs explained")
        parser.add_argument("--json", action="store_true", help="JSON instead of a table")

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.methods import METHODS, describe_methods

        rows = describe_methods()
        if args.name is not None:
            name = METHODS.canonical(args.name)
            rows = [row for row in rows if row["name"] == name]
        if args.json:
            print_json(rows)
        elif args.name is not None:
            print(detail(rows[0]))
        else:
            print(table([overview(row) for row in rows]))
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


def detail(row: Mapping[str, Any]) -> str:
    """One method: summary, traits, and what each knob means."""
    lines = [f"{row['name']}: {row['summary']}", ""]
    lines += [f"  {name}: {value}" for name, value in row["traits"].items()]
    if row["knobs"]:
        lines += ["", table(row["knobs"], ["name", "default", "doc"])]
    return "\n".join(lines)


COMMAND = Methods()
