"""Eviction and selection on trained checkpoints, which have something real to lose.

tests/data/recall holds small models (scripts/train_recall.py) that look up values in a text. With
16 pairs hidden in 192 tokens and a budget of a quarter of them, every method is measured twice:

    seen    the question ends the prompt, and is asked again behind what the method kept
    later   the prompt is the text alone; questions follow on what the method kept
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.recall import ASK, QUESTION, make_recall
from sparseengine.core.params import SparseParams
from sparseengine.errors import UnsupportedError
from sparseengine.evals.forced import forced_logits
from sparseengine.llm import LLM
from sparseengine.methods import METHODS

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recall"
MODELS = ("gqa", "moe", "mla", "window")
CONTEXT, PAIRS, RATIO = 192, 16, 0.25
TEXTS, QUESTIONS = 12, 4


@dataclass(frozen=True, slots=True)
class Accuracy:
    seen: float
    later: float


def knobs_of(name: str) -> dict[str, Any]:
    """What suits models of few layers and short texts, where the defaults do not."""
    known = {f.name: f.default for f in fields(METHODS.get(name).config_class)}
    knobs: dict[str, Any] = {k: 8 for k in ("recent", "window") if (known.get(k) or 0) > 8}
    if "dense_layers" in known:
        knobs["dense_layers"] = 0
    if "skip_layers" in known:
        knobs["skip_layers"] = ()
    return knobs


def measure(model: str, name: str) -> Accuracy | None:
    """None where the method cannot run on the model."""
    takes = METHODS.get(name).traits.takes != "none"
    knobs = knobs_of(name)
    try:
        llm = LLM(
            str(FOLDER / model),
            quiet=True,
            kv_cache_memory_bytes="16MiB",
            dtype="float32",
            sparse_method=name,
            sparse_config=knobs,
        )
    except UnsupportedError:
        return None
    with llm:
        generator = torch.Generator().manual_seed(11)
        data = make_recall(
            generator, texts=TEXTS, pairs=PAIRS, context=CONTEXT, questions=QUESTIONS
        )
        record = [
            SparseParams(name, ratio=RATIO if takes else None, record=i == 0, **knobs)
            for i in range(TEXTS)
        ]
        # row i of the logits predicts the token at CONTEXT + 1 + i
        logits, _ = forced_logits(llm, data.ids.tolist(), CONTEXT, record)
        rows = torch.arange(3, QUESTION * QUESTIONS, QUESTION)
        answers = torch.stack(logits)[:, rows].argmax(-1)
        later = (answers == data.ids[:, data.asked + 1]).float().mean().item()
        keys, values = data.ids[:, data.asked[0]], data.ids[:, data.asked[0] + 1]
        again = torch.stack((torch.full_like(keys, ASK), keys), 1)
        pieces = torch.cat((data.ids[:, :CONTEXT], again, again, values[:, None]), 1)
        logits, _ = forced_logits(llm, pieces.tolist(), CONTEXT + 2, record)
        seen = (torch.stack(logits)[:, 1].argmax(-1) == values).float().mean().item()
    return Accuracy(seen, later)


def measure_all(model: str) -> dict[str, Accuracy]:
    found = {name: measure(model, name) for name in METHODS}
    return {name: accuracy for name, accuracy in found.items() if accuracy is not None}
