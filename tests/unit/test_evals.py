"""Evaluations: the plain formulas, forced decoding against free decoding, and the commands."""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import pytest
import torch

from fixtures.engines import save_checkpoint
from sparseengine.cli.main import main
from sparseengine.core.params import SamplingParams, SparseParams
from sparseengine.errors import ConfigError, RequestError
from sparseengine.evals.agree import pieces_of, read_text
from sparseengine.evals.forced import compare, forced_logits, summary
from sparseengine.evals.needle import depths, is_exact
from sparseengine.evals.options import (
    Case,
    add_eval_arguments,
    budgets,
    cases_of,
    leave_out,
    sizes,
)
from sparseengine.llm import LLM
from sparseengine.longtext import make_puzzle
from sparseengine.methods import METHODS

SMALL = ["--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "4", "--max-model-len", "2048"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("evals") / "tiny"
    return str(save_checkpoint(folder, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = random.Random(5).choices(["fox", "the", "lazy", "dog", "jumps", "brown"], k=600)
    file.write_text(" ".join(words))
    return file


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def test_the_comparison_is_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 5, 7, generator=generator) * 3
    targets = [0, 6, 3, 3, 1]
    found = compare(p, q, targets)
    for i in range(5):
        a, b = p[i].tolist(), q[i].tolist()
        za, zb = sum(map(math.exp, a)), sum(map(math.exp, b))
        kl = sum(
            math.exp(x) / za * (x - math.log(za) - y + math.log(zb))
            for x, y in zip(a, b, strict=True)
        )
        assert found.kl[i] == pytest.approx(kl)
        assert found.nll[i] == pytest.approx(math.log(zb) - b[targets[i]])
        assert found.dense_nll[i] == pytest.approx(math.log(za) - a[targets[i]])
        assert found.same_top[i] == (a.index(max(a)) == b.index(max(b)))
    whole = summary([found, compare(p, p, targets)])
    assert whole["places"] == 10
    assert whole["kl_mean"] == pytest.approx(sum(found.kl) / 10)
    assert whole["top1_agreement"] == pytest.approx((sum(found.same_top) + 5) / 10)
    assert whole["perplexity"] == pytest.approx(
        math.exp((sum(found.nll) + sum(found.dense_nll)) / 10)
    )


def test_a_token_that_dense_rules_out_adds_nothing() -> None:
    dense, other = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 0.0]])
    assert compare(dense, other, [0]).kl == pytest.approx([math.log(2)])


@pytest.mark.parametrize("overlap", [False, True])
def test_forced_dense_decoding_is_the_models_own_distribution(model: str, overlap: bool) -> None:
    rng = random.Random(0)
    pieces = [[rng.randrange(2, 300) for _ in range(60)] for _ in range(3)]
    with LLM(model, quiet=True, kv_cache_memory_bytes="8MiB", dtype="float32") as llm:
        llm.engine.overlap = overlap  # as on a GPU
        logits, seen = forced_logits(llm, pieces, 40, [SparseParams(record=True)] * 3)
        assert [tuple(x.shape) for x in logits] == [(19, 300)] * 3
        assert [len(record.bytes_read_per_step) for record in seen if record] == [19] * 3
        ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(pieces, ask, use_tqdm=False)
    for piece, own, output in zip(pieces, logits, outputs, strict=True):
        places = compare(own, own, piece[41:])
        assert output.prompt_logprobs is not None
        want = [
            -row[t].logprob for t, row in zip(piece, output.prompt_logprobs, strict=True) if row
        ]
        assert places.nll == pytest.approx(want[40:], abs=1e-4)
        assert places.kl == [0.0] * 19


def test_forced_sparse_decoding_is_what_the_method_generates(model: str) -> None:
    """Forcing a request's own greedy tokens gives its own log-probabilities."""
    rng = random.Random(2)
    prompt = [rng.randrange(2, 300) for _ in range(70)]
    case = Case(method="streaming_llm", budget=20)
    with LLM(
        model,
        quiet=True,
        kv_cache_memory_bytes="8MiB",
        dtype="float32",
        enable_methods=["full", "streaming_llm"],
    ) as llm:
        free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
        done = llm.generate([prompt], free, case.params(), use_tqdm=False)[0].outputs[0]
        piece = prompt + done.token_ids
        logits, seen = forced_logits(llm, [piece], 70, [case.params(record=True)])
        dense, _ = forced_logits(llm, [piece], 70, [SparseParams(record=True)])
        again = llm.generate([prompt], free, case.params(), use_tqdm=False)[0].outputs[0]
    assert again.token_ids == done.token_ids  # the engine has its own sampler back
    assert [record.budget for record in seen if record] == [20]
    assert done.logprobs is not None
    want = [-row[t].logprob for t, row in zip(done.token_ids, done.logprobs, strict=True)]
    places = compare(dense[0], logits[0], done.token_ids[1:])
    assert places.nll == pytest.approx(want[1:], abs=1e-4)
    assert min(places.kl) > 0


def test_the_number_stands_at_its_depth_in_the_same_prose() -> None:
    def count(text: str) -> int:
        return len(text.split())

    puzzles = [make_puzzle(count, 500, seed=4, depth=d) for d in (0.0, 0.3, 1.0)]
    spots = [p.message.index(p.answer) / len(p.message) for p in puzzles]
    assert spots[0] < 0.05 < 0.25 < spots[1] < 0.35 < 0.9 < spots[2]
    assert len({p.answer for p in puzzles}) == 1
    assert len({"".join(sorted(p.message.split())) for p in puzzles}) == 1


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("12345", True),
        ("It is 12,345.", True),
        ("The number is 12345, not 7.", True),
        ("7, not 12345", False),
        ("123456", False),
        ("1234", False),
        ("none", False),
    ],
)
def test_an_answer_is_right_if_its_first_number_is(answer: str, right: bool) -> None:
    assert is_exact(answer, "12345") is right


def test_lists_are_read_and_wrong_ones_refused() -> None:
    assert budgets("0.25,512, 1.0,512") == (0.25, 512, 1.0)
    assert [type(b) for b in budgets("1,1.0")] == [int, float]  # a token, and everything
    assert sizes("--lengths", "1k,4096,1000") == (1000, 4096)
    assert depths("0,0.5,1") == (0.0, 0.5, 1.0)
    for wrong in ("", "0", "1.5", "-3", "x", "0.5,,", "nan", ".nan"):
        with pytest.raises(ConfigError, match="--budgets"):
            budgets(wrong)
    for wrong in ("", "1.1", "-1", "nan", "a"):
        with pytest.raises(ConfigError, match="--depths"):
            depths(wrong)
    for wrong in ("", "0", "x"):
        with pytest.raises(ConfigError, match="--lengths"):
            sizes("--lengths", wrong)


def test_needle_runs_dense_and_controls_beside_the_method(capsys, model, tmp_path) -> None:
    status, out, err = run(
        *[capsys, "eval", "needle", model, *SMALL, "--methods", "knorm", "--budgets", "0.25,64"],
        *["--lengths", "300", "--num-texts", "1", "--depths", "0.2,0.8"],
        *["--output", str(tmp_path / "out")],
    )
    assert status == 0, err
    data = json.loads(out.splitlines()[-1])
    assert (data["eval"], data["skipped"]) == ("needle", {})
    rows = data["rows"]
    names = [(r["method"], r["budget"]) for r in rows]
    both = [0.25, 64]
    assert names == [
        ("full", None),
        *[(m, b) for m in ("random", "streaming_llm", "knorm") for b in both],
    ]
    dense = rows[0]
    for row in rows:
        assert row["questions"] == 2
        assert row["accuracy"] == row["right"] / 2
        assert set(row["accuracy_by_depth"]) == {"0.2", "0.8"}
        if row["method"] == "streaming_llm":
            assert row["resident_bytes"] < dense["resident_bytes"] / 2
            assert row["bytes_read_per_step"] < dense["bytes_read_per_step"] / 2
    assert rows[2]["budget_tokens"] == 64
    assert rows[1]["budget_tokens"] == dense["prompt_tokens"] // 4
    assert json.loads((tmp_path / "out" / "aggregate.json").read_text()) == rows
    samples = (tmp_path / "out" / "raw.jsonl").read_text().splitlines()
    assert len(samples) == 2 * len(rows)
    assert json.loads(samples[0])["wanted"].isdigit()
    assert out.count("streaming_llm") > 2  # the table, above the line of JSON


def test_agree_measures_from_dense(capsys, model, text) -> None:
    status, out, err = run(
        *[capsys, "eval", "agree", model, *SMALL, "--text", str(text), "--dtype", "float32"],
        *["--methods", "knorm", "--budgets", "16,1.0", "--input-len", "60"],
        *["--output-len", "5", "--num-texts", "2"],
        *["--hyper-params", '{"knorm": {"recent": 4}}'],
    )
    assert status == 0, err
    data = json.loads(out.splitlines()[-1])
    dense, *others = data["rows"]
    assert len(data["text_sha256"]) == 64
    assert (dense["kl_mean"], dense["kl_max"], dense["top1_agreement"]) == (0.0, 0.0, 1.0)
    assert dense["places"] == 10
    for row in others:
        assert row["dense_perplexity"] == dense["perplexity"]
        if row["budget"] == 16:
            assert row["kl_mean"] > 1e-9
            assert row["bytes_read_per_step"] < dense["bytes_read_per_step"]
        elif row["method"] == "knorm":
            assert row["kl_max"] < 1e-9  # everything is kept


def test_agree_reports_the_attention_to_evicted_tokens_where_asked(capsys, model, text) -> None:
    knobs = {"knorm": {"recent": 4, "dropped_mass": True}, "snapkv": {"window": 4, "kv_error": 0.3}}
    status, out, err = run(
        *[capsys, "eval", "agree", model, *SMALL, "--text", str(text), "--dtype", "float32"],
        *["--methods", "knorm,snapkv", "--budgets", "16,1.0", "--input-len", "60"],
        *["--output-len", "5", "--num-texts", "2", "--hyper-params", json.dumps(knobs)],
    )
    assert status == 0, err
    rows = {(r["method"], r["budget"]): r for r in json.loads(out.splitlines()[-1])["rows"]}
    assert 0 < rows["knorm", 16]["dropped_mass"] < 1
    assert rows["knorm", 1.0]["dropped_mass"] == 0, "nothing was evicted"
    others = [r["dropped_mass"] for (name, _), r in rows.items() if name != "knorm"]
    assert set(others) == {None}
    lines = [line.split() for line in out.splitlines()]
    assert [line[-1] for line in lines if line[:2] == ["snapkv", "16"]] == ["-"]
    assert [line[-1] == "-" for line in lines if line[:2] == ["knorm", "16"]] == [False]
    assert next(line[-1] for line in lines if "KL" in line) == "dropped"
    assert rows["snapkv", 16]["budget_tokens"] <= 16
    assert 16 < rows["snapkv", 1.0]["budget_tokens"] < 60, "what the error came to"


def test_sparse_prefill_is_compared_with_dense_prefill(capsys, model, text) -> None:
    knobs = {"min_tokens": 32, "block": 16, "last": 8, "sink": 0, "window": 0}
    status, out, err = run(
        *[capsys, "eval", "agree", model, *SMALL, "--text", str(text), "--dtype", "float32"],
        *["--methods", "knorm", "--budgets", "1.0", "--input-len", "90"],
        *["--output-len", "3", "--num-texts", "1", "--hyper-params", '{"knorm": {"recent": 4}}'],
        *["--sparse-prefill", "a_shape", "--sparse-prefill-config", json.dumps(knobs)],
    )
    assert status == 0, err
    rows = {row["method"]: row for row in json.loads(out.splitlines()[-1])["rows"]}
    assert rows["full"]["kl_max"] == 0.0
    assert rows["full"]["prefill_density"] is None
    for name in ("full+a_shape", "knorm+a_shape"):
        # queries 0-79 read their own block alone, the last block reads all six of them
        assert rows[name]["prefill_density"] == (5 + 6) / 21
        assert rows[name]["kl_mean"] > 1e-9
    assert rows["knorm+a_shape"]["kl_mean"] == pytest.approx(rows["full+a_shape"]["kl_mean"])


def rows_of(*flags: str) -> list[Case]:
    parser = argparse.ArgumentParser()
    add_eval_arguments(parser)
    return cases_of(parser.parse_args(list(flags)))


def test_a_method_may_have_several_rows() -> None:
    names = "streaming_llm:pos_shift=true:block_tokens=8,snapkv, snapkv:preset=paper,snapkv"
    knobs = {"snapkv": {"window": 16, "sink": 1}, "streaming_llm": {"block_tokens": 64}}
    cases = rows_of("--methods", names, "--hyper-params", json.dumps(knobs))
    found = {case.name: dict(case.knobs) for case in cases}
    assert list(found) == [
        *["full", "random", "streaming_llm", "streaming_llm:pos_shift=true:block_tokens=8"],
        *["snapkv", "snapkv:preset=paper"],
    ]
    assert found["streaming_llm"] == {"block_tokens": 64}
    assert found["streaming_llm:pos_shift=true:block_tokens=8"] == {
        "block_tokens": 8,
        "pos_shift": True,
    }
    assert found["snapkv:preset=paper"] == {"window": 16, "sink": 1, "preset": "paper"}
    assert cases[4].params().knobs == {"window": 16, "sink": 1}
    for wrong in ("snapkv:window", "snapkv:=3", "snapkv:window="):
        with pytest.raises(ConfigError, match="name:knob=value"):
            rows_of("--methods", wrong)
    with pytest.raises(ConfigError, match="--budgets"):
        rows_of("--methods", "snapkv:ratio=0.5")


# ── perplexity of a text that is read ─────────────────────────────────────────────────────────────


def read_flags(model: str, text: Path) -> list[str]:
    flags = ["eval", "perplexity", model, *SMALL, "--text", str(text), "--dtype", "float32"]
    return [*flags, "--input-len", "110", "--every", "40", "--num-texts", "2"]


def test_perplexity_is_that_of_the_models_own_distribution(capsys, model, text, tmp_path) -> None:
    names = "streaming_llm,streaming_llm:pos_shift=true,streaming_llm:block_tokens=128"
    flags = [*read_flags(model, text), "--methods", names, "--budgets", "16"]
    flags += ["--hyper-params", '{"streaming_llm": {"block_tokens": 16, "page_aligned": false}}']
    flags += ["--output", str(tmp_path / "out")]
    status, out, err = run(capsys, *flags)
    assert status == 0, err
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [r["method"] for r in rows] == ["full", *names.split(",")]
    with LLM(model, quiet=True, kv_cache_memory_bytes="8MiB", dtype="float32") as llm:
        pieces = pieces_of(llm, text.read_text(), 2, 110)
        logits, _ = forced_logits(llm, pieces, 1, [SparseParams()] * 2)
    # the first token of a text is the prompt, its second ends the prefill: neither is among these
    losses = [compare(x, x, p[2:]).nll for x, p in zip(logits, pieces, strict=True)]
    third = [loss[38:78] for loss in losses]
    assert [part["stop"] for part in rows[0]["ranges"]] == [40, 80, 110]
    want = math.exp(sum(map(sum, third)) / 80)
    assert rows[0]["ranges"][1]["perplexity"] == pytest.approx(want, rel=1e-4)
    dense, own, shifted, whole = ([p["perplexity"] for p in r["ranges"]] for r in rows)
    assert whole == pytest.approx(dense, rel=1e-4), "its block was never full"
    assert abs(own[2] / dense[2] - 1) > 1e-3
    assert abs(shifted[2] / own[2] - 1) > 1e-4
    assert rows[1]["resident_bytes"] < rows[0]["resident_bytes"] / 2
    assert "<svg" in (tmp_path / "out" / "plot.svg").read_text()
    status, again, err = run(capsys, *flags, "--resume")
    assert (status, err) == (0, "")
    assert json.loads(again.splitlines()[-1])["rows"] == rows


def test_perplexity_refuses_what_would_change_nothing(capsys, model, text) -> None:
    flags = read_flags(model, text)
    status, out, err = run(capsys, *flags, "--methods", "knorm")
    assert (status, out) == (2, "")
    assert "use eval agree" in err
    status, out, err = run(capsys, *flags, "--every", "1")
    assert (status, out) == (2, "")
    assert "--every" in err
    status, out, err = run(capsys, *flags, "--input-len", "2048")
    assert (status, out) == (2, "")
    assert "tokens" in err
    knobs = json.dumps({"min_tokens": 32, "block": 16, "last": 8, "sink": 0, "window": 0})
    flags += ["--methods", "knorm", "--sparse-prefill", "a_shape", "--sparse-prefill-config", knobs]
    status, out, err = run(capsys, *flags)
    assert status == 0, err
    rows = {r["method"]: r["perplexity"] for r in json.loads(out.splitlines()[-1])["rows"]}
    assert rows["knorm+a_shape"] == pytest.approx(rows["full+a_shape"])
    assert rows["full"] != pytest.approx(rows["full+a_shape"], rel=1e-4)


def test_pieces_are_disjoint_and_long_enough(model: str, text: Path) -> None:
    with LLM(model, quiet=True, kv_cache_memory_bytes="4MiB") as llm:
        pieces = pieces_of(llm, text.read_text(), 3, 50)
        assert [len(p) for p in pieces] == [50] * 3
        whole = llm.tokenizer.decode([t for p in pieces for t in p])
        assert whole.split()[0] in text.read_text()
        with pytest.raises(ConfigError, match="longer --text"):
            pieces_of(llm, "short", 3, 50)


def test_python_brings_a_real_text() -> None:
    assert len(read_text(None)) > 100_000


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["needle", "--methods", "quset"], "quest"),
        (["needle", "--budgets", "0"], "--budgets"),
        (["needle", "--lengths", "0"], "--lengths"),
        (["needle", "--depths", "2"], "--depths"),
        (["needle", "--hyper-params", '{"quest": {}}'], "not among --methods"),
        (["needle", "--hyper-params", "["], "--hyper-params"),
        (["needle", "--lengths", "5000"], "max_model_len"),
        (["agree", "--text", "/nowhere/at/all"], "--text"),
        (["agree", "--methods", "nothing"], "sparse method"),
        (["agree", "--input-len", "2040"], "max_model_len"),
    ],
)
def test_bad_input_is_one_error(capsys, model, flags: list[str], match: str) -> None:
    status, out, err = run(capsys, "eval", flags[0], model, *SMALL, *flags[1:])
    assert (status, out) == (2, "")
    assert match in err
    assert err.splitlines()[-1].startswith(f"sparseengine eval {flags[0]}: error: ")


def test_an_unknown_model_is_named(capsys) -> None:
    status, _, err = run(capsys, "eval", "needle", "no-such-model-here")
    assert status == 2
    assert "no-such-model-here" in err


def test_a_prompt_must_leave_room_for_the_answer(capsys, model: str) -> None:
    short = [*SMALL[:-1], "360"]
    for length in range(150, 360, 4):
        flags = ["--lengths", str(length), "--num-texts", "1", "--depths", "0.5"]
        status, out, err = run(capsys, "eval", "needle", model, *short, *flags)
        if status:
            break
    assert (status, out) == (2, "")
    assert "no room for an answer" in err


def test_all_goes_on_without_a_method_that_fails(capsys, model, text, monkeypatch) -> None:
    def faulty(self, plan):
        raise RuntimeError("out of order")

    few = ("full", "random", "streaming_llm", "knorm", "keydiff")
    monkeypatch.setattr(METHODS, "_entries", {name: METHODS._entries[name] for name in few})
    monkeypatch.setattr(METHODS.get("knorm"), "evict", faulty)
    flags = ["eval", "agree", model, *SMALL, "--methods", "all", "--budgets", "32"]
    flags += ["--text", str(text), "--input-len", "60", "--output-len", "3", "--num-texts", "1"]
    status, out, err = run(capsys, *flags)
    assert status == 0, err
    data = json.loads(out.splitlines()[-1])
    assert list(data["skipped"]) == ["knorm 32"]
    assert "out of order" in data["skipped"]["knorm 32"]
    assert [row["method"] for row in data["rows"]] == [name for name in few if name != "knorm"]


def test_only_all_goes_on_without_a_case() -> None:
    case, skipped = Case(method="knorm", budget=4), {}
    error = RequestError("not here")
    leave_out(argparse.Namespace(methods="all"), case, error, skipped, case.label)
    assert skipped == {"knorm 4": "not here"}
    with pytest.raises(RequestError, match="not here"):
        leave_out(argparse.Namespace(methods="knorm"), case, error, {}, case.label)
    with pytest.raises(RequestError, match="not here"):
        leave_out(argparse.Namespace(methods="all"), Case(method="full"), error, {}, "full")


def test_all_leaves_out_what_a_model_cannot_run(capsys, tmp_path) -> None:
    folder = str(save_checkpoint(tmp_path / "tiny", max_position_embeddings=2048))
    status, out, err = run(
        *[capsys, "eval", "needle", folder, *SMALL, "--methods", "all", "--budgets", "64"],
        *["--lengths", "150", "--num-texts", "1", "--depths", "0.5"],
    )
    assert status == 0, err
    data = json.loads(out.splitlines()[-1])
    assert {r["method"] for r in data["rows"]} | set(data["skipped"]) == set(METHODS)
    assert "knorm" not in data["skipped"]
