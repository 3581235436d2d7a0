"""DuoAttention: which heads stream, pattern files, reads in prefill, demand, and what it saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from contract import oracles
from contract.driver import PAGE, Driver, make
from contract.reads import Driven, drive, random_layer, spec_of
from contract.toy import Toy, toy_spec
from sparseengine.errors import RequestError, UnsupportedError
from sparseengine.methods import METHODS, check_model
from sparseengine.methods.duo_attention import DuoAttention, streaming_heads

NAME = "duo_attention"


def duo(kinds: str, **knobs: Any) -> DuoAttention:
    method = make(toy_spec(kinds), NAME, **knobs)
    assert isinstance(method, DuoAttention)
    return method


def save(path: Path, rows: object) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


def test_the_largest_gates_retrieve_and_ties_go_to_the_smaller_layer_then_head() -> None:
    gates = {0: (0.5, 0.1), 2: (0.9, 0.5), 3: (0.5, 0.5)}

    def retrieve(share: float) -> list[tuple[int, int]]:
        streams = streaming_heads(gates, share)
        return [(i, h) for i in gates for h in range(2) if h not in streams.get(i, ())]

    assert retrieve(0.0) == []
    assert retrieve(1 / 6) == [(2, 0)]
    assert retrieve(0.5) == [(0, 0), (2, 0), (2, 1)]
    assert retrieve(4 / 6) == [(0, 0), (2, 0), (2, 1), (3, 0)]
    assert retrieve(1.0) == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert streaming_heads(gates, 1.0) == {}


def test_the_built_in_pattern_takes_the_same_share_of_each_layer() -> None:
    assert duo("ff").streaming == {0: {1}, 1: {0}}
    assert duo("wflf").streaming == {1: {1}, 3: {0}}, "layers of other kinds do not count"
    assert duo("ff", retrieval=0.0).streaming == {0: {0, 1}, 1: {0, 1}}
    assert duo("ff", retrieval=0.75).streaming == {1: {0}}
    wide = DuoAttention(DuoAttention.config_class(retrieval=0.25), spec_of(16, 8))
    assert wide.streaming == {0: set(range(2, 8))}


def test_no_streaming_head_is_refused_as_every_layer_dense() -> None:
    method = duo("ff", retrieval=1.0)
    with pytest.raises(UnsupportedError, match="would leave every layer of this model dense"):
        check_model(method, method.model)


def test_a_pattern_file_names_the_heads(tmp_path: Path) -> None:
    path = save(tmp_path / "p.json", [[], [0.1, 0.9], ["ignored"], [1, 0]])
    method = duo("wflf", pattern=path)
    assert method.streaming == {1: {0}, 3: {1}}
    assert method.layers == (1, 3)
    uneven = save(tmp_path / "q.json", [[0.1, 0.2], [0.8, 0.9]])
    method = duo("ff", pattern=uneven)
    assert method.streaming == {0: {0, 1}}
    assert method.layers == (0,)


def test_a_table_of_the_authors_names_the_heads(tmp_path: Path) -> None:
    file = tmp_path / "full_attention_heads.tsv"
    file.write_text("1.000000000000000000e+00\t2.5e-01\n0.5\t0.75\n")
    assert duo("ff", pattern=str(file)).streaming == {0: {1}, 1: {0}}
    for wrong in ("1\t0\n", "1\t0\n1\n", "1\tx\n1\t0\n", "1\tnan\n1\t0\n"):
        file.write_text(wrong)
        with pytest.raises(RequestError, match=r"a \.tsv file with as many lines"):
            duo("ff", pattern=str(file))


WRONG: dict[str, object] = {
    "no list": {"0": [1, 2]},
    "too few layers": [[1, 2]],
    "too few heads": [[1, 2], [1]],
    "words": [[1, 2], [1, "2"]],
    "truth values": [[1, 2], [1, True]],
    "not a number": [[1, 2], [1, float("nan")]],
    "infinite": [[1, 2], [1, float("inf")]],
    "huge": [[1, 2], [1, 10**400]],
}


@pytest.mark.parametrize("rows", WRONG.values(), ids=list(WRONG))
def test_a_wrong_pattern_is_a_request_error(tmp_path: Path, rows: object) -> None:
    with pytest.raises(RequestError, match=r"pattern=.* must be a JSON file with 2 lists"):
        duo("ff", pattern=save(tmp_path / "p.json", rows))


def test_what_is_no_file_of_json_is_refused_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("secret")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").write_text("[" * 100_000)
    said = set()
    for name in ("text", "bytes", "deep", ".", "missing", "nul\0"):
        path = str(tmp_path / name)
        with pytest.raises(RequestError) as caught:
            duo("ff", pattern=path)
        said.add(str(caught.value).replace(repr(path), "PATH"))
        assert "secret" not in str(caught.value)
    assert len(said) == 1


def test_defaults_are_half_the_heads_64_sinks_and_256_recent_tokens() -> None:
    config = DuoAttention.config_class()
    assert (config.retrieval, config.sink, DuoAttention.default_budget) == (0.5, 64, 64 + 256)


def layers_of(
    name: str, prompt: int, decodes: int, budget: int, block: int, **knobs: Any
) -> Driven:
    q, k, v = (x.double() for x in random_layer(prompt + decodes, 8, 4, seed=6))
    method = make(spec_of(8, 4, 8, torch.float64), name, block_tokens=block, **knobs)
    steps = [min(block, prompt - at) for at in range(0, prompt, block)]
    return drive(method, q, k, v, [*steps, *[1] * decodes], budget, decodes)


@pytest.mark.parametrize("gates", [(1, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 1)])
def test_outputs_equal_masked_dense_attention_in_prefill_and_decode(
    tmp_path: Path, gates: Sequence[int]
) -> None:
    """Every query of every step, in float64, under a mask that an oracle makes."""
    prompt, decodes, budget, block, sink = 61, 9, 20, 16, 5
    pattern = save(tmp_path / "p.json", [gates])
    got = layers_of(
        NAME, prompt, decodes, budget, block, sink=sink, pattern=pattern, retrieval=sum(gates) / 4
    )
    q, k, v = (x.double() for x in random_layer(prompt + decodes, 8, 4, seed=6))
    ends = [*range(block, prompt, block), *range(prompt, prompt + decodes + 1)]
    at = 0
    for end, out in zip(ends, got.outs, strict=True):
        kept = oracles.duo(at, budget, sink, PAGE, True, [g == 1 for g in gates])
        for i in range(at, end):
            rows = [[*row, *range(at, i + 1)] for row in kept]
            expected = oracles.masked_attention(q[: i + 1], k[: i + 1], v[: i + 1], rows)
            torch.testing.assert_close(out[i - at], expected, rtol=0, atol=1e-10)
        at = end


@pytest.mark.parametrize("aligned", [True, False])
def test_without_retrieval_heads_it_is_streaming_llm_bit_for_bit(aligned: bool) -> None:
    knobs = {"sink": 5, "page_aligned": aligned}
    ours = layers_of(NAME, 61, 9, 20, 16, retrieval=0.0, **knobs)
    theirs = layers_of("streaming_llm", 61, 9, 20, 16, **knobs)
    assert ours.reads == theirs.reads
    assert all(torch.equal(a, b) for a, b in zip(ours.outs, theirs.outs, strict=True))


def test_streaming_rows_stop_growing_and_their_pages_come_back() -> None:
    got = layers_of(NAME, 64, 40, 20, 16, sink=4)
    for step, rows in enumerate(got.kept[4:]):
        assert rows[:2] == (64 + step + 1,) * 2
        assert all(20 - PAGE < n <= 20 for n in rows[2:])
        pages = 2 * -(-rows[0] // PAGE) + 2 * -(-rows[2] // PAGE)
        assert got.pages[4 + step] == pages


def test_a_needle_is_found_in_a_retrieval_head_and_lost_in_a_streaming_one() -> None:
    reads = layers_of(NAME, 200, 3, 40, 64, sink=4).reads[-1]
    assert [70 in row for row in reads] == [True, True, False, False]


def test_demand_counts_heads() -> None:
    """ff: two heads retrieve, two stream. Pages of 4; a prompt of 48 and 8 new tokens."""
    method = duo("ff", block_tokens=20, sink=4)
    steady = method.demand(48, 8, 20)
    assert steady.steady_tokens == (2 * 56 + 2 * 24) // 4
    assert steady.peak_tokens == (2 * 48 + 2 * 40) // 4, "streaming rows: budget and a block"
    assert method.demand(48, 8, 100) == (56, 56)
    assert method.demand(48, 8, None) == (56, 56)
    whole = duo("ff", block_tokens=0, sink=4).demand(48, 8, 20)
    assert whole.peak_tokens == 48
    hybrid = duo("lfw", block_tokens=20, sink=4)  # one row of three streams; windows do not count
    assert hybrid.demand(48, 8, 20).steady_tokens == -(-(2 * 56 + 24) // 3)


@pytest.mark.parametrize("kinds", ["ff", "lf", "wfr", "fwfl"])
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("retrieval", [0.0, 0.3, 0.7])
def test_memory_never_exceeds_demand(kinds: str, block: int, retrieval: float) -> None:
    from sparseengine.engine.admission import charge

    toy, new = Toy(kinds), 30
    method = make(toy.spec, NAME, sink=4, block_tokens=block, retrieval=retrieval)
    driver = Driver(toy, {"m": method})
    request = driver.add(0, [i % 50 for i in range(70)], new, "m", 24)
    most = charge(driver.cache, method, 70, new, 24)
    steady = 0
    while request.num_generated < new:
        driver.advance([request], 13)
        if not request.in_prefill:
            steady = max(steady, driver.cache.usage(0).pages)
    assert driver.peak_pages[0] <= most.most
    assert steady <= most.steady
    driver.drop(request)
    assert driver.cache.free_pages() == driver.cache.total_pages()


def test_the_registry_tells_what_it_is() -> None:
    traits = METHODS.get(NAME).traits
    assert traits.decode_hooks
    assert traits.graph_safe
    assert not traits.query_aware
