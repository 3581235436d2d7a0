"""`sparseengine pull NAME`: fetch a model that has a short name."""

from __future__ import annotations

import argparse
import sys

from sparseengine import env
from sparseengine.console import note


class Pull:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", help="a model's short name; without it, list them")
        parser.add_argument(
            "--accept-license",
            action="store_true",
            help="you have read and accept the terms of the model (the list names them)",
        )
        parser.add_argument("--quiet", action="store_true", help="no progress bar")

    def run(self, args: argparse.Namespace) -> int:
        env.warn_unknown()  # commands with a configuration warn when they read it
        from sparseengine.weights.hub import PULLABLE, locate, pull

        if args.name is None:
            for name, entry in PULLABLE.items():
                terms = entry.licence
                shown = "" if terms is None else f"  ({terms.name}: {terms.url})"
                print(f"{name}  {locate(name) or 'not pulled'}{shown}")
            return 0
        known = locate(args.name)
        progress = not args.quiet and sys.stderr.isatty()
        folder = pull(args.name, progress=progress, accept_license=args.accept_license)
        note("already there" if known else "fetched and verified")
        terms = PULLABLE[args.name].licence
        if terms is not None:
            stored = ", ".join(file.member.rsplit("/", 1)[-1] for file in terms.files)
            note(f"licence: {terms.name}, {terms.url}; stored beside the model: {stored}")
        print(folder)
        return 0


COMMAND = Pull()
