"""Decode steps from fixed addresses: what a captured graph would run, run again on the CPU.

A CUDA graph replays device work over buffers whose addresses it holds. Here the same work is run
anew from the same buffers, with host facts (plan, lengths) that belong to the made-up step: code
that still looks at the real step, or an input that is not loaded, changes tokens.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from fixtures.engines import VOCAB, save_checkpoint
from fixtures.rerun import rerun_of
from sparseengine.cache.manager import PagedCache
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.view import Keep
from sparseengine.engine import graphs as graphs_module
from sparseengine.engine.graphs import len_buckets, row_buckets
from sparseengine.engine.intake import RECENT
from sparseengine.llm import LLM
from sparseengine.methods import METHODS
from sparseengine.methods.h2o import H2O

INTERVALS = {"h2o": {"interval": 3}, "rkv": {"interval": 3}, "skipkv": {"interval": 3}}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


def open_llm(folder: Path, *, graphs: bool, methods: tuple[str, ...], **options: object) -> LLM:
    llm = LLM(
        str(folder),
        quiet=True,
        attention_backend="reference",
        enable_methods=methods,
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=False,  # the same prompts twice make the same steps
        **{"kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 128, **options},
    )
    if graphs:
        llm.engine.runner.graphs = rerun_of(llm)
    return llm


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    sizes = (150, 33, 90, 120, 61)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in sizes]


def tokens(llm: LLM, sampling: SamplingParams, sparse: SparseParams | list[SparseParams]) -> list:
    outputs = llm.generate(prompts(), sampling, sparse, use_tqdm=False)
    return [[c.token_ids for c in o.outputs] for o in outputs]


@pytest.fixture(autouse=True)
def _packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedCache, "_walks_packed", lambda self, step: step.is_decode)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_replayed_while_nothing_outgrows_its_budget(
    folder: Path, method: str
) -> None:
    takes = METHODS.get(method).traits.takes
    sparse = SparseParams(method) if takes == "none" else SparseParams(method, budget=400)
    found = []
    for graphs in (False, True):
        with open_llm(folder, graphs=graphs, methods=(method,)) as llm:
            found.append(tokens(llm, GREEDY, sparse))
            replays = llm.engine.runner.num_replays
    assert found[0] == found[1]
    assert replays >= 15


@pytest.mark.parametrize("method", METHODS)
def test_replayed_steps_give_the_tokens_of_eager_ones(folder: Path, method: str) -> None:
    takes = METHODS.get(method).traits.takes
    sparse = SparseParams(method) if takes == "none" else SparseParams(method, budget=64)
    found, replays = [], []
    for graphs in (False, True):
        with open_llm(folder, graphs=graphs, methods=(method,)) as llm:
            found.append(tokens(llm, GREEDY, sparse))
            replays.append(llm.engine.runner.num_replays)
            cache = llm.engine.scheduler.cache
            cache.check()
            assert cache.free_pages() == cache.total_pages()
    assert found[0] == found[1]
    assert replays[0] == 0
    assert replays[1] >= 15


def test_methods_that_act_at_the_end_of_the_prompt_share_replays(folder: Path) -> None:
    sparse = [
        SparseParams("snapkv", budget=40),
        SparseParams("full"),
        SparseParams("adakv", budget=50),
    ]
    sparse += [SparseParams("keydiff", budget=33), SparseParams("snapkv", ratio=0.5)]
    methods = ("full", "snapkv", "adakv", "keydiff")
    found = []
    for graphs in (False, True):
        with open_llm(folder, graphs=graphs, methods=methods) as llm:
            found.append(tokens(llm, GREEDY, sparse))
            replays = llm.engine.runner.num_replays
    assert found[0] == found[1]
    assert replays >= 15


@pytest.mark.parametrize("acting", ["quest", "h2o", "rkv", "skipkv", "tova"])
def test_one_method_acts_in_a_replay_and_the_others_are_let_be(folder: Path, acting: str) -> None:
    """Budgets of theirs that are smaller than rows, siblings that share pages, none at all."""
    own = SparseParams(acting, budget=40, **INTERVALS.get(acting, {}))
    others = [SparseParams("snapkv", budget=30), SparseParams("full"), SparseParams("adakv")]
    sparse = [own, *others, own]
    options = {"sparse_method": acting, "sparse_config": INTERVALS.get(acting, {})}
    sampling = SamplingParams(temperature=0, n=2, max_tokens=20, ignore_eos=True)
    found = []
    for graphs in (False, True):
        methods = (acting, "snapkv", "full", "adakv")
        with open_llm(folder, graphs=graphs, methods=methods, **options) as llm:
            found.append(tokens(llm, sampling, sparse))
            replays = llm.engine.runner.num_replays
            cache = llm.engine.scheduler.cache
            cache.check()
            assert cache.free_pages() == cache.total_pages()
    assert found[0] == found[1]
    assert replays >= 15


def test_budgets_of_a_selecting_method_may_differ_in_a_replay(folder: Path) -> None:
    sparse = [SparseParams("quest", budget=b) for b in (48, 64, 1000, 80, 48)]
    found = []
    for graphs in (False, True):
        with open_llm(folder, graphs=graphs, methods=("quest",)) as llm:
            found.append(tokens(llm, GREEDY, sparse))
            replays = llm.engine.runner.num_replays
    assert found[0] == found[1]
    assert replays >= 15


@pytest.mark.parametrize("knobs", [{}, {"average": True, "decay": 0.9}], ids=str)
@pytest.mark.parametrize("interval", [1, 5])
def test_rows_are_cut_between_replays(
    folder: Path, interval: int, knobs: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what replays have gathered. Some of the requests are never cut."""
    knobs = {"interval": interval, **knobs}
    sparse = [SparseParams("h2o", budget=b, **knobs) for b in (24, 90, 40, 1000, 24)]
    sampling = SamplingParams(temperature=0, n=2, max_tokens=30, ignore_eos=True)
    retain, scores = H2O.retain, []

    def spy(self: H2O, found: torch.Tensor, lens: torch.Tensor, budget: int) -> torch.Tensor:
        scores[-1].append(found)
        return retain(self, found, lens, budget)

    monkeypatch.setattr(H2O, "retain", spy)
    found = []
    for graphs in (False, True):
        options = {"sparse_method": "h2o", "sparse_config": knobs}
        scores.append([])
        with open_llm(folder, graphs=graphs, methods=("h2o",), **options) as llm:
            found.append(tokens(llm, sampling, sparse))
            replays = llm.engine.runner.num_replays
            cache = llm.engine.scheduler.cache
            cache.check()
            assert cache.free_pages() == cache.total_pages()
    assert found[0] == found[1]
    assert replays >= 20
    assert len(scores[0]) == len(scores[1]) > 10
    for eager, replayed in zip(*scores, strict=True):
        torch.testing.assert_close(eager, replayed, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("tova", {}),
        ("tova", {"burst": 6, "sink": 2}),
        ("tova", {"burst": 2, "kv_error": 0.2}),
        ("rkv", {"interval": 3, "kv_error": 0.2}),
        ("rkv", {"interval": 1, "window": 3}),
        ("rkv", {"interval": 7, "allocate": "adakv"}),
        ("skipkv", {"interval": 1, "segment": 5, "likeness": -1.0}),
        ("skipkv", {"interval": 6, "segment": 5, "likeness": 0.3}),
        ("duo_attention", {"sink": 8}),
        ("streaming_llm", {"page_aligned": False}),
    ],
    ids=str,
)
def test_replays_keep_what_eager_steps_keep(
    folder: Path, method: str, knobs: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by cut, with siblings, requests that are never cut, and rows that are cut first later."""
    own = {k: v for k, v in knobs.items() if k not in ("allocate", "kv_error")}
    sparse = [SparseParams(method, budget=b, **knobs) for b in (24, 98, 40, 1000, 64)]
    sampling = SamplingParams(temperature=0, n=2, max_tokens=40, ignore_eos=True)
    apply, cuts = PagedCache.apply, []

    def spy(self: PagedCache, keeps: list[Keep]) -> None:
        cuts[-1].extend((k.request, k.layer, [m.tolist() for m in k.masks]) for k in keeps)
        apply(self, keeps)

    monkeypatch.setattr(PagedCache, "apply", spy)
    found = []
    for graphs in (False, True):
        options = {"sparse_method": method, "sparse_config": own}
        cuts.append([])
        with open_llm(folder, graphs=graphs, methods=(method,), **options) as llm:
            found.append(tokens(llm, sampling, sparse))
            replays = llm.engine.runner.num_replays
            cache = llm.engine.scheduler.cache
            cache.check()
            assert cache.free_pages() == cache.total_pages()
    assert found[0] == found[1]
    assert replays >= 35
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) > 10


@pytest.mark.parametrize(
    ("method", "budget", "knobs"),
    [
        ("snapkv", 60, {"allocate": "page_quanta", "allocate_scope": "model"}),
        ("kvzip", 60, {"allocate": "page_quanta", "chunk": 64}),
        ("h2o", 64, {"interval": 5}),
        ("rkv", 64, {"interval": 5}),
        ("tova", 64, {}),
        ("streaming_llm", 80, {"block_tokens": 64}),
        ("streaming_llm", 80, {"block_tokens": 64, "pos_shift": True}),
        ("duo_attention", 80, {"block_tokens": 64, "sink": 16}),
        ("keydiff", 80, {"interval": 4, "recent": 8}),
    ],
    ids=[
        "snapkv-pages",
        "kvzip-pages",
        "h2o-in-bursts",
        "rkv-in-bursts",
        "tova",
        "streaming",
        "shifted",
        "duo",
        "keydiff",
    ],
)
def test_pipelines_are_replayed_with_the_tokens_of_eager_steps(
    folder: Path, method: str, budget: int, knobs: dict[str, object]
) -> None:
    """Evicted and selected, selected alone (a large budget) and neither, in one batch."""
    read = {"select": "quest", "select_tokens": 48, "select_config": {"dense_layers": 0}}
    sparse = [
        SparseParams(method, budget=b, **knobs, **read) for b in (budget, 400, budget, 90, 70)
    ]
    found, replays = [], []
    for graphs in (False, True):
        with open_llm(folder, graphs=graphs, methods=(method, "quest")) as llm:
            found.append(tokens(llm, GREEDY, sparse))
            replays.append(llm.engine.runner.num_replays)
            cache = llm.engine.scheduler.cache
            cache.check()
            assert cache.free_pages() == cache.total_pages()
    assert found[0] == found[1]
    assert replays[0] == 0
    assert replays[1] >= 15


def test_rows_that_differ_by_layer_are_cut_behind_replays(folder: Path) -> None:
    """The longest row is a dense layer's; what is cut goes by the others."""
    knobs = {"dense_layers": 1, "block_tokens": 64, "pos_shift": True}
    options = {"sparse_method": "streaming_llm", "sparse_config": knobs}
    found = []
    for graphs in (False, True):
        with open_llm(folder, graphs=graphs, methods=("streaming_llm",), **options) as llm:
            found.append(tokens(llm, GREEDY, SparseParams("streaming_llm", budget=64, **knobs)))
            replays = llm.engine.runner.num_replays
    assert found[0] == found[1]
    assert replays >= 15


def test_sampling_forks_and_preemptions_among_replays(folder: Path) -> None:
    sampling = SamplingParams(
        temperature=0.8, seed=3, n=2, max_tokens=16, ignore_eos=True, logprobs=2
    )
    found = []
    for graphs in (False, True):
        tight = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 24}
        with open_llm(folder, graphs=graphs, methods=("snapkv",), **tight) as llm:
            found.append(tokens(llm, sampling, SparseParams("snapkv", budget=64)))
            metrics, replays = llm.engine.metrics(), llm.engine.runner.num_replays
    assert found[0] == found[1]
    assert replays > 0
    assert metrics["request_success_length"] == 10


def test_steps_that_must_run_eagerly_do(folder: Path) -> None:
    with open_llm(folder, graphs=True, methods=("quest", "h2o", "full")) as llm:
        mixed = [SparseParams("quest", budget=48), SparseParams("h2o", budget=24)]
        llm.generate(prompts()[:2], GREEDY, mixed, use_tqdm=False)
        assert llm.engine.runner.num_replays == 0, "two methods act while decoding"
        assert llm.engine.metrics()["route_fallback_decode_graph"] > 0
        recorded = SparseParams("full", record=True)
        llm.generate(prompts()[:2], GREEDY, recorded, use_tqdm=False)
        assert llm.engine.runner.num_replays == 0, "records are written by the host"


def test_graphs_go_with_the_instance_they_were_captured_with(folder: Path) -> None:
    """They may read what it held; requests with new knobs push it out of the table."""
    first = SparseParams("quest", budget=48)
    with open_llm(folder, graphs=True, methods=("full", "quest")) as llm:
        before = tokens(llm, GREEDY, first)
        graphs, table = llm.engine.runner.graphs, llm.engine.intake.methods
        assert graphs is not None
        assert llm.engine.metrics()["route_fallback_decode_graph"] == 0
        owned = [k for k in graphs._graphs if k.method]
        assert owned
        kept = [graphs._graphs[k].hidden for k in owned]
        for i in range(2 * RECENT):
            table.resolve(SparseParams("quest", budget=48, min_pages=4 + i), 9)
        tokens(llm, GREEDY, SparseParams("full"))  # whatever remembered the last step
        gc.collect()
        assert "quest" not in table.instances
        assert tokens(llm, GREEDY, first) == before
        assert [k for k in graphs._graphs if k.method] == owned
        assert not any(graphs._graphs[k].hidden is h for k, h in zip(owned, kept, strict=True))


def test_ever_new_budgets_do_not_add_graphs_without_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used ones go, with their memory; those captured at start stay."""
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 3)

    def ask(llm: LLM, budget: int) -> list[int]:
        sparse = SparseParams("quest", budget=budget)
        (output,) = llm.generate(prompts()[:1], GREEDY, sparse, use_tqdm=False)
        return output.outputs[0].token_ids

    budgets = (48, 64, 80, 48, 96, 112, 48)
    with open_llm(folder, graphs=False, methods=("full", "quest")) as llm:
        eager = [ask(llm, budget) for budget in budgets]
    with open_llm(folder, graphs=True, methods=("full", "quest")) as llm:
        graphs = llm.engine.runner.graphs
        assert graphs is not None
        graphs.warm_up()
        lasting = dict(graphs._graphs)
        assert len(lasting) == graphs.num_captured == len(row_buckets(8))
        hidden = {}
        for budget, expected in zip(budgets, eager, strict=True):
            assert ask(llm, budget) == expected
            (key,) = [k for k in graphs._graphs if k.budget == budget]
            hidden[budget] = weakref.ref(graphs._graphs[key].hidden)
            assert graphs.num_captured <= len(lasting) + 3
        assert all(graphs._graphs[k] is lasting[k] for k in lasting)
        gc.collect()
        alive = {budget for budget, tensor in hidden.items() if tensor() is not None}
        assert alive == {96, 112, 48}, "64 and 80 were used longest ago"


def test_a_new_address_of_the_tables_drops_the_graphs(folder: Path) -> None:
    with open_llm(folder, graphs=True, methods=("full",)) as llm:
        before = tokens(llm, GREEDY, SparseParams("full"))
        graphs = llm.engine.runner.graphs
        assert graphs is not None
        captured = graphs.num_captured
        assert captured > 0
        cache = llm.engine.scheduler.cache
        assert isinstance(cache, PagedCache)
        version = cache.static_version
        for group in cache.groups:
            group._make_mirror(group.mirror.numel())
            group.rows.tables._replaced = True
        assert cache.static_version > version
        assert tokens(llm, GREEDY, SparseParams("full")) == before
        assert graphs.num_captured == captured


def test_buckets_cover_every_size() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert row_buckets(320)[-2:] == [288, 320]
    assert len_buckets(2000) == [2000]
    assert len_buckets(40960) == [4096, 8192, 16384, 32768, 40960]
