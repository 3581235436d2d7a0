"""What patterns of sparse prefill read equals the papers' formulas in float64."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from contract import prefill_oracles as oracles
from contract.reads import spec_of
from contract.toy import toy_spec
from sparseengine.core.plan import Chunk, Purpose, Request, StepPlan
from sparseengine.core.specs import LayerSpec, ModelSpec
from sparseengine.core.view import BlockMask
from sparseengine.errors import ConfigError, RequestError, UnsupportedError
from sparseengine.methods.prefill import (
    PATTERNS,
    check_pattern,
    describe_patterns,
    make_pattern,
)
from sparseengine.methods.prefill.lines import along_diagonals

B = 16


@dataclass
class Step:
    """A layer step of one chunk: given queries, and rows that hold given keys."""

    spec: LayerSpec
    plan: StepPlan
    q: Tensor
    keys: Tensor  # [Hkv, L, D]
    layer: int = 0
    row_lens: tuple[int, ...] = field(default=())

    def span(self, chunk: int) -> tuple[int, int]:
        return 0, len(self.q)

    def lens(self, chunk: int) -> tuple[int, ...]:
        return self.row_lens or (self.keys.shape[1],)

    def gather(self, name: str, chunk: int) -> Tensor:
        assert name == "keys"
        return self.keys


def step_of(
    model: ModelSpec, q: Tensor, k: Tensor, start: int, prompt_len: int, lens: Any = ()
) -> Step:
    request = Request(0, [0] * prompt_len, prompt_len, 1)
    chunk = Chunk(request, (0,) * len(q), start, Purpose.PREFILL, False)
    return Step(model.layers[0], StepPlan((chunk,)), q, k.transpose(0, 1), 0, tuple(lens))


def chosen(mask: BlockMask) -> oracles.Choice:
    heads, rows, _ = mask.mask.shape
    return {
        (head, row): set(mask.mask[head, row].nonzero().flatten().tolist())
        for head in range(heads)
        for row in range(rows)
    }


def layer(length: int, seed: int, gain: float = 2.0) -> tuple[ModelSpec, Tensor, Tensor]:
    """Peaked attention: some keys draw many queries, some queries look back a fixed distance."""
    rng = torch.Generator().manual_seed(seed)
    model = spec_of(4, 2, 16)
    q = torch.randn(length, 4, 16, generator=rng)
    k = torch.randn(length, 2, 16, generator=rng)
    lead = torch.randn(2, 16, generator=rng)
    for at in torch.randint(0, length, (3,), generator=rng).tolist():
        k[at] += 2 * lead
    q += lead.repeat_interleave(2, 0) * torch.rand(4, 1, generator=rng) * gain
    back = length // 3
    q[back:] += k[: length - back].repeat_interleave(2, 1)
    return model, q, k


CHUNKS = [(0, 160), (64, 96), (37, 107), (150, 7), (0, 13)]  # (first query, queries)
ORACLES = {
    "a_shape": (
        {"sink": 20, "window": 40},
        lambda q, k, s: oracles.a_shape(q, k, s, B, 20, 40),
    ),
    "xattention": (
        {"stride": 4, "threshold": 0.7},
        lambda q, k, s: oracles.antidiagonal(q, k, s, B, 4, 0.7),
    ),
    "xattention-16": (
        {"stride": 16, "threshold": 0.5},
        lambda q, k, s: oracles.antidiagonal(q, k, s, B, 16, 0.5),
    ),
    "minference": (
        {"vertical": 40, "slash": 33, "queries": 12},
        lambda q, k, s: oracles.vertical_slash(q, k, s, B, 40, 33, 12),
    ),
    "flexprefill": (
        {"gamma": 0.6, "tau": 0.45, "min_budget": 20},
        lambda q, k, s: oracles.flexible(q, k, s, B, 0.6, 0.45, 20, 1 << 30)[0],
    ),
    "flexprefill-lines": (
        {"gamma": 0.8, "tau": 0.0, "min_budget": 1, "max_budget": 60},
        lambda q, k, s: oracles.flexible(q, k, s, B, 0.8, 0.0, 1, 60)[0],
    ),
}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize(("start", "count"), CHUNKS)
def test_blocks_equal_the_formula(name: str, start: int, count: int) -> None:
    knobs, oracle = ORACLES[name]
    densities = []
    for seed in range(2):
        model, q, k = layer(start + count, seed)
        common = {"block": B, "min_tokens": 0, "last": 1}
        pattern = make_pattern(name.split("-")[0], {**common, **knobs}, model)
        at = step_of(model, q[start:], k, start, prompt_len=10_000)
        mask = pattern.pattern(at, 0)  # type: ignore[arg-type]
        assert mask is not None
        assert (mask.block, mask.offset) == (B, start % B)
        found, want = chosen(mask), oracle(q[start:], k, start)
        if len(mask.mask) == 1:
            found = {(h, r): v for (_, r), v in found.items() for h in range(4)}
        assert found == want
        total = sum((mine[-1] // B + 1) for mine in oracles.blocks_of(start, count, B)) * 4
        densities.append(sum(map(len, want.values())) / total)
    if start + count == 160 and count > 50:
        assert all(0.1 < d < 0.95 for d in densities), "the case chooses nothing or everything"


def test_both_kinds_of_heads_are_tried() -> None:
    kinds = [
        aware
        for start, count in CHUNKS
        for seed in range(2)
        for aware in oracles.flexible(
            layer(start + count, seed)[1][start:], layer(start + count, seed)[2], start, B, 0.6,
            0.45, 20, 1 << 30,
        )[1]
    ]  # fmt: skip
    assert 0 < sum(kinds) < len(kinds)


def test_the_shear_sums_along_diagonals() -> None:
    mass = torch.rand(5, 23, dtype=torch.float64)
    want = torch.zeros(23, dtype=torch.float64)
    for i in range(5):
        for j in range(23 - 5 + i + 1):
            want[18 + i - j] += mass[i, j]
    lower = mass.tril(18)  # query i sits at slot 18 + i and sees no later one
    torch.testing.assert_close(along_diagonals(torch.stack([lower, 2 * lower]))[0], want)


@pytest.mark.parametrize("name", [n for n in PATTERNS if n != "dense"])
def test_every_mask_holds_own_blocks_the_tail_and_nothing_later(name: str) -> None:
    """On ragged rows, too, some of them shorter than the chunk's positions."""
    for start, count, lens in ((40, 77, (117, 117)), (64, 90, (120, 101)), (5, 130, (135, 135))):
        model, q, k = layer(max(lens), 3)
        q, k = q[:count], k[: max(lens)].clone()
        for group, length in enumerate(lens):
            k[length:, group] = 0
        pattern = make_pattern(name, {"block": B, "min_tokens": 0, "last": 9}, model)
        at = step_of(model, q, k, start, start + count, lens if len(set(lens)) > 1 else ())
        mask = pattern.pattern(at, 0)  # type: ignore[arg-type]
        assert mask is not None
        expanded = mask.mask.expand(4, -1, -1)
        for head in range(4):
            length = lens[head // 2]
            for i in range(count):
                row, slot = (start % B + i) // B, length - count + i
                assert expanded[head, row, slot // B], "a query does not see itself"
                last = min((row + 1) * B - start % B, count) - 1 + length - count
                assert not expanded[head, row, last // B + 1 :].any(), "blocks nobody may see"
                if i >= count - 9:
                    assert expanded[head, row, : slot // B + 1].all(), "the tail is not dense"


@pytest.mark.parametrize("name", [n for n in PATTERNS if n != "dense"])
def test_short_prompts_and_tails_have_no_mask(name: str) -> None:
    model, q, k = layer(160, 1)
    pattern = make_pattern(name, {"block": B, "min_tokens": 161, "last": 9}, model)
    assert pattern.pattern(step_of(model, q, k, 0, 160), 0) is None  # type: ignore[arg-type]
    pattern = make_pattern(name, {"block": B, "min_tokens": 160, "last": 9}, model)
    assert pattern.pattern(step_of(model, q, k, 0, 160), 0) is not None  # type: ignore[arg-type]
    tail = step_of(model, q[144:], k, 144, 160)  # the block that holds the newest 9 queries
    assert pattern.pattern(tail, 0) is None  # type: ignore[arg-type]


EVERYTHING = {
    "a_shape": {"window": 1000},
    "xattention": {"threshold": 1.0},
    "minference": {"vertical": 1000, "slash": 1000},
    "flexprefill": {"gamma": 1.0},
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_widest_setting_reads_everything(name: str) -> None:
    model, q, k = layer(160, 2)
    knobs = {"block": B, "min_tokens": 0, "last": 1, **EVERYTHING[name]}
    mask = make_pattern(name, knobs, model).pattern(step_of(model, q, k, 0, 9999), 0)  # type: ignore[arg-type]
    if mask is not None:
        assert torch.equal(mask.mask, torch.ones(10, 10).tril().bool().expand_as(mask.mask))


@pytest.mark.parametrize("name", [n for n in PATTERNS if n != "dense"])
def test_two_ranks_with_half_the_heads_decide_like_one(name: str) -> None:
    model, q, k = layer(160, 6)
    half, knobs = spec_of(2, 1, 16), {"block": B, "min_tokens": 0, "last": 1}
    if name == "minference":
        knobs |= {"vertical": 32, "slash": 32}
    whole = make_pattern(name, knobs, model).pattern(step_of(model, q, k, 0, 9999), 0)  # type: ignore[arg-type]
    assert whole is not None
    for rank in range(2):
        heads, group = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        at = step_of(half, q[:, heads], k[:, group], 0, 9999)
        mine = make_pattern(name, knobs, half).pattern(at, 0)  # type: ignore[arg-type]
        assert mine is not None
        assert torch.equal(mine.mask, whole.mask.expand(len(mine.mask) * 2, -1, -1)[heads]
                           if len(mine.mask) > 1 else whole.mask)  # fmt: skip


def test_planted_lines_are_found() -> None:
    """A key that all queries want, and a copy at a fixed distance, are read by all that see it."""
    length, dim, needle, back = 320, 16, 37, 100
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(length, 1, dim, generator=rng), torch.randn(length, 1, dim, generator=rng)
    q[back:] = 4 * k[: length - back] + q[back:]
    q[..., 0], k[..., 0] = 6.0, 0.0
    k[needle, :, 0] = 6.0
    model = spec_of(1, 1, dim)
    common = {"block": B, "min_tokens": 0, "last": 1}
    for name, knobs in (
        ("minference", {"vertical": 48, "slash": 64}),
        ("flexprefill", {"gamma": 0.9, "min_budget": 48, "tau": 0.0}),
        ("xattention", {"threshold": 0.95, "stride": 4}),
    ):
        pattern = make_pattern(name, {**common, **knobs}, model)
        mask = pattern.pattern(step_of(model, q, k, 0, 9999), 0)  # type: ignore[arg-type]
        assert mask is not None
        for row in range(10, 20):
            assert mask.mask[0, row, needle // B], f"{name}: the column is missed"
            if name != "xattention":  # which judges tiles, not lines
                copies = {(p - back) // B for p in range(row * B, row * B + B)}
                assert copies <= chosen(mask)[0, row], f"{name}: the diagonal is missed"
        seen = sum(map(len, chosen(mask).values()))
        assert seen < 0.9 * 20 * 21 / 2, f"{name} reads nearly everything"


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_antidiagonals_recall_the_mass_they_promise(threshold: float) -> None:
    model, q, k = layer(320, 4, gain=1.0)
    knobs = {"block": B, "min_tokens": 0, "last": 1, "threshold": threshold, "stride": 4}
    mask = make_pattern("xattention", knobs, model).pattern(step_of(model, q, k, 0, 9999), 0)  # type: ignore[arg-type]
    assert mask is not None
    keys = k.transpose(0, 1).repeat_interleave(2, 0).double()
    logits = q.transpose(0, 1).double() @ keys.mT / 4
    mass = logits.masked_fill(torch.ones(320, 320).triu(1).bool(), float("-inf")).softmax(-1)
    kept = mask.mask.repeat_interleave(B, 1).repeat_interleave(B, 2)
    assert float((mass * kept).sum(-1).mean()) > threshold - 0.05


def test_patterns_of_a_file(tmp_path: Path) -> None:
    model, q, k = layer(160, 5)
    file = tmp_path / "patterns.json"
    rows = {
        "0": ["vertical_and_slash", 16, 16, 0.5],
        "2": ["stream_llm", 20, 40, 1.0],
        "3": ["block_sparse", 0, 0, 1.0],
    }
    file.write_text(json.dumps([rows]))
    common = {"block": B, "min_tokens": 0, "last": 1, "vertical": 48, "slash": 32}
    pattern = make_pattern("minference", {**common, "patterns": str(file)}, model)
    mask = pattern.pattern(step_of(model, q, k, 0, 9999), 0)  # type: ignore[arg-type]
    assert mask is not None
    found = chosen(mask)
    for row in range(10):
        small = oracles.vertical_slash(q, k, 0, B, 16, 16, 64)
        large = oracles.vertical_slash(q, k, 0, B, 48, 32, 64)
        assert found[0, row] == small[0, row]
        assert found[1, row] == large[1, row]  # not in the file: the knobs
        assert found[2, row] == oracles.a_shape(q, k, 0, B, 20, 40)[2, row]
        assert found[3, row] == set(range(row + 1))  # 6,400 tokens are more than there are


@pytest.mark.parametrize(
    "text",
    [
        "[",
        '{"a": 1}',
        "[{}, {}]",
        '[{"4": ["stream_llm", 1, 1]}]',
        '[{"x": ["stream_llm", 1, 1]}]',
        '[{"0": ["spiral", 1, 1]}]',
        '[{"0": ["stream_llm", -1, 1]}]',
        '[{"0": []}]',
        None,
    ],
)
def test_wrong_files_of_patterns(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "p.json"
    if text is not None:
        file.write_text(text)
    message = (
        r"p\.json' is not allowed; it must be a JSON file with a list .* 1 layers with 4 query"
    )
    with pytest.raises(RequestError, match=message):
        make_pattern("minference", {"patterns": str(file)}, spec_of(4, 2))


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("xattention", {"threshold": 1.5}, r"threshold=1.5 is not allowed; it must be .*\[0.0, 1"),
        ("xattention", {"stride": 5}, "stride=5"),
        ("flexprefill", {"gama": 0.5}, "unknown knob 'gama'.*'gamma'"),
        ("minference", {"block": 100}, "block=100 is not allowed; it must be one of 16, 32, 64"),
        ("a_shape", {"last": 0}, "last=0"),
        ("dense", {"block": 16}, "unknown knob 'block'; it takes none"),
    ],
)
def test_wrong_knobs(name: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_pattern(name, knobs, spec_of(4, 2))


def test_unknown_patterns_and_models_without_a_layer_to_act_on() -> None:
    with pytest.raises(ConfigError, match=r"unknown prefill pattern 'xatention'.*'xattention'"):
        make_pattern("xatention", {}, spec_of(4, 2))
    for kinds in ("l", "w"):
        model = toy_spec(kinds)
        with pytest.raises(UnsupportedError, match="acts on layers of kind FULL; the model has"):
            check_pattern(make_pattern("a_shape", {}, model), model)
        check_pattern(make_pattern("dense", {}, model), model)


def test_patterns_are_described() -> None:
    rows = {row["name"]: row for row in describe_patterns()}
    assert set(rows) == set(PATTERNS)
    json.dumps(list(rows.values()))
    for row in rows.values():
        assert row["summary"]
        assert row["traits"]["invariant"] in ("always", "blocks", "no")
