"""StreamingLLM: positions inside the cache, layers that stay dense, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import oracles
from contract.driver import PAGE, POSITIONS, Driver, make, solo
from contract.reads import drive, spec_of
from contract.test_contract import prompt
from contract.test_read_sets import steps_for
from contract.toy import Toy, toy_spec
from fixtures.engines import save_checkpoint
from sparseengine.cache.manager import PagedCache
from sparseengine.core.method import LayerStep
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.core.plan import Chunk, Purpose, StepPlan
from sparseengine.core.specs import LayerKind, LayerSpec, ModelSpec, Rotary
from sparseengine.errors import ConfigError, RequestError, UnsupportedError
from sparseengine.llm import LLM
from sparseengine.methods.streaming_llm import turned_on

NAME = "streaming_llm"
FREQ = (0.0, 1.0, 0.3, 0.05)
LENGTH, DECODES = 45, 11


def spun(x: Tensor, positions: Sequence[int], freq: Sequence[float]) -> Tensor:
    """x [L, H, D] as a model rotates it, row by row."""
    rows = zip(x, positions, strict=True)
    return torch.stack([oracles.turned(row, position, freq) for row, position in rows])


def raw(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values before any rotation, in float64; channel 0 is a key's mark."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((length, 4, 8), (length, 2, 8), (length, 2, 8))
    q, k, v = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    k[..., 0] = torch.arange(length)[:, None] / POSITIONS
    q[..., 0] = 0
    return q, k, v


def attended(
    q: Tensor, k: Tensor, v: Tensor, row: list[int], queries: range, inside: bool
) -> Tensor:
    """Outputs of `queries`, the newest of `row`, at positions in the row or in the text."""
    at = list(range(len(row))) if inside else row
    keys, values = spun(k[row], at, FREQ), v[row]
    asked = spun(q[queries.start : queries.stop], at[len(row) - len(queries) :], FREQ)
    out = []
    for i, query in enumerate(asked):
        seen = len(row) - len(queries) + i + 1
        for g in range(query.shape[0]):
            logits = keys[:seen, g // 2] @ query[g] / 8**0.5
            out.append(logits.softmax(0) @ values[:seen, g // 2])
    return torch.stack(out).view(len(asked), query.shape[0], -1)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("budget", [1, 5, 8, 13, 24])
@pytest.mark.parametrize("chunking", [None, 7, -1])
def test_every_query_and_key_is_at_its_position_inside_the_cache(
    aligned: bool, block: int, budget: int, chunking: int | None
) -> None:
    """The authors' scheme, recomputed from unrotated queries and keys."""
    sink = 3
    q, k, v = raw(LENGTH + DECODES)
    text = list(range(len(k)))
    model = spec_of(4, 2, 8, torch.float64, FREQ)
    method = make(model, NAME, sink=sink, block_tokens=block, page_aligned=aligned, pos_shift=True)
    steps = [*steps_for(LENGTH, chunking, block or None), *[1] * DECODES]
    got = drive(method, spun(q, text, FREQ), spun(k, text, FREQ), v, steps, budget, DECODES)
    kept: list[int] = []
    at = 0
    for size, out, reads in zip(steps, got.outs, got.reads, strict=True):
        row, at = [*kept, *range(at, at + size)], at + size
        assert reads == [row, row]
        expected = attended(q, k, v, row, range(at - size, at), inside=True)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        is_cut = at > LENGTH or at == LENGTH or (block and at % block == 0)
        few = oracles.streaming(len(row), budget, sink, PAGE, aligned)
        kept = [row[j] for j in few] if is_cut else row
    text_like = attended(q, k, v, row, range(at - 1, at), inside=False)
    if budget > 2 and len(row) < at:  # with room for a sink
        assert (got.outs[-1] - text_like).abs().max() > 1e-3, "the shift did nothing"


def layer_of(kind: str) -> tuple[LayerSpec, Rotary]:
    """A layer whose channel 0 does not turn, and how its keys are rotated."""
    full = LayerSpec(kind=LayerKind.FULL, q_heads=4, kv_heads=2, head_dim=12, value_dim=8)
    if kind == "partial":
        return full, Rotary(inv_freq=FREQ, factor=1.3)
    if kind == "neighbours":
        return full, Rotary(inv_freq=FREQ, interleaved=True)
    latent = LayerSpec(kind=LayerKind.LATENT, q_heads=4, kv_heads=1, head_dim=14, value_dim=8)
    return latent, Rotary(inv_freq=(1.0, 0.3, 0.05), interleaved=kind == "latent neighbours")


@pytest.mark.parametrize("kind", ["partial", "neighbours", "latent", "latent neighbours"])
def test_other_rotations_and_latent_rows(kind: str) -> None:
    """Decodes equal attention to keys moved to where the rows have no gap."""
    spec, rotary = layer_of(kind)
    model = replace(spec_of(4, 2, 8, torch.float64), layers=(spec,), rotaries=(rotary,))
    rng = torch.Generator().manual_seed(3)
    q = torch.randn(56, 4, spec.head_dim, generator=rng, dtype=torch.float64)
    k = torch.randn(56, spec.kv_heads, spec.head_dim, generator=rng, dtype=torch.float64)
    v = torch.randn(56, spec.kv_heads, 8, generator=rng, dtype=torch.float64)
    k[..., 0] = torch.arange(56)[:, None] / POSITIONS
    v = k[..., :8] if spec.kind is LayerKind.LATENT else v
    method = make(model, NAME, sink=4, block_tokens=16, pos_shift=True)
    got = drive(method, q, k, v, [16, 16, 13, *[1] * 11], 12, 11)
    order = list(range(spec.head_dim))
    begin, end = (8, 14) if spec.kind is LayerKind.LATENT else (0, 8)
    if rotary.interleaved:
        order[begin:end] = [*range(begin, end, 2), *range(begin + 1, end, 2)]
    for i in range(45, 56):
        rows = got.reads[i - 56]
        assert len(rows[0]) < i
        keys = k[: i + 1, :, order]  # pairs are half of the rotated channels apart
        moved = keys.clone()
        moved[..., begin:] = oracles.in_cache(keys[..., begin:], rows, rotary.inv_freq)
        expected = oracles.masked_attention(q[: i + 1, :, order], moved, v[: i + 1], rows)
        torch.testing.assert_close(got.outs[i - 56][0], expected, rtol=0, atol=1e-12)


def test_one_layer_goes_on_like_a_text_of_what_was_retained() -> None:
    """A layer's keys depend on token and position alone: the row is that of a shorter text."""
    tokens, budget = prompt(48), 16
    toy = Toy("f")
    driver = Driver(toy, {"m": make(toy.spec, NAME, preset="authors"), "d": make(toy.spec, "full")})
    request = driver.add(0, tokens, 9, "m", budget)
    driver.advance([request])
    for i in range(1, 9):
        row = [*range(4), *range(request.computed - (budget - 4), request.computed + 1)]
        short = driver.add(i, [request.tokens[j] for j in row], 1, "d", None)
        wanted = driver.step([driver.next_chunk(short, 100)])
        found = driver.step([driver.next_chunk(request, 100)])
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
        request.computed += 1
        request.tokens.append(int(found[0].argmax()))


def stored_keys(driver: Driver, request: int, layer: int) -> Tensor:
    """[Hkv, L, D] of a request's row, whose pages are the tables'."""
    cache = driver.cache
    assert isinstance(cache, PagedCache)
    live = driver.requests[request]
    chunk = Chunk(live, (0,), live.computed, Purpose.DECODE, False)
    cache.reserve(StepPlan((chunk,)))
    keys = cache.stored_step(layer).gather("keys", 0)[:, :-1].clone()
    cache.truncate(request, 1)
    return keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_add_up(dtype: torch.dtype) -> None:
    """After 200 evictions a sink's key is its first one, turned and rounded once."""
    toy = Toy("f")
    toy.spec = replace(toy.spec, dtype=dtype)
    driver = Driver(toy, {"m": make(toy.spec, NAME, sink=3, page_aligned=False, pos_shift=True)})
    request = driver.add(0, prompt(20), 250, "m", 20)
    driver.advance([request])
    first = stored_keys(driver, 0, 0)[:, :3]
    for _ in range(200):
        driver.advance([request])
    found = stored_keys(driver, 0, 0)[:, :3]
    inv_freq = toy.spec.rotaries[0].inv_freq
    expected = oracles.turned(first.double(), 200, inv_freq).to(dtype)
    step = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert float((found - expected).abs().max()) <= step, "more than the last rounding"


def test_siblings_copy_the_sinks_and_share_the_rest() -> None:
    """A fork's first eviction moves its own copy of the sinks, not its sibling's."""
    toy = Toy("ff")
    driver = Driver(toy, {"m": make(toy.spec, NAME, block_tokens=0, pos_shift=True)})
    parent = driver.add(0, prompt(20), 9, "m", 20)
    driver.advance([parent])
    before = stored_keys(driver, 0, 1)
    child = driver.add(1, prompt(20), 9, "m", 20)
    driver.cache.release(1)
    driver.cache.fork(0, 1)
    child.computed, child.tokens = parent.computed, list(parent.tokens)
    whole = driver.cache.total_pages() - driver.cache.free_pages()
    driver.advance([child])
    assert torch.equal(stored_keys(driver, 0, 1), before)
    assert not torch.equal(stored_keys(driver, 1, 1)[:, :4], before[:, :4])
    # one page of sinks and one new page, of two layers with two heads each
    assert driver.cache.total_pages() - driver.cache.free_pages() == whole + 2 * 4
    expected = solo("ff", NAME, prompt(20), 9, 20, block_tokens=0, pos_shift=True)
    assert driver.finish([parent, child]) == [expected] * 2


@pytest.mark.parametrize("others", [(), ("snapkv",)], ids=["shared-rows", "rows-per-head"])
def test_summaries_of_pages_follow_the_sinks(others: tuple[str, ...]) -> None:
    """quest behind it reads bounds of the keys as they are stored now."""
    toy = Toy("ff")
    read = {"select": "quest", "select_tokens": 12, "select_config": {"dense_layers": 0}}
    methods = {"m": make(toy.spec, NAME, pos_shift=True, **read)}
    driver = Driver(toy, methods | {name: make(toy.spec, name) for name in others})
    request = driver.add(0, prompt(48), 9, "m", 20)
    for _ in range(6):
        driver.advance([request])
        chunk = Chunk(request, (0,), request.computed, Purpose.DECODE, False)
        driver.cache.reserve(StepPlan((chunk,)))
        for layer in range(2):
            at = driver.cache.stored_step(layer)
            keys = at.gather("keys", 0)
            table = at.table()[0][0]
            low = at.aux("kmin")
            for h, p in ((h, p) for h in range(2) for p in range((at.lens(0)[0] - 1) // PAGE)):
                row = h if len(table) > 1 else 0
                found = low[int(table[row, p]), h if low.shape[1] > 1 else 0]
                assert torch.equal(found, keys[h, p * PAGE : (p + 1) * PAGE].amin(0))
        driver.cache.truncate(0, 1)


def test_shrink_moves_the_sinks_too_and_keeps_them_all() -> None:
    q, k, v = raw(LENGTH + 3)
    text = list(range(len(k)))
    turned_q, turned_k = spun(q, text, FREQ), spun(k, text, FREQ)
    model = spec_of(4, 2, 8, torch.float64, FREQ)

    def run(target: int) -> list[int]:
        method = make(model, NAME, sink=3, block_tokens=0, pos_shift=True)
        got = drive(method, turned_q, turned_k, v, [LENGTH, 1, 1, 1], 24, 3, shrink_to=target)
        row = got.reads[-1][0]
        expected = attended(q, k, v, row, range(LENGTH + 2, LENGTH + 3), inside=True)
        torch.testing.assert_close(got.outs[-1], expected, rtol=0, atol=1e-12)
        return row

    cut = run(12)
    assert cut == [0, 1, 2, 3, *range(LENGTH + 3 - (len(cut) - 4), LENGTH + 3)]
    assert len(cut) <= 13 < len(run(6)), "no room for the sinks' page and one more: not done"


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("limit", [1000, 7])
def test_the_first_layers_stay_dense(shift: bool, limit: int) -> None:
    toy, budget = Toy("ffl"), 16
    knobs: dict[str, Any] = {"dense_layers": 1, "block_tokens": 20, "pos_shift": shift}
    driver = Driver(toy, {"m": make(toy.spec, NAME, **knobs)})
    request = driver.add(0, prompt(48), 9, "m", budget)
    other = driver.add(1, prompt(30), 9, "m", budget)
    while request.num_generated < 5:
        driver.advance([request, other], limit)
    kept = len(oracles.streaming(request.computed, budget, 4, PAGE, True))
    assert driver.cache.lens(0, 0) == (request.computed,) * 2
    assert driver.cache.lens(0, 1) == (kept,) * 2
    assert driver.cache.lens(0, 2) == (kept,)
    driver.drop(request)
    driver.resume(request)
    expected = [solo("ffl", NAME, prompt(n), 9, budget, **knobs) for n in (48, 30)]
    assert driver.finish([request, other], limit) == expected
    demand = driver.methods["m"].demand(48, 9, budget)
    # two, two and one heads: the first layer's hold all 57 tokens, the others 17, in pages
    assert demand.steady_tokens == -(-(2 * 15 + 3 * 5) * PAGE // 5)


def test_all_layers_dense_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, num_hidden_layers=2)
    sparse = {"sparse_method": NAME, "sparse_config": {"dense_layers": 2}}
    with pytest.raises(ConfigError, match="every layer of this model dense"):
        LLM(str(folder), quiet=True, max_model_len=64, num_gpu_blocks_override=8, **sparse)


@pytest.mark.parametrize(
    ("rotaries", "why"),
    [
        ((), "does not rotate keys"),
        ((Rotary(inv_freq=(1.0,)), Rotary(inv_freq=())), "layer 1 does not rotate"),
        (
            (Rotary(inv_freq=(1.0,)), Rotary(inv_freq=(1.0,), by_length=True)),
            "rotations of layer 1 depend on the text's length",
        ),
    ],
)
def test_models_whose_keys_cannot_move_are_refused(rotaries: tuple[Rotary, ...], why: str) -> None:
    model: ModelSpec = replace(toy_spec("ff"), rotaries=rotaries)
    with pytest.raises(UnsupportedError, match=f"pos_shift=True cannot run.*{why}"):
        make(model, NAME, pos_shift=True)
    assert make(model, NAME).cache_plan()[0].aux == ()
    beside = replace(toy_spec("wf"), rotaries=(Rotary(inv_freq=()), Rotary(inv_freq=(1.0,))))
    make(beside, NAME, pos_shift=True)  # a layer that no key moves in


def test_start_up_and_requests_say_what_is_wrong(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = save_checkpoint(tmp_path, num_hidden_layers=2, rope_parameters=rope)
    options: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 8, "quiet": True}
    with pytest.raises(ConfigError, match="layer 0 depend on the text's length"):
        LLM(str(folder), sparse_method=NAME, sparse_config={"preset": "paper"}, **options)
    llm = LLM(str(folder), enable_methods=[NAME], **options)
    with pytest.raises((ConfigError, RequestError), match="depend on the text's length"):
        llm.generate({"prompt_token_ids": [4, 5]}, None, SparseParams(NAME, pos_shift=True))
    with pytest.raises(RequestError, match=r"sink=65 is not allowed with pos_shift=True.* most 64"):
        make(toy_spec("ff"), NAME, sink=65, pos_shift=True)
    make(toy_spec("ff"), NAME, sink=65)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_checkpoint(tmp_path_factory.mktemp("shift"), num_hidden_layers=2)
    return LLM(
        str(folder), max_model_len=256, quiet=True, enable_methods=[NAME, "full"],
        num_gpu_blocks_override=400, attention_backend="reference",
    )  # fmt: skip


def test_any_request_may_ask_for_it_and_records_tell_positions_of_the_text(llm: LLM) -> None:
    """The engine was started without the knob; both kinds share a batch and a prompt."""
    ids = {"prompt_token_ids": [4 + i % 40 for i in range(90)]}
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=2)
    sparse = [
        SparseParams(NAME, budget=32, block_tokens=32, pos_shift=shift, record=True)
        for shift in (False, True)
    ]
    both = llm.generate([ids, ids], sampling, sparse, use_tqdm=False)
    plain, moved = (found.outputs[0] for found in both)
    assert plain.sparse is not None
    assert moved.sparse is not None
    for a, b in zip(plain.sparse.retained, moved.sparse.retained, strict=True):
        assert a.positions == b.positions
    assert list(plain.token_ids) != list(moved.token_ids)
    again = llm.generate([ids], replace(sampling, n=1), sparse[1:], use_tqdm=False)
    siblings = [list(o.token_ids) for o in both[1].outputs]
    assert siblings == [list(again[0].outputs[0].token_ids)] * 2


def test_digests_go_with_it_and_rows_of_heads_are_shared_by_siblings(tmp_path: Path) -> None:
    """Beside a method whose heads have rows of their own; all pages come back."""
    folder = save_checkpoint(tmp_path, num_hidden_layers=2)
    ids = {"prompt_token_ids": [4 + i * i % 40 for i in range(50)]}
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, n=2)
    knobs: dict[str, Any] = {"budget": 40, "block_tokens": 0, "pos_shift": True}
    found = []
    for methods in ([NAME], [NAME, "snapkv"]):
        options: dict[str, Any] = {"enable_methods": methods, "attention_backend": "reference"}
        with LLM(
            str(folder), max_model_len=128, num_gpu_blocks_override=99, quiet=True, **options
        ) as opened:
            sparse = SparseParams(NAME, dropped_mass=True, compensate=True, **knobs)
            outs = opened.generate([ids], sampling, sparse, use_tqdm=False)[0].outputs
            assert [o.token_ids for o in outs[1:]] == [outs[0].token_ids]
            assert outs[0].sparse is not None
            assert all(0 < m.mean < 1 for m in outs[0].sparse.dropped_mass)
            cache = opened.engine.scheduler.cache
            assert cache.free_pages() == cache.total_pages()
            found.append(list(outs[0].token_ids))
    assert found[0] == found[1]


@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_presets_number_what_is_in_the_cache(preset: str) -> None:
    config = make(toy_spec("ff"), NAME, preset=preset).config
    assert (config.sink, config.pos_shift, config.page_aligned) == (4, True, False)
    assert config.block_tokens == {"paper": 1024, "authors": 0}[preset]
    assert not make(toy_spec("ff"), NAME).config.pos_shift


def test_turning_in_parts_is_turning_at_once() -> None:
    keys = torch.randn(2, 3, 8, dtype=torch.float64)
    rotary = Rotary(inv_freq=FREQ)
    parts = turned_on(turned_on(keys, rotary, 700), rotary, 323)
    torch.testing.assert_close(parts, turned_on(keys, rotary, 1023), rtol=0, atol=1e-12)
    torch.testing.assert_close(parts, oracles.turned(keys, 1023, FREQ), rtol=0, atol=1e-12)


def test_a_first_look_reads_the_first_slots_only() -> None:
    toy = Toy("f")
    driver = Driver(toy, {"m": make(toy.spec, "full")})
    request = driver.add(0, prompt(20), 4, "m", None)
    driver.advance([request])
    chunk = Chunk(request, (0,), 20, Purpose.DECODE, False)
    driver.cache.reserve(StepPlan((chunk,)))
    at: LayerStep = driver.cache.stored_step(0)
    assert torch.equal(at.gather("keys", 0, first=6), at.gather("keys", 0)[:, :6])
    assert at.gather("keys", 0, first=99).shape[1] == 21
