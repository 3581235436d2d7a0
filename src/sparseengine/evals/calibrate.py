"""`sparseengine calibrate`: measure on a model what a method would otherwise assume of it.

A few long prompts run densely while the method's calibrator watches. The text is Python's own
documentation or --text FILE; a model without a tokenizer gets random token ids. Pieces are drawn
with --seed, so a run can be repeated. The file that is written names the method and the model's
fingerprint, and the method takes it as its knob `calibration`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseengine.config import default_of
from sparseengine.console import (
    add_engine_arguments,
    engine_config,
    note,
    positive,
    print_json,
)
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError, RequestError
from sparseengine.evals.agree import read_text

if TYPE_CHECKING:
    from sparseengine.llm import LLM
    from sparseengine.methods.calibration import Calibrator

_SPARSE = (
    "sparse.method",
    "sparse.budget",
    "sparse.enable_methods",
    "sparse.prefill",
    "sparse.prefill_knobs",
)
_SHORTEST = 32


class Calibrate:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--method", required=True, metavar="NAME", help="what to calibrate")
        parser.add_argument("--output", required=True, metavar="FILE", help="the JSON to write")
        parser.add_argument(
            "--input-len",
            type=positive,
            default=1024,
            metavar="N",
            help="tokens of a text [default: 1024]",
        )
        parser.add_argument(
            "--num-texts", type=positive, default=4, metavar="N", help="texts [default: 4]"
        )
        parser.add_argument(
            "--budget",
            type=positive,
            metavar="N",
            help="tokens per row to calibrate for, at most half of a text [default: the method's, "
            "at most a quarter]",
        )
        parser.add_argument(
            "--text", metavar="FILE", help="a long text [default: Python's own documentation]"
        )
        add_engine_arguments(parser, skip=_SPARSE)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.llm import LLM
        from sparseengine.methods import METHODS, check_model
        from sparseengine.methods.calibration import CALIBRATORS, Reading, write_calibration

        method = METHODS.canonical(args.method)
        if method not in CALIBRATORS:
            raise ConfigError(
                f"method {method!r} needs no calibration; those that take one are "
                f"{', '.join(CALIBRATORS)}"
            )
        output = Path(args.output)
        if not output.parent.is_dir():
            raise ConfigError(f"--output {args.output!r}: {output.parent} is no folder")
        budget = budget_of(args, getattr(METHODS.get(method), "default_budget", None))
        dense = METHODS.canonical(default_of("sparse.method"))
        config = engine_config(args, sparse_method=dense)
        knobs = dict(config.sparse.knobs)
        config = config.with_values(
            {"sparse.knobs": {}, "sparse.budget": None, "sparse.ratio": None}
        )
        try:
            settings = METHODS.get(method).config_class.from_knobs(method, knobs)
        except RequestError as error:
            raise ConfigError(f"--sparse-config: {error}") from None
        run = {"texts": args.num_texts, "tokens": args.input_len, "budget": budget}
        with LLM.from_config(config, quiet=True) as llm:
            model = llm.resolved.spec
            check_model(METHODS.get(method)(settings, model), model)
            reading = Reading(length=args.input_len, budget=budget, settings=settings)
            calibrator = CALIBRATORS.get(method)(reading, model)
            pieces = texts_for(llm, args, repeats=calibrator.repeats)
            note(f"reading {len(pieces)} texts of {args.input_len:,} tokens ...")
            watch(llm, dense, calibrator, pieces)
            data, figures = calibrator.result()
            source = "random tokens" if llm.tokenizer is None else args.text or "documentation"
            run |= {"source": source, "seed": config.model.seed, **figures}
            write_calibration(output, method, llm.resolved.source.name, model, run, data)
        report = {"method": method, "output": str(output), "fingerprint": model.fingerprint}
        print_json({**report, **run})
        return 0


def budget_of(args: argparse.Namespace, usual: int | None) -> int:
    """Tokens per row that the calibration is for. Raises `ConfigError`."""
    if args.input_len < _SHORTEST:
        raise ConfigError(
            f"--input-len {args.input_len} is not allowed; it must be {_SHORTEST} or more"
        )
    if args.budget is None:
        return max(1, min(usual or args.input_len, args.input_len // 4))
    if args.budget > args.input_len // 2:
        raise ConfigError(
            f"--budget {args.budget} is not allowed; it must be at most half of "
            f"--input-len {args.input_len}, or little would be missed"
        )
    return int(args.budget)


def texts_for(llm: LLM, args: argparse.Namespace, *, repeats: bool) -> list[list[int]]:
    """Token ids of `num_texts` texts; repeats: the last quarter of each is its first once more.

    Raises `ConfigError` if the model does not take that many tokens or the text has too few.
    """
    length, limit = args.input_len, llm.engine.intake.max_model_len
    if length >= limit:
        raise ConfigError(
            f"--input-len {length} leaves no room for a token in max_model_len={limit}; lower it"
        )
    rng = random.Random(llm.resolved.config.model.seed)
    again = length // 4 if repeats else 0
    own = length - again
    pieces: list[list[int]]
    if llm.tokenizer is None:
        if args.text is not None:
            raise ConfigError(
                f"--text needs a tokenizer, and {llm.resolved.source.name!r} has none"
            )
        vocab = llm.resolved.spec.vocab_size
        pieces = [[rng.randrange(vocab) for _ in range(own)] for _ in range(args.num_texts)]
    else:
        text = read_text(args.text)
        ids = list(llm.tokenizer.encode(text, add_special_tokens=False, verbose=False))
        if len(ids) < own:
            raise ConfigError(
                f"the text has {len(ids)} tokens, but {own} are needed; give a longer --text or "
                "lower --input-len"
            )
        bos = llm.tokenizer.bos_token_id
        head = [bos] if bos is not None and list(llm.tokenizer.encode(""))[:1] == [bos] else []
        starts = [rng.randrange(len(ids) - own + 1) for _ in range(args.num_texts)]
        pieces = [(head + ids[start : start + own])[:own] for start in starts]
    return [piece + piece[:again] for piece in pieces]


def watch(llm: LLM, dense: str, calibrator: Calibrator, pieces: list[list[int]]) -> None:
    """Run the texts as prompts, the calibrator in the dense method's place."""
    instances: dict[str, Any] = llm.engine.intake.methods.instances
    before: Mapping[str, Any] = dict(instances)
    instances[dense] = calibrator
    try:
        llm.generate(
            pieces,
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False),
            SparseParams(dense),
            use_tqdm=False,
        )
    finally:
        instances.clear()
        instances.update(before)


COMMAND = Calibrate()
