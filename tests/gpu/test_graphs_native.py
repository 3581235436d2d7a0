"""Captured decode steps on a CUDA device, run ahead of the host: the tokens of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fixtures.engines import BOS, EOS, VOCAB, make_tokenizer, save_checkpoint
from fixtures.tiny_latent import save_latent
from sparseengine import LLM, SamplingParams, SparseParams
from sparseengine.methods import METHODS, RUNS, kind_matrix

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BESIDE = ("quest", "h2o", "rkv", "skipkv", "tova")  # may act where the others do nothing
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = {
    "logprobs": SamplingParams(
        temperature=0.8, seed=5, n=2, max_tokens=12, ignore_eos=True, logprobs=1
    ),
    "whole": SamplingParams(temperature=1.0, seed=6, max_tokens=24, ignore_eos=True),
    "truncated": SamplingParams(
        temperature=1.3, seed=7, top_k=40, top_p=0.9, min_p=0.01, max_tokens=24, ignore_eos=True
    ),
}


def _latent(folder: Path) -> Path:
    save_latent(folder, "glm4_moe_lite", vocab_size=VOCAB, bos_token_id=BOS, eos_token_id=EOS)
    make_tokenizer().save_pretrained(folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: save_checkpoint(folder, "llama", head_dim=32),
    "gemma3": lambda folder: save_checkpoint(folder, "gemma3"),
    "latent-and-experts": _latent,
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    sizes = (257, 300, 33, 200, 411)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in sizes]


def always_replays(sparse: list[SparseParams]) -> bool:
    """Others replay the steps in which they have nothing to do."""
    traits = [METHODS.get(p.method).traits for p in sparse]
    return all(t.graph_safe or not t.decode_hooks for t in traits)


def mixtures(methods: list[str]) -> list[list[SparseParams]]:
    """Every method alone, then those that do nothing while decoding in one batch, then one that
    does something beside them."""
    alone = []
    for name in methods:
        takes = METHODS.get(name).traits.takes
        alone.append(SparseParams(name) if takes == "none" else SparseParams(name, budget=64))
    quiet = [p for p in alone if not METHODS.get(p.method).traits.decode_hooks]
    mixed = [quiet[i % len(quiet)] for i in range(len(prompts()))]
    beside = [[p, *mixed[1:-1], p] for p in alone if p.method in BESIDE]
    return [*([p] * len(prompts()) for p in alone), mixed, *beside]


@pytest.mark.parametrize("model", MODELS)
def test_replay_equals_eager_for_every_method(tmp_path: Path, model: str) -> None:
    folder = MODELS[model](tmp_path)
    kinds = ("LATENT",) if model == "latent-and-experts" else ("FULL", "WINDOW")
    methods = [m for m, row in kind_matrix().items() if RUNS in [row[kind] for kind in kinds]]
    found = {}
    for eager in (True, False):
        with LLM(
            str(folder),
            device="cuda",
            dtype="float32",
            enforce_eager=eager,
            async_scheduling=not eager,
            enable_methods=tuple(methods),
            kv_cache_memory_bytes=1 << 28,
            max_num_batched_tokens=256,
            max_num_seqs=12,
            quiet=True,
        ) as llm:
            runner, tokens = llm.engine.runner, []
            for sparse in mixtures(methods):
                before = runner.num_replays
                outputs = llm.generate(prompts(), GREEDY, sparse, use_tqdm=False)
                tokens.append([o.outputs[0].token_ids for o in outputs])
                replays = runner.num_replays - before
                assert replays == 0 or not eager
                assert eager or replays >= 20 or not always_replays(sparse), sparse[0].method
            for sampling in DRAWN.values():
                before = runner.num_replays
                drawn = llm.generate(prompts(), sampling, use_tqdm=False)
                tokens.append([c.token_ids for o in drawn for c in o.outputs])
                assert (runner.num_replays > before) == (not eager)
            found[eager] = tokens
            cache = llm.engine.scheduler.cache
            cache.check()
            assert cache.free_pages() == cache.total_pages()
    for name, eager_tokens, replayed in zip(
        [*methods, "mixed", *(f"{m} beside others" for m in methods if m in BESIDE), *DRAWN],
        found[True],
        found[False],
        strict=True,
    ):
        assert eager_tokens == replayed, name
