"""`sparseengine COMMAND ...`: imports only the command asked for; our errors become status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from sparseengine.errors import SparseEngineError, nearest
from sparseengine.registry import Registry

COMMANDS = Registry(
    "command",
    {
        "pull": "sparseengine.cli.pull:COMMAND",
        "generate": "sparseengine.cli.generate:COMMAND",
        "serve": "sparseengine.server.command:COMMAND",
        "chat": "sparseengine.cli.chat:COMMAND",
        "demo": "sparseengine.cli.demo:COMMAND",
        "methods": "sparseengine.cli.methods:COMMAND",
        "models": "sparseengine.cli.models:COMMAND",
        "explain": "sparseengine.cli.explain:COMMAND",
        "calibrate": "sparseengine.evals.calibrate:COMMAND",
        "config": "sparseengine.cli.config:COMMAND",
        "doctor": "sparseengine.cli.doctor:COMMAND",
        "bench throughput": "sparseengine.bench.throughput:COMMAND",
        "bench scale": "sparseengine.bench.scale:COMMAND",
        "bench capacity": "sparseengine.bench.capacity:COMMAND",
        "bench memory": "sparseengine.bench.memory:COMMAND",
        "bench latency": "sparseengine.bench.latency:COMMAND",
        "bench serve": "sparseengine.bench.serve:COMMAND",
        "bench replay": "sparseengine.bench.latency:REPLAY",
        "bench kernels": "sparseengine.bench.kernels_command:COMMAND",
        "bench tune": "sparseengine.bench.tune_command:COMMAND",
        "eval ruler": "sparseengine.evals.ruler:COMMAND",
        "eval needle": "sparseengine.evals.needle:COMMAND",
        "eval agree": "sparseengine.evals.agree:COMMAND",
        "eval perplexity": "sparseengine.evals.perplexity:COMMAND",
    },
)
SUMMARIES = {
    "pull": "fetch a small model into the cache folder",
    "generate": "complete a prompt from -p, a file or standard input",
    "serve": "serve a model over HTTP, as OpenAI's and Anthropic's clients expect it",
    "chat": "talk to a model in the terminal",
    "demo": "find a fact in a long text, dense and with four sparse methods",
    "methods": "list the sparse methods with traits and knobs",
    "models": "list the model families, what was verified of each, and the shipped shapes",
    "explain": "show what would run for a model and a method, and why",
    "calibrate": "measure on a model what a method would otherwise assume, into a file",
    "config": "show or explain the values in force and where they come from",
    "doctor": "what works on this machine and how many requests fit",
    "bench throughput": "measure prefill and decode, always beside our own dense run",
    "bench scale": "measure decode steps against batch and against context, as two plots",
    "bench capacity": "compute how many requests each method admits, and what tables cost",
    "bench memory": "check the start-up memory table against what is really held",
    "bench latency": "measure waiting times of requests that arrive at a rate",
    "bench serve": "measure waiting times of a running server's clients",
    "bench replay": "measure waiting times of a trace of requests",
    "bench kernels": "measure every kernel on this GPU against what it must move",
    "bench tune": "measure launch shapes of kernels on this GPU, for --tuning-file",
    "eval ruler": "long texts with questions: retrieval, tracing, counting, in three protocols",
    "eval needle": "find a number in a long text, by method, budget, length and depth",
    "eval agree": "measure how far a method's next-token distributions are from dense ones",
    "eval perplexity": "read a long text under a method: perplexity by ranges of the text",
}


class Command(Protocol):
    """One subcommand. `run` returns the exit status."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def usage() -> str:
    width = max(map(len, SUMMARIES))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in SUMMARIES.items()]
    return "\n".join(
        [
            "usage: sparseengine COMMAND [options]",
            "",
            "A sparse-first LLM inference engine.",
            "",
            "commands:",
            *lines,
            "",
            "`sparseengine COMMAND --help` explains one; --version prints the version.",
        ]
    )


def split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Command name (one or two words) and its arguments. Raises `UsageError` if unknown."""
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    if argv[0] in groups:
        known = [name.split()[1] for name in COMMANDS if name.startswith(f"{argv[0]} ")]
        if len(argv) > 1 and argv[1] in known:
            return f"{argv[0]} {argv[1]}", list(argv[2:])
        word = argv[1] if len(argv) > 1 else ""
        raise UsageError(f"{argv[0]} needs one of: {', '.join(known)}, not {word!r}")
    if argv[0] not in COMMANDS:
        raise UsageError(f"unknown command {argv[0]!r}; {nearest(argv[0], COMMANDS)}")
    return argv[0], list(argv[1:])


class UsageError(SparseEngineError):
    """The command line names no command."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of one command; importing it must not import torch."""
    parser = argparse.ArgumentParser(
        prog=f"sparseengine {name}", description=SUMMARIES[name] + ".", allow_abbrev=False
    )
    COMMANDS.get(name).add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 2: bad input (one paragraph on stderr); 130: interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        from sparseengine import __version__

        print(f"sparseengine {__version__}")
        return 0
    name = ""
    try:
        name, rest = split(words)
        return int(COMMANDS.get(name).run(parser_of(name).parse_args(rest)))
    except SparseEngineError as error:
        command = f"sparseengine {name}".strip()
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (| head): nobody is left to tell, and Python's own flush must not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
