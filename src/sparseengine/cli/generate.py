"""`sparseengine generate MODEL -p TEXT`: complete prompts from flags, a file or standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseengine.console import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    note,
    print_json,
    sampling_params,
    sparse_params,
)
from sparseengine.errors import RequestError

if TYPE_CHECKING:
    from sparseengine.engine.outputs import CompletionOutput, RequestOutput
    from sparseengine.llm import LLM


class Generate:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-p", "--prompt", action="append", metavar="TEXT", help="a prompt (several: a batch)"
        )
        parser.add_argument("--prompt-file", metavar="FILE", help="a file that holds the prompt")
        parser.add_argument(
            "--prompt-token-ids", metavar="IDS", help="a prompt as token ids joined by commas"
        )
        parser.add_argument(
            "--chat", action="store_true", help="send the prompt through the chat template"
        )
        parser.add_argument("--json", action="store_true", help="JSON instead of the text")
        parser.add_argument(
            "--record",
            action="store_true",
            help="with --json: which positions were kept and read, and the bytes",
        )
        parser.add_argument("--quiet", action="store_true", help="no memory table on stderr")
        add_sampling_arguments(parser, max_tokens=128, temperature=0.0)
        add_engine_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        if args.record and not args.json:
            raise RequestError("--record prints what was kept as JSON: give --json, too")
        config = engine_config(args)
        sampling = sampling_params(args)
        sparse = sparse_params(config, record=args.record)
        prompts = read_prompts(args)
        from sparseengine.llm import LLM

        with LLM.from_config(config, quiet=args.quiet or args.json) as llm:
            if args.chat:
                outputs = llm.chat(
                    [[{"role": "user", "content": p}] for p in prompts],
                    sampling,
                    sparse,
                    use_tqdm=False,
                )
            else:
                outputs = llm.generate(prompts, sampling, sparse, use_tqdm=False)
            if args.json:
                print_json([as_json(o, llm) for o in outputs])
            else:
                print("\n\n".join(c.text for o in outputs for c in o.outputs))
        return report_failures(outputs)


def report_failures(outputs: Sequence[RequestOutput]) -> int:
    """The exit status: 1 if a request ended with an error, which stderr then names."""
    failed = [
        (number, c.stop_reason)
        for number, output in enumerate(outputs, 1)
        for c in output.outputs
        if c.finish_reason == "error"
    ]
    for number, reason in failed:
        note(f"error: prompt {number} of {len(outputs)} ended: {reason}")
    return 1 if failed else 0


def read_prompts(args: argparse.Namespace) -> list[Any]:
    """The prompts of -p, --prompt-file, --prompt-token-ids, or else of standard input."""
    if args.prompt_token_ids is not None:
        if args.chat:
            raise RequestError("--chat needs text, not --prompt-token-ids")
        try:
            return [[int(part) for part in args.prompt_token_ids.split(",")]]
        except ValueError:
            raise RequestError(
                f"--prompt-token-ids {args.prompt_token_ids!r} is not a list such as 1,2,3"
            ) from None
    prompts = list(args.prompt or ())
    try:
        if args.prompt_file is not None:
            prompts.append(Path(args.prompt_file).read_text(encoding="utf-8"))
        elif not prompts:
            if sys.stdin.isatty():
                raise RequestError("no prompt: give -p TEXT, --prompt-file, or pipe text in")
            prompts.append(sys.stdin.read())
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompt cannot be read: {error}") from None
    for prompt in prompts:
        if not prompt:
            raise RequestError("the prompt is empty; it must hold at least one token")
    return prompts


def as_json(output: RequestOutput, llm: LLM) -> dict[str, Any]:
    """One request as JSON-ready data."""
    metrics = output.metrics
    timing = None
    if metrics is not None and metrics.first_token_time and metrics.finished_time:
        timing = {
            "first_token_s": metrics.first_token_time - metrics.arrival_time,
            "total_s": metrics.finished_time - metrics.arrival_time,
        }
    return {
        "model": llm.resolved.source.name,
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(c.token_ids) for c in output.outputs),
        "outputs": [_completion(c) for c in output.outputs],
        "prompt_logprobs": output.prompt_logprobs
        and [_logprobs(p) for p in output.prompt_logprobs],
        "timing": timing,
    }


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": logprobs and [_logprobs(p) for p in logprobs],
        "sparse": completion.sparse and asdict(completion.sparse),
    }


def _logprobs(found: Any) -> Any:
    return found and {str(token): p._asdict() for token, p in found.items()}


COMMAND = Generate()
