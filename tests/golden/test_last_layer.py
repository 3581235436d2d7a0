"""The last layer runs for the tokens that are read only, and says of them what it always says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures import tiny, tiny_latent
from fixtures.engines import save_checkpoint
from golden import test_logits_moe as moe
from golden.paged import PagedRun, paged_logits
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.view import BlockMask
from sparseengine.llm import LLM

TOLERANCE = 5e-6
SAVE: dict[str, Callable[[Path, str], Path]] = {
    **dict.fromkeys(tiny.FAMILIES, tiny.save_tiny),
    **dict.fromkeys(tiny_latent.FAMILIES, tiny_latent.save_latent),
    **dict.fromkeys(moe.FAMILIES, moe.save_tiny),
}
# Chunks of two prompts, the first of which decodes in the second step, and what is read of them.
STEPS: list[tuple[dict[int, int], list[int]]] = [
    ({0: 7, 1: 20}, [1, 1]),
    ({0: 1, 1: 150, 2: 140, 3: 1}, [1, 1, 140, 1]),
    ({0: 1, 1: 9, 2: 3}, [1, 9, 1]),
]


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 100, (length,), generator=generator).tolist()


@contextmanager
def rows_of(layers: Sequence[nn.Module]) -> Iterator[list[list[int]]]:
    """Rows that reach each layer's feed-forward block, one list of steps per layer."""
    seen: list[list[int]] = [[] for _ in layers]

    def watch(rows: list[int]) -> Callable[..., None]:
        return lambda module, args: rows.append(len(args[0]))

    handles = [
        layer.mlp.register_forward_pre_hook(watch(rows))
        for layer, rows in zip(layers, seen, strict=True)
    ]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("backend", ["reference", "cpu", "deterministic"])
@pytest.mark.parametrize("family", SAVE)
def test_wanted_tokens_say_what_they_say_among_all(
    family: str, backend: str, tmp_path: Path
) -> None:
    folder = SAVE[family](tmp_path, family)
    whole, few = (
        PagedRun(folder, max_tokens=200, backend=backend, prompts=(7, 179, 143, 1))
        for _ in range(2)
    )
    with rows_of(few.model.model.layers) as seen:
        for sizes, counts in STEPS:
            chunks = {i: prompt(n) for i, n in sizes.items()}
            expected = whole.hidden(chunks)
            found = few.hidden(chunks, counts=counts)
            for all_rows, rows, n in zip(expected, found, counts, strict=True):
                assert rows.shape == (n, all_rows.shape[1])
                torch.testing.assert_close(rows, all_rows[-n:], rtol=TOLERANCE, atol=TOLERANCE)
    *others, last = seen
    assert others == [[sum(sizes.values()) for sizes, _ in STEPS]] * len(others)
    assert last == [sum(counts) for _, counts in STEPS]


def test_queries_of_the_other_tokens_are_not_attended(tmp_path: Path) -> None:
    """Backends get the wanted queries at the last layer, and every layer stores all keys."""
    run = PagedRun(tiny.save_tiny(tmp_path), max_tokens=64, prompts=(40, 20))
    asked: list[tuple[int, tuple[int, ...], int]] = []
    backend = run.runner.backends[0]
    original = backend.run

    def watch(q: Tensor, view: Any, layer: Any, scores: Any) -> Tensor:
        asked.append((len(q), tuple(view.cu_q.tolist()), int(view.segments[0].lens.max())))
        return original(q, view, layer, scores)

    backend.run = watch  # type: ignore[method-assign]
    run.hidden({0: prompt(40), 1: prompt(20)}, counts=[1, 20])
    assert asked == [(60, (0, 40, 60), 40)] * 2 + [(21, (0, 1, 21), 40)]


def test_chunks_with_a_block_mask_are_read_through_it(tmp_path: Path) -> None:
    """A mask is of a whole chunk: all its queries are attended, then the wanted rows taken."""
    folder = tiny.save_tiny(tmp_path)
    found = {}
    for is_masked, counts in ((False, None), (True, None), (True, [1, 1])):
        run = PagedRun(folder, max_tokens=64, prompts=(40, 20))
        blocks = torch.eye(3, dtype=torch.bool)[None]
        blocks[..., 0] = True
        masks = {0: BlockMask(blocks, 16)} if is_masked else {}
        run.controller.prefill_masks = lambda at, masks=masks: masks  # type: ignore[method-assign]
        hidden = run.hidden({0: prompt(40), 1: prompt(20)}, counts=counts)
        found[is_masked, counts is None] = torch.stack([rows[-1] for rows in hidden])
    torch.testing.assert_close(
        found[True, False], found[True, True], rtol=TOLERANCE, atol=TOLERANCE
    )
    assert (found[True, True] - found[False, True])[0].abs().max() > 100 * TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("last") / "model")


def test_an_engine_computes_what_it_reads(folder: Path) -> None:
    """Prompt log-probabilities beside requests without: both are what whole passes say."""
    ids, other = prompt(50), prompt(33)
    plain = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False}
    with LLM(str(folder), quiet=True, max_num_batched_tokens=32, **options) as llm:
        with rows_of(llm.engine.runner.model.model.layers) as seen:
            alone = llm.generate([other], [plain], use_tqdm=False)[0]
        assert seen[0] == [32, 1, 1, 1]
        assert seen[-1] == [1, 1, 1, 1]
        with rows_of(llm.engine.runner.model.model.layers) as seen:
            found, beside = llm.generate([ids, other], [scored, plain], use_tqdm=False)
        assert sum(seen[-1]) < sum(seen[0])
        assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    logits = paged_logits(folder, ids, (50,)).log_softmax(-1)
    assert found.prompt_logprobs is not None
    for row, (token, given) in enumerate(zip(ids[1:], found.prompt_logprobs[1:], strict=True)):
        assert given[token].logprob == pytest.approx(logits[row, token].item(), abs=1e-4)
    logits = paged_logits(folder, other, (33,))[-1].log_softmax(-1)
    (first,) = alone.outputs[0].logprobs[0].values()
    assert first.logprob == pytest.approx(logits.max().item(), abs=1e-4)


def test_methods_that_look_at_the_output_get_all_of_it(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 32}
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    sparse = SparseParams("skipkv", budget=24)
    with (
        LLM(str(folder), quiet=True, enable_methods=["skipkv"], **options) as llm,
        rows_of(llm.engine.runner.model.model.layers) as seen,
    ):
        llm.generate([prompt(40)], sampling, sparse, use_tqdm=False)
    assert seen[-1] == seen[0] == [32, 8, 1]
