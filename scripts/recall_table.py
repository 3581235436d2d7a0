"""Write docs/results/recall.md and .jsonl: every method on the recall checkpoints.

`make generate` puts the figures on the page of methods. tests/quality holds the measurement.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from quality import test_recall as recall  # noqa: E402
from sparseengine.methods import METHODS  # noqa: E402

PAGE = ROOT / "docs" / "results" / "recall.md"


CONTROL = "random"


def weak(found: dict[str, dict[str, recall.Accuracy]]) -> list[str]:
    """Methods whose mean is not above the control's on the models that they run on."""

    def mean(name: str, models: list[str]) -> float:
        return sum(found[model][name].seen for model in models) / len(models)

    runs = {name: [m for m in found if name in found[m]] for name in METHODS}
    return [
        f"`{name}`"
        for name, models in runs.items()
        if models and name != CONTROL and mean(name, models) <= mean(CONTROL, models)
    ]


def main() -> int:
    torch.set_num_threads(1)
    found = {model: recall.measure_all(model) for model in recall.MODELS}
    lines = [
        "# Every method on the recall checkpoints",
        "",
        f"`python scripts/recall_table.py` writes this page. {recall.PAIRS} pairs of a key and a "
        f"value in {recall.CONTEXT} tokens, a budget of {recall.RATIO:.0%} of them (tokens kept, "
        "or read in a step). Part of the answers that are right: question seen (it ends the prompt "
        f"and is asked again; n = {recall.TEXTS}) / question later (n = "
        f"{recall.TEXTS * recall.QUESTIONS}, {recall.QUESTIONS} on a text). 95 % intervals are at "
        "most ±0.2 and ±0.1. -: the method acts on no layer of the model.",
        "",
        "Knobs are the defaults, but: `dense_layers` 0, `skip_layers` none, `recent` and `window` "
        "at most 8, `filter_layers` the last layer. The models have two to four layers and look "
        "up in the last one, so a method that gives the last layers less has a hard time, and so "
        "has one that chooses whole pages: three of twelve, the first and the last among them.",
        "",
        f"No better than {CONTROL} with the question seen, over all models: "
        f"{', '.join(weak(found))}.",
        "",
        "| method | " + " | ".join(recall.MODELS) + " |",
        "|---|" + "---|" * len(recall.MODELS),
    ]
    for name in METHODS:
        cells = []
        for model in recall.MODELS:
            one = found[model].get(name)
            cells.append("-" if one is None else f"{one.seen:.2f} / {one.later:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = {
        name: {m: [round(found[m][name].seen, 2), round(found[m][name].later, 2)] for m in runs}
        for name in METHODS
        if (runs := [m for m in recall.MODELS if name in found[m]])
    }
    text = "".join(f"{json.dumps({'method': name, **row})}\n" for name, row in rows.items())
    PAGE.with_suffix(".jsonl").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
