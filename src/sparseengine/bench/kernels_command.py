"""`sparseengine bench kernels`: the flags alone, for parsing them must not load torch."""

from __future__ import annotations

import argparse


class Kernels:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true", help="leave out torch's own attention")

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.bench.kernels import report

        report(args.quick)
        return 0


COMMAND = Kernels()
