"""Agreement of sparse prefill with dense prefill on a real text, for docs/sparse-prefill.md.

    python scripts/prefill_agreement.py [MODEL]

Each setting prefills the same pieces of Python's own documentation, then the pieces' next tokens
are fed one by one (`sparseengine eval agree` does the same, an engine per method).
"""

from __future__ import annotations

import sys
from typing import Any

from sparseengine import LLM
from sparseengine.console import table
from sparseengine.evals.agree import pieces_of, read_text, run_case
from sparseengine.evals.options import Case

PROMPT, PLACES, TEXTS = 3072, 64, 2
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a_shape", {"window": 768}),
    ("minference", {"vertical": 256, "slash": 512}),
    ("xattention", {"threshold": 0.8}),
    ("xattention", {"threshold": 0.9}),
    ("xattention", {"threshold": 0.9, "stride": 16}),
    ("flexprefill", {"gamma": 0.9, "min_budget": 256}),
)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    cases = [Case(method="full")]
    for prefill, knobs in SETTINGS:
        cases.append(
            Case(method="full", prefill=prefill, prefill_knobs={"min_tokens": 1024, **knobs})
        )
    cases.append(Case(method="snapkv", budget=0.25))
    cases.append(
        Case(
            method="snapkv",
            budget=0.25,
            prefill="xattention",
            prefill_knobs={"min_tokens": 1024, "threshold": 0.9},
        )
    )
    rows, dense = [], []
    with LLM(model, enable_methods="full,snapkv", quiet=True) as llm:
        pieces = pieces_of(llm, read_text(None), TEXTS, PROMPT + PLACES + 1)
        for case in cases:
            row, _, logits = run_case(llm, case, pieces, PROMPT, dense)
            dense = dense or logits
            knobs = {k: v for k, v in case.prefill_knobs.items() if k != "min_tokens"}
            rows.append(
                {
                    "method": case.label,
                    "knobs": ", ".join(f"{k}={v}" for k, v in knobs.items()),
                    "read": row["prefill_density"],
                    "KL": row["kl_mean"],
                    "top-1": row["top1_agreement"],
                    "ppl": row["perplexity"],
                    "dense ppl": row["dense_perplexity"],
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
