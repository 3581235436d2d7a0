"""`sparseengine chat MODEL`: a conversation in the terminal, streamed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparseengine.console import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    given_engine_flags,
    given_sampling,
    note,
    sampling_params,
    sparse_params,
)
from sparseengine.errors import RequestError

if TYPE_CHECKING:
    from sparseengine.core.params import SamplingParams, SparseParams
    from sparseengine.llm import LLM

HELP = "/reset forgets the conversation, /quit (or end of input) leaves"


class Chat:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--system", metavar="TEXT", help="a system message")
        parser.add_argument(
            "--base-url", metavar="URL", help="talk to a running server instead of loading a model"
        )
        parser.add_argument("--api-key", metavar="KEY", help="with --base-url: the server's key")
        add_sampling_arguments(parser, skip=("n",), max_tokens=512, temperature=0.0)
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        start = [{"role": "system", "content": args.system}] if args.system else []
        if args.base_url is not None:
            return self._run_remote(args, start)
        config = engine_config(args)
        sampling, sparse = sampling_params(args), sparse_params(config)
        from sparseengine.llm import LLM

        with LLM.from_config(config) as llm:
            note(HELP)
            talk(lambda messages: answer_one(llm, sampling, sparse, messages), start)
        return 0

    def _run_remote(self, args: argparse.Namespace, start: list[dict[str, str]]) -> int:
        """Sampling flags go along with every message; engine flags are the server's own."""
        from sparseengine.cli.remote import RemoteChat

        if args.model_positional is not None or given_engine_flags(args):
            raise RequestError("--base-url talks to a server: it takes no model or engine flags")
        remote = RemoteChat(args.base_url, args.api_key, given_sampling(args))
        note(f"{remote.model} at {args.base_url}; {HELP}")
        talk(remote.answer, start)
        remote.close()
        return 0


def talk(answer_to: Callable[[list[dict[str, str]]], str], start: list[dict[str, str]]) -> None:
    """Read lines until the input ends; one that cannot be answered is dropped with the reason."""
    messages = list(start)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            messages = list(start)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = answer_to(messages)
        except RequestError as error:
            note(f"error: {error}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def answer_one(
    llm: LLM, sampling: SamplingParams, sparse: SparseParams, messages: list[dict[str, str]]
) -> str:
    """Print the answer as it grows; Ctrl-C ends it early and keeps what there is."""
    shown = ""
    try:
        for output in llm.stream_chat(messages, sampling, sparse):
            answer = output.outputs[0]
            sys.stdout.write(answer.text[len(shown) :])
            sys.stdout.flush()
            shown = answer.text
            if answer.finish_reason == "error":
                note(f"\nerror: {answer.stop_reason}")
    except KeyboardInterrupt:
        note(" (stopped)")
    print(flush=True)
    return shown


COMMAND = Chat()
