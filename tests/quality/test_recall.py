"""Eviction and selection on trained checkpoints, which have something real to lose.

tests/data/recall holds small models (scripts/train_recall.py) that look up values in a text. With
16 pairs hidden in 192 tokens and a budget of a quarter of them, every method is measured twice:

    seen    the question ends the prompt, and is asked again behind what the method kept
    later   the prompt is the text alone; questions follow on what the method kept
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.recall import ASK, QUESTION, make_recall
from sparseengine.core.params import SparseParams
from sparseengine.core.specs import LayerKind
from sparseengine.errors import UnsupportedError
from sparseengine.evals.forced import forced_logits
from sparseengine.llm import LLM
from sparseengine.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "recall"
MODELS = ("gqa", "moe", "mla", "window")
CONTEXT, PAIRS, RATIO = 192, 16, 0.25
TEXTS, QUESTIONS = 24, 4


@dataclass(frozen=True, slots=True)
class Accuracy:
    seen: float
    later: float


def knobs_of(model: str, name: str) -> dict[str, Any]:
    """What suits models of few layers and short texts, where the defaults do not."""
    known = {f.name: f.default for f in fields(METHODS.get(name).config_class)}
    knobs: dict[str, Any] = {k: 8 for k in ("recent", "window") if (known.get(k) or 0) > 8}
    if "dense_layers" in known:
        knobs["dense_layers"] = 0
    if "skip_layers" in known:
        knobs["skip_layers"] = ()
    if "filter_layers" in known:  # the last layer alone looks up
        config = json.loads((FOLDER / model / "config.json").read_text())
        knobs["filter_layers"] = (config["num_hidden_layers"] - 1,)
    if "scorer" in known:  # the scorer's own
        knobs["window"] = 8
    return knobs


def measure(model: str, name: str) -> Accuracy | None:
    """None where the method cannot run on the model."""
    takes = METHODS.get(name).traits.takes != "none"
    knobs = knobs_of(model, name)
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


# At least (seen, later) on every checkpoint. With the question in the window nothing that matters
# is lost; without it only scores that do not ask the last queries keep what is asked for later.
KEEPS = {
    "snapkv": (0.9, 0.2),
    "adakv": (0.9, 0.2),
    "tova": (0.8, 0.0),
    "kvzip": (0.95, 0.75),
    "rkv": (0.75, 0.6),
    "keydiff": (0.3, 0.5),
    "double_sparsity": (0.95, 0.85),
    "omnikv": (0.9, 0.85),
}
ASKS_LAST_QUERIES = ("snapkv", "tova")
CONTROLS = ("random", "streaming_llm")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(model: str) -> dict[str, Accuracy]:
    return measure_all(model)


def test_dense_recalls(found: dict[str, Accuracy]) -> None:
    assert min(found["full"].seen, found["full"].later) >= 0.95


def test_controls_lose_what_they_drop(found: dict[str, Accuracy]) -> None:
    """A quarter at random, or none in the middle: the checkpoints have something to lose."""
    for name in CONTROLS:
        assert max(found[name].seen, found[name].later) <= 0.4, name


@pytest.mark.parametrize("name", KEEPS)
def test_a_method_keeps_what_it_should(found: dict[str, Accuracy], name: str) -> None:
    if name not in found:
        assert METHODS.get(name).traits.kinds == {LayerKind.FULL}, "it acts on latent layers, too"
        return
    seen, later = KEEPS[name]
    assert found[name].seen >= seen
    assert found[name].later >= later
    best = max(found[control].seen for control in CONTROLS)
    assert found[name].seen >= best + 0.1


def test_the_last_queries_do_not_know_later_questions(found: dict[str, Accuracy]) -> None:
    for name in ASKS_LAST_QUERIES:
        assert found[name].later <= found[name].seen - 0.2, name


def test_the_published_figures_are_these(model: str, found: dict[str, Accuracy]) -> None:
    """After a change that means to change them: python scripts/recall_table.py."""
    lines = (ROOT / "docs" / "results" / "recall.jsonl").read_text().splitlines()
    published = {row["method"]: row[model] for row in map(json.loads, lines) if model in row}
    for name in found.keys() & published.keys():
        measured = [found[name].seen, found[name].later]
        assert measured == pytest.approx(published[name], abs=0.13), name


def test_every_method_was_measured(found: dict[str, Accuracy]) -> None:
    """Those left out act on no layer of the checkpoint."""
    assert set(METHODS) - set(found) <= {
        name for name in METHODS if LayerKind.LATENT not in METHODS.get(name).traits.kinds
    }
