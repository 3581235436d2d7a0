"""`eval agree`: how far a method's next-token distributions are from dense attention's.

The prompt is a piece of a real text, and the next tokens of that text are fed one by one, whatever
the model would have said (teacher forcing). Each is a decode step of the engine on the cache that
the method left, so evictions and selections act as they do when generating. Compared are the whole
distributions that decode steps give, with those of dense attention at the same places; the one that
ends the prefill is left out, since most methods have done nothing by then.

    KL      mean over the places of sum_t p(t) (log p(t) - log q(t)), p dense, q the method, in nats
    top-1   part of the places where both have the same likeliest token
    ppl     exp of the mean negative log-probability of the text's own next tokens

    dropped mean over the places of the attention that evicted tokens would have had, as their
            digests estimate it; of methods that are given {"dropped_mass": true}

KL and top-1 say what a method changes, perplexity whether it hurts. The default text is the
reference documentation that Python brings along (its checksum is in the output); --text FILE takes
another. Bytes are measured on the first text, as by `eval needle`.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseengine.console import note, positive
from sparseengine.errors import ConfigError, RequestError
from sparseengine.evals.chart import Point, draw
from sparseengine.evals.journal import Journal
from sparseengine.evals.options import (
    Case,
    add_eval_arguments,
    cases_of,
    engines,
    finish,
    leave_out,
    mib,
    settings_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from sparseengine.engine.record import SparseOutput
    from sparseengine.llm import LLM

FOOTNOTE = (
    "KL in nats from dense, mean and 99th percentile; top-1: same likeliest token as dense; "
    "resident and read/step: MiB of KV, prefill: part of its block pairs that a pattern read, "
    "measured on the first text; dropped: estimated attention to evicted tokens, where asked for"
)


class Agree:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--input-len",
            type=positive,
            default=1024,
            metavar="N",
            help="tokens of a prompt [default: 1024]",
        )
        parser.add_argument(
            "--output-len",
            type=positive,
            default=64,
            metavar="N",
            help="places compared behind each prompt [default: 64]",
        )
        parser.add_argument(
            "--text", metavar="FILE", help="a long text [default: Python's own documentation]"
        )
        add_eval_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from sparseengine.report import make_folder

        text = read_text(args.text)
        cases = cases_of(args)
        folder = None if args.output is None else make_folder(args.output)
        facts = {
            **settings_of(args),
            "input_len": args.input_len,
            "output_len": args.output_len,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        journal = Journal(folder, facts, resume=args.resume)
        dense: list[Tensor] = []
        skipped: dict[str, str] = {}
        is_open = [c for c in cases if key_of(c) not in journal]
        # what dense gives is not in the journal: it runs first, whenever anything does
        todo = [cases[0], *(c for c in is_open if c is not cases[0])] if is_open else []
        for llm, group in engines(args, todo, skipped):
            pieces = pieces_of(llm, text, args.num_texts, args.input_len + args.output_len + 1)
            for case in group:
                note(f"running {case.label} ...")
                try:
                    row, samples, logits = run_case(llm, case, pieces, args.input_len, dense)
                except RequestError as error:
                    leave_out(args, case, error, skipped, case.label)
                    continue
                dense = dense or logits
                if key_of(case) not in journal:
                    journal.add(key_of(case), row, samples)
        rows, raw = journal.take([key_of(case) for case in cases])
        info = {**facts, "skipped": skipped}
        finish("agree", folder, info, raw, rows, [shown(row) for row in rows], FOOTNOTE)
        if folder is not None:
            points = [point(row) for row in rows]
            draw(folder / "plot.svg", points, quality="KL from dense, nats", log=True)
        return 0


def key_of(case: Case) -> dict[str, Any]:
    return {"method": case.name, "budget": case.budget}


def point(row: dict[str, Any]) -> Point:
    tokens = row["stored_tokens"]
    return Point(
        panel=f"{row['prompt_tokens']} tokens",
        method=row["method"],
        resident=row["resident_bytes"] / tokens,
        read=row["bytes_read_per_step"] / tokens,
        quality=row["kl_mean"],
    )


def read_text(path: str | None) -> str:
    """The file's text, or the documentation of Python. Raises `ConfigError`."""
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise ConfigError("this Python brings no documentation; give --text FILE") from None
        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--text {path} is not UTF-8 text") from None


def pieces_of(llm: LLM, text: str, num_texts: int, size: int) -> list[list[int]]:
    """`num_texts` disjoint pieces of `size` tokens, spread evenly; a BOS in front if usual."""
    tokenizer = llm.tokenizer
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    bos = tokenizer.bos_token_id
    head = [bos] if bos is not None and list(tokenizer.encode(""))[:1] == [bos] else []
    own = size - len(head)
    if len(ids) < num_texts * own:
        raise ConfigError(
            f"the text has {len(ids)} tokens, but {num_texts} pieces of {own} are needed; give a "
            "longer --text, or lower --num-texts or --input-len"
        )
    starts = [i * (len(ids) // num_texts) for i in range(num_texts)]
    return [head + ids[start : start + own] for start in starts]


def run_case(
    llm: LLM, case: Case, pieces: Sequence[list[int]], prompt_len: int, dense: Sequence[Tensor]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Tensor]]:
    """(row, a sample for each piece, the logits). Without `dense` the case is its own reference."""
    from sparseengine.evals.forced import compare, forced_logits, summary

    sparse = [case.params(record=i == 0) for i in range(len(pieces))]
    logits, records = forced_logits(llm, pieces, prompt_len, sparse)
    seen = records[0]
    assert seen is not None, "the first piece is recorded"
    places = [
        compare(p, q, piece[prompt_len + 1 :])
        for p, q, piece in zip(dense or logits, logits, pieces, strict=True)
    ]
    samples = [{**key_of(case), "text": i, **place.to_dict()} for i, place in enumerate(places)]
    reads = seen.bytes_read_per_step
    row = {
        **key_of(case),
        "prompt_tokens": prompt_len,
        "budget_tokens": seen.budget if seen.found_budget is None else seen.found_budget,
        **summary(places),
        "stored_tokens": len(pieces[0]) - 1,
        "resident_bytes": seen.resident_bytes,
        "bytes_read_per_step": sum(reads) / len(reads),
        "prefill_density": seen.prefill_density,
        "dropped_mass": dropped_mass(records),
    }
    return row, samples, logits


def dropped_mass(records: Sequence[SparseOutput | None]) -> float | None:
    """Mean over the decode steps of all texts; None where nobody asked for it."""
    steps = [s.mean for r in records if r is not None for s in r.dropped_mass or ()]
    return sum(steps) / len(steps) if steps else None


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the table has it."""
    return {
        "method": row["method"],
        "budget": None if row["budget"] is None else str(row["budget"]),
        "places": row["places"],
        "KL": row["kl_mean"],
        "KL p99": row["kl_p99"],
        "top-1": row["top1_agreement"],
        "ppl": row["perplexity"],
        "dense ppl": row["dense_perplexity"],
        "resident": mib(row["resident_bytes"]),
        "read/step": mib(row["bytes_read_per_step"]),
        "prefill": row["prefill_density"],
        "dropped": row.get("dropped_mass"),
    }


COMMAND = Agree()
