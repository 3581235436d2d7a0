"""Method x kind of attention, cell by cell, on tiny models that transformers wrote.

The cells follow from traits: a method runs on a model that has a layer of a kind it acts on, and is
refused, with the reason, on one that has none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import BOS, EOS, VOCAB, make_tokenizer, save_checkpoint
from fixtures.tiny_latent import save_latent
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.specs import LayerKind
from sparseengine.engine.record import SparseOutput
from sparseengine.errors import UnsupportedError
from sparseengine.llm import LLM
from sparseengine.methods import METHODS, RUNS, kind_matrix

NEW, LONG, BUDGET = 8, 150, 48
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 8 << 20,
    "quiet": True,
}
KNOBS: dict[str, dict[str, Any]] = {  # every layer of a tiny model is acted on; budgets are exact
    "knorm": {"skip_layers": ()},
    "kvzip": {"form": "uniform"},
    "pyramidkv": {"beta": 1},
    "quest": {"dense_layers": 0},
    "infllm": {"dense_layers": 0, "min_pages": 3},
    "double_sparsity": {"dense_layers": 0},
    "streaming_llm": {"block_tokens": 0, "page_aligned": False},
    "duo_attention": {"retrieval": 0.0, "block_tokens": 0, "page_aligned": False},
}


def _latent(folder: Path) -> Path:
    save_latent(folder, "glm4_moe_lite", vocab_size=VOCAB, bos_token_id=BOS, eos_token_id=EOS)
    make_tokenizer().save_pretrained(folder)
    return folder


FILTERS = {("omnikv", "full"): (0, 1), ("omnikv", "latent"): (0, 1)}  # they choose for layer 2

# name: (the kinds of its layers, what writes its checkpoint)
MODELS: dict[str, tuple[tuple[LayerKind, ...], Callable[[Path], Path]]] = {
    "full": ((LayerKind.FULL,) * 3, lambda folder: save_checkpoint(folder, "llama")),
    "window": ((LayerKind.WINDOW,) * 3, lambda folder: save_checkpoint(folder, "mistral")),
    "hybrid": (
        (LayerKind.WINDOW, LayerKind.WINDOW, LayerKind.FULL),
        lambda folder: save_checkpoint(folder, "gemma3"),
    ),
    "latent": ((LayerKind.LATENT,) * 3, _latent),
}
MATRIX = kind_matrix()


def runs(method: str, model: str) -> bool:
    return any(MATRIX[method][kind.name] == RUNS for kind in MODELS[model][0])


CELLS = [(method, model) for method in METHODS for model in MODELS]
RUNNING = [cell for cell in CELLS if runs(*cell)]
REFUSED = [cell for cell in CELLS if not runs(*cell)]


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (LONG, 20, 90)]


def sparse(method: str, budget: int) -> SparseParams:
    if METHODS.get(method).traits.takes == "none":
        return SparseParams(method, record=True)
    return SparseParams(method, budget=budget, record=True, **KNOBS.get(method, {}))


@pytest.fixture(scope="module", params=MODELS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LLM, list[list[int]]]]:
    """(model, an engine with every method that runs on it, its dense tokens)."""
    model = str(request.param)
    folder = MODELS[model][1](tmp_path_factory.mktemp(model))
    methods = tuple(method for method in METHODS if runs(method, model))
    with LLM(str(folder), enable_methods=methods, **OPTIONS) as llm:
        dense = llm.generate(prompts(), GREEDY, SparseParams("full"), use_tqdm=False)
        yield model, llm, [o.outputs[0].token_ids for o in dense]


def test_models_are_what_they_are_called(loaded: tuple[str, LLM, list[list[int]]]) -> None:
    model, llm, _ = loaded
    assert tuple(layer.kind for layer in llm.resolved.spec.layers) == MODELS[model][0]


@pytest.mark.parametrize("method", METHODS)
def test_cells_that_run(method: str, loaded: tuple[str, LLM, list[list[int]]]) -> None:
    model, llm, dense = loaded
    if (method, model) in REFUSED:
        assert all(MATRIX[method][kind.name] != RUNS for kind in MODELS[model][0])
        return
    cache = llm.engine.scheduler.cache
    generous = llm.generate(prompts(), GREEDY, sparse(method, LONG + NEW), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in generous] == dense
    assert cache.free_pages() == cache.total_pages(), "pages leak"
    outputs = llm.generate(prompts(), GREEDY, sparse(method, BUDGET), use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == NEW for o in outputs)
    assert cache.free_pages() == cache.total_pages(), "pages leak"
    cache.check()
    if METHODS.get(method).traits.takes == "none":
        assert [o.outputs[0].token_ids for o in outputs] == dense
        return
    for length, output in zip((LONG, 20, 90), outputs, strict=True):
        found = output.outputs[0].sparse
        assert found is not None
        for layer, kind in enumerate(MODELS[model][0]):
            if layer in FILTERS.get((method, model), ()):
                assert all(layer not in read.positions for read in found.reads)
                continue
            check_layer(method, kind, found, layer, length)


def check_layer(method: str, kind: LayerKind, found: SparseOutput, layer: int, length: int) -> None:
    """Rows, or reads, shrink to the budget on layers that are acted on, and on no others."""
    acts = MATRIX[method][kind.name] == RUNS
    family = METHODS.get(method).traits.family
    if family == "selection":
        for read in found.reads:
            if not acts or length < BUDGET:
                assert layer not in read.positions
            elif read.position >= length:
                for row in read.positions[layer]:
                    assert 0 < len(row) <= BUDGET
        return
    assert family == "eviction"
    rows = found.retained[0].positions.get(layer)
    if not acts:
        assert rows is None or all(set(row) <= set(range(length)) for row in rows)
        return
    assert rows is not None
    mean = sum(len(row) for row in rows) / len(rows)
    assert mean == min(length, BUDGET)
    assert all(row == sorted(set(row)) and row[-1] < length for row in rows)


@pytest.mark.parametrize(("method", "model"), REFUSED)
def test_cells_that_are_refused(method: str, model: str, tmp_path: Path) -> None:
    """With the reason that the matrix gives."""
    kinds, save = MODELS[model]
    acts = MATRIX[method][kinds[0].name].partition(";")[0]
    with pytest.raises(UnsupportedError, match="cannot run on this model") as caught:
        LLM(str(save(tmp_path)), enable_methods=(method,), **OPTIONS)
    (reason,) = caught.value.reasons
    assert reason == f"{acts}; the model has {kinds[0].name} layers only"


def test_the_matrix_follows_from_traits() -> None:
    assert set(MATRIX) == set(METHODS)
    for method, row in MATRIX.items():
        kinds = METHODS.get(method).traits.kinds
        assert set(row) == {"FULL", "WINDOW", "LATENT"}
        for kind, cell in row.items():
            assert (cell == RUNS) == (LayerKind[kind] in kinds)
            assert cell == RUNS or cell.endswith(f"{kind} layers stay dense")
    assert ("adakv", "latent") in REFUSED
    assert {model for _, model in RUNNING} == set(MODELS)
