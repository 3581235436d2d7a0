"""`sparseengine pull NAME`: fetch a model that has a short name."""

from __future__ import annotations

import argparse
import sys

from sparseengine import env
from sparseengine.console import note


class Pull:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", help="a model's short name; without it, list them")
        parser.add_argument("--quiet", action="store_true", help="no progress bar")

    def run(self, args: argparse.Namespace) -> int:
        env.warn_unknown()  # commands with a configuration warn when they read it
        from sparseengine.weights.hub import PULLABLE, locate, pull

        if args.name is None:
            for name in PULLABLE:
                print(f"{name}  {locate(name) or 'not pulled'}")
            return 0
        known = locate(args.name)
        folder = pull(args.name, progress=not args.quiet and sys.stderr.isatty())
        note("already there" if known else "fetched and verified")
        print(folder)
        return 0


COMMAND = Pull()
