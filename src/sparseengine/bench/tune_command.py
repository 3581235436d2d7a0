"""`sparseengine bench tune`: the flags alone, for parsing them must not load torch."""

from __future__ import annotations

import argparse


class Tune:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--output",
            required=True,
            metavar="FILE",
            help="the tuning file; shapes of other devices and ops that it holds stay",
        )
        parser.add_argument(
            "--only",
            metavar="A,B",
            help="some cases instead of all: decode, prefill, latent, moe",
        )

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.bench.tune import run

        return run(args)


COMMAND = Tune()
