"""`sparseengine bench kernels`: the flags alone, for parsing them must not load torch."""

from __future__ import annotations

import argparse

from sparseengine.bench.results import add_result_arguments

NAMES = (
    "decode, latent, prefill, masked, choose, sdpa (torch's own), store, compact, scores, pages, "
    "slots, select, fused, copy_pages, moe"
)


class Kernels:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--only", metavar="A,B", help=f"some groups of ops instead of all: {NAMES}"
        )
        add_result_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.bench.kernels import run

        return run(args)


COMMAND = Kernels()
