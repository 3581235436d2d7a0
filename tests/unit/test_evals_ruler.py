"""`eval ruler`: the texts hold what is asked for, the protocols do what they say, runs resume."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from fixtures.engines import save_checkpoint
from fixtures.rerun import rerun_of
from sparseengine.cli.main import main
from sparseengine.engine.intake import Intake
from sparseengine.errors import ConfigError
from sparseengine.evals import waves
from sparseengine.evals.asking import PROTOCOLS, Answers, Job, ask, make_job, prepare, split_prompt
from sparseengine.evals.chart import Point, draw
from sparseengine.evals.forced import forced_logits
from sparseengine.evals.journal import Journal
from sparseengine.evals.options import Case
from sparseengine.evals.ruler import names_of, wilson
from sparseengine.evals.tasks import TASKS, Query, Text, fit
from sparseengine.llm import LLM
from sparseengine.methods import METHODS

SMALL = ["--kv-cache-memory-bytes", "16MiB", "--dtype", "float32", "--max-model-len", "2048"]
KINDS = {"numbers": r"\d{7}", "words": r"[a-z]+-[a-z]+", "uuids": r"[0-9a-f-]{36}"}


def count(text: Text) -> int:
    return len(text.context.split()) + max(len(q.question.split()) for q in text.queries)


def made(task: str, length: int = 900, questions: int = 1, seed: str = "s") -> Text:
    return fit(TASKS[task], count, length, seed, questions)


def facts_of(text: Text) -> list[tuple[str, str, str]]:
    found = re.findall(r"special magic (\w+) for (\S+) is: (\S+)\.", text.context)
    assert found, text.context[:200]
    return found


@pytest.mark.parametrize("task", TASKS)
def test_a_text_fills_its_length_and_follows_from_its_seed(task: str) -> None:
    length = 2500
    text, again, other = made(task, length), made(task, length), made(task, length, seed="t")
    assert text == again
    assert text.queries[0].wanted != other.queries[0].wanted
    assert 0.9 * length < count(text) <= length
    assert len(text.queries) == 1
    with pytest.raises(ConfigError, match="tokens are too few"):
        made(task, 8)


@pytest.mark.parametrize("task", [name for name in TASKS if TASKS[name].asks_many])
def test_several_questions_have_answers_of_their_own(task: str) -> None:
    text = made(task, 1500, questions=5)
    assert len({q.question for q in text.queries}) == 5
    for query in text.queries:
        assert all(want in text.context for want in query.wanted)
        assert query.score(f"x {' '.join(query.wanted).upper()}.") == 1


@pytest.mark.parametrize(
    ("task", "kind", "keys", "values", "asked"),
    [
        ("niah_single_1", "numbers", 1, 1, 1),
        ("niah_single_2", "numbers", 1, 1, 1),
        ("niah_single_3", "uuids", 1, 1, 1),
        ("niah_multikey_1", "numbers", 4, 1, 1),
        ("niah_multivalue", "numbers", 1, 4, 1),
        ("niah_multiquery", "numbers", 4, 1, 4),
    ],
)
def test_needles_are_as_many_as_the_task_says(
    task: str, kind: str, keys: int, values: int, asked: int
) -> None:
    text = made(task)
    facts = facts_of(text)
    assert {f[0] for f in facts} == {kind}
    assert all(re.fullmatch(KINDS[kind], f[2]) for f in facts)
    assert set(Counter(f[1] for f in facts).values()) == {values}
    assert len(facts) == keys * values
    query = text.queries[0]
    named = {f[1] for f in facts if f[1] in query.question and f[1] in query.cue}
    assert len(named) == asked
    assert set(query.wanted) == {f[2] for f in facts if f[1] in named}
    assert not any(want in query.question + query.cue for want in query.wanted)


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_the_whole_haystack_may_be_needles(task: str) -> None:
    text = made(task)
    facts = facts_of(text)
    assert len(facts) > 40
    assert len({f[1] for f in facts}) == len(facts)
    asked = [f for f in facts if f[1] in text.queries[0].question]
    assert [f[2] for f in asked] == list(text.queries[0].wanted)


def test_needles_stand_anywhere() -> None:
    places = []
    for seed in range(40):
        text = made("niah_single_1", seed=str(seed))
        places.append(text.context.index("One of the special") / len(text.context))
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert len(set(places)) > 15


def test_variables_form_chains_in_order() -> None:
    text = made("vt", questions=3)
    held: dict[str, str] = {}
    for name, value in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text.context):
        held[name] = held.get(value, value)
        assert held[name].isdigit(), "a variable is used before it has a value"
    for query in text.queries:
        number = re.search(r"\d{5}", query.question)
        assert number is not None
        assert {n for n, v in held.items() if v == number[0]} == set(query.wanted)
        assert len(query.wanted) == 5


def test_common_words_are_the_common_ones() -> None:
    text = made("cwe", 2500)
    listed = text.context.rsplit("\n\n", 1)[1]
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert {w for w, n in counts.items() if n == 30} == set(text.queries[0].wanted)
    assert {n for n in counts.values() if n != 30} == {3}
    text = made("fwe", 1500)
    counts = Counter(text.context.rsplit("\n\n", 1)[1].split())
    (dots, most), *others = counts.most_common(4)
    assert dots == "..."
    assert most > others[0][1]
    assert {w for w, _ in others} == set(text.queries[0].wanted)


def test_documents_hold_the_attribute_asked_for() -> None:
    text = made("qa", questions=4)
    documents = text.context.split("Document ")[1:]
    assert len(documents) > 15
    for query in text.queries:
        name = " ".join(query.cue.split()[:2])
        about = [d for d in documents if name in d]
        assert len(about) == 1
        assert query.wanted[0] in about[0]


def test_scores_are_the_part_of_the_strings_found() -> None:
    query = Query(question="", cue="", wanted=("Abc", "12"))
    assert query.score("abc 1 2") == 0.5
    assert query.score("12 ABC") == 1
    assert query.score("") == 0
    anyone = Query(question="", cue="", wanted=("Abc", "12"), needs_all=False)
    assert anyone.score("121") == 1


def test_the_interval_is_wilsons() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert wilson(0, 5)[0] == 0
    assert wilson(5, 5) == pytest.approx((0.5655, 1.0), abs=1e-3)


# ── protocols ─────────────────────────────────────────────────────────────────────────────────────

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("ruler") / "tiny"
    return str(save_checkpoint(folder, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def llm(model: str):
    with LLM(
        model,
        quiet=True,
        kv_cache_memory_bytes="16MiB",
        dtype="float32",
        enable_methods=["full", "knorm", "quest"],
    ) as made_llm:
        yield made_llm


def answers_of(llm: LLM, jobs: list[Job], case: Case, most: int) -> list[Answers]:
    asked = [prepare(llm, job, case.params(record=True), most) for job in jobs]
    found = dict(ask(llm, asked))
    return [found[i] for i in range(len(jobs))]


CONTEXT = "the quick brown fox " * 12
QUERIES = tuple(
    Query(question=f"What is {what}?", cue=f"It {what * i} is", wanted=("never so",))
    for i, what in enumerate(("red", "blue", "g"))
)


@pytest.mark.parametrize("chat", [False, True])
def test_dense_answers_do_not_depend_on_the_protocol(llm: LLM, chat: bool) -> None:
    """One prompt, or the text first and the question behind it: the same tokens."""
    llm.tokenizer.chat_template = TEMPLATE if chat else None
    try:
        aware = [make_job(llm, PROTOCOLS[0], CONTEXT, [q]) for q in QUERIES]
        many = make_job(llm, PROTOCOLS[2], CONTEXT, QUERIES)
        assert aware[1].prompt == many.prompt + many.questions[1]
        assert ("</s>" in llm.tokenizer.decode(many.questions[0])) is chat
        dense = Case(method="full")
        one_by_one = answers_of(llm, aware, dense, 9)
        forks = answers_of(llm, [many], dense, 9)[0]
        assert [a.texts[0] for a in one_by_one] == forks.texts
        assert forks.tokens > len(many.prompt) + len(many.questions[0])
    finally:
        llm.tokenizer.chat_template = None


def test_questions_share_one_compressed_text(llm: LLM) -> None:
    """Forks answer as requests of their own do, and nothing of the question was seen."""
    case = Case(method="knorm", budget=0.25)
    many = make_job(llm, PROTOCOLS[2], CONTEXT, QUERIES)
    forks = answers_of(llm, [many], case, 9)[0]
    alone = [make_job(llm, PROTOCOLS[1], CONTEXT, [q]) for q in QUERIES]
    answers = answers_of(llm, alone, case, 9)
    assert forks.texts == [a.texts[0] for a in answers]
    assert forks.seen is not None
    assert forks.seen.prompt_tokens == len(many.prompt)
    assert forks.seen.budget == len(many.prompt) // 4
    kept = forks.seen.retained[0].positions
    assert min(len(row) for rows in kept.values() for row in rows) == len(many.prompt) // 4
    longest = max(map(len, many.questions))
    assert len(forks.seen.reads) == longest + 9 - 1


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_ends_when_it_holds_what_it_should(llm: LLM, overlap, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine, "overlap", overlap)  # as on a GPU
    job = make_job(llm, PROTOCOLS[1], CONTEXT, QUERIES[:1])
    full = Case(method="full")
    whole = answers_of(llm, [job], full, 30)[0]
    piece = whole.texts[0][:3]
    query = Query(question=QUERIES[0].question, cue=QUERIES[0].cue, wanted=(piece,))
    short = answers_of(llm, [make_job(llm, PROTOCOLS[1], CONTEXT, [query])], full, 30)[0]
    assert short.tokens < whole.tokens
    assert query.score(short.texts[0]) == 1
    assert whole.texts[0].startswith(short.texts[0])


def test_questions_are_put_in_captured_steps(model: str) -> None:
    """Given tokens get into replays, whose own tokens are those of eager steps."""
    found = []
    for graphs in (False, True):
        with LLM(
            model,
            quiet=True,
            kv_cache_memory_bytes="16MiB",
            attention_backend="reference",
            enable_methods=["full", "snapkv"],
        ) as llm:
            runner = llm.engine.runner
            if graphs:
                runner.graphs = rerun_of(llm)
            many = make_job(llm, PROTOCOLS[2], CONTEXT, QUERIES)
            cases = [Case(method="full"), Case(method="snapkv", budget=64)]
            asked = [prepare(llm, many, case.params(), 9) for case in cases]
            texts = {i: answers.texts for i, answers in ask(llm, asked)}
            logits, _ = forced_logits(llm, [many.prompt], 60, [cases[1].params()])
            found.append((texts, logits[0]))
            assert (runner.num_replays > 40) is graphs
    assert found[0][0] == found[1][0]
    assert torch.allclose(found[0][1], found[1][1], atol=1e-4)


def test_a_prompt_and_its_question_fit_into_the_model(llm: LLM) -> None:
    job = make_job(llm, PROTOCOLS[0], CONTEXT, QUERIES[:1])
    with pytest.raises(ConfigError, match="lower --lengths"):
        prepare(llm, job, Case(method="full").params(), 2000)


def test_bos_stands_in_front_once(llm: LLM) -> None:
    head, tail = split_prompt(llm, "a fox", QUERIES[0])
    usual = list(llm.tokenizer.encode("a fox"))
    assert head == usual
    assert llm.tokenizer.bos_token_id not in tail


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(["eval", "ruler", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_ruler_measures_resumes_and_draws(capsys, model, tmp_path) -> None:
    folder = tmp_path / "out"
    flags = [model, *SMALL, "--tasks", "niah_single_1,fwe", "--lengths", "800", "--samples", "1"]
    flags += ["--questions", "2", "--answer-tokens", "4", "--budgets", "0.25"]
    flags += ["--output", str(folder)]
    status, out, err = run(capsys, *flags, "--methods", "snapkv")
    assert status == 0, err
    data = json.loads(out.splitlines()[-1])
    rows = data["rows"]
    cells = {(r["protocol"], r["task"]) for r in rows}
    assert cells == {(p, "niah_single_1") for p in PROTOCOLS} | {(p, "fwe") for p in PROTOCOLS[:2]}
    assert list(data["skipped"]) == ["multi_question fwe"]
    assert [r["method"] for r in rows[::5]] == ["full", "random", "streaming_llm", "snapkv"]
    for row in rows:
        assert row["answers"] == (2 if row["protocol"] == PROTOCOLS[2] else 1)
        assert 0 <= row["low"] <= row["score"] <= row["high"] <= 1
        assert row["prompt_tokens"] + 4 <= 800
        dense = next(
            r for r in rows if (r["protocol"], r["task"]) == (row["protocol"], row["task"])
        )
        if row["method"] == "snapkv":
            assert row["budget_tokens"] == row["prompt_tokens"] // 4
            assert row["resident_bytes_per_token"] < 0.5 * dense["resident_bytes_per_token"]
            assert row["read_bytes_per_token"] < 0.5 * dense["read_bytes_per_token"]
    assert "<svg" in (folder / "plot.svg").read_text()
    samples = [json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()]
    assert len(samples) == sum(r["answers"] for r in rows)
    assert json.loads((folder / "aggregate.json").read_text()) == rows

    # a line that was cut off is measured again, nothing else is; another method is added
    journal = folder / "progress.jsonl"
    whole = journal.read_text().splitlines()
    journal.write_text("\n".join([*whole[:-1], whole[-1][:40]]))
    status, out, err = run(capsys, *flags, "--methods", "snapkv,tova", "--resume")
    assert status == 0, err
    again = json.loads(out.splitlines()[-1])["rows"]
    assert again[: len(rows)] == rows
    assert {r["method"] for r in again[len(rows) :]} == {"tova"}
    assert len(re.findall(r"^\S+ 0.25: \w+ ", err, re.M)) == 1 + 5

    status, _, err = run(capsys, *flags, "--text-seed", "1", "--resume")
    assert status == 2
    assert "text_seed=0, not 1" in err
    status, _, err = run(capsys, *flags, "--block-size", "8", "--resume")
    assert status == 2
    assert "engine_block_size=None, not '8'" in err


SHORT = ["--lengths", "600", "--samples", "2", "--questions", "2", "--answer-tokens", "3"]


def test_one_wave_or_many_an_engine_or_several(capsys, model, monkeypatch) -> None:
    """Neither what else the engine runs nor how much is given to it changes a row."""
    flags = [model, *SMALL, *SHORT, "--tasks", "niah_single_1,fwe", "--protocol", PROTOCOLS[0]]
    recorded, made = [], []
    prepare_, start = Intake.prepare, LLM.from_config.__func__

    def prepare_one(self, tokens, sampling, sparse, **extra):
        recorded.append(sparse.record)
        return prepare_(self, tokens, sampling, sparse, **extra)

    def start_one(cls, config, **extra):
        made.append(config.sparse.enable_methods)
        return start(cls, config, **extra)

    monkeypatch.setattr(Intake, "prepare", prepare_one)
    monkeypatch.setattr(LLM, "from_config", classmethod(start_one))
    names = "snapkv,adakv,snapkv:window=16:sink=2,quest"
    status, out, err = run(capsys, *flags, "--methods", names)
    assert status == 0, err
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert len(rows) == 2 * 7
    assert sum(recorded) == 7, "one question per case, protocol and length"
    assert len(recorded) == 7 + 2 * 2 * 7
    assert made[3:] == [("snapkv", "adakv"), (), ()], "alike storage is shared, by no selection"
    assert {r["method"] for r in rows[-6:]} == {"adakv", "snapkv:window=16:sink=2", "quest"}
    assert all(r["read_bytes_per_token"] > 0 for r in rows)
    assert rows[0]["resident_bytes_per_token"] > 2 * rows[6]["resident_bytes_per_token"]

    monkeypatch.setattr(waves, "WAVE_TOKENS", 1)
    status, out, err = run(capsys, *flags, "--methods", "adakv")
    assert status == 0, err
    alone = json.loads(out.splitlines()[-1])["rows"]
    assert alone == [*rows[:6], *(row for row in rows if row["method"] == "adakv")]


def test_a_request_that_fails_costs_its_own_cell(capsys, model, tmp_path, monkeypatch) -> None:
    method = METHODS.get("knorm")
    evict = method.evict

    def faulty(self, plan):
        if any(c.request.sampling.n == 2 for c in plan.chunks):
            raise RuntimeError("out of order")
        return evict(self, plan)

    monkeypatch.setattr(method, "evict", faulty)
    flags = [model, *SMALL, *SHORT, "--tasks", "qa", "--methods", "knorm"]
    flags += ["--samples", "1", "--output", str(tmp_path / "out")]
    status, out, err = run(capsys, *flags)
    assert status == 0, err
    data = json.loads(out.splitlines()[-1])
    what = "knorm 0.25: multi_question qa 600"
    assert list(data["skipped"]) == [what]
    assert "out of order" in data["skipped"][what]
    assert f"{what}: left out: " in err
    found = [r["protocol"] for r in data["rows"] if r["method"] == "knorm"]
    assert found == list(PROTOCOLS[:2])
    assert sum(r["method"] == "full" for r in data["rows"]) == 3

    monkeypatch.undo()
    status, out, err = run(capsys, *flags, "--resume")
    assert status == 0, err
    data = json.loads(out.splitlines()[-1])
    assert data["skipped"] == {}
    assert len(data["rows"]) == 4 * 3
    assert len(re.findall(r"^\S+ 0.25: \w+ ", err, re.M)) == 1


def test_a_case_that_is_refused_ends_the_run_before_it_begins(capsys, model) -> None:
    """Without all: nothing was asked yet."""
    flags = [model, "--num-gpu-blocks-override", "8", "--max-model-len", "2048", *SHORT]
    status, out, err = run(capsys, *flags, "--tasks", "niah_single_1")
    assert (status, out) == (2, "")
    assert "niah_single_1" not in err


def test_a_journal_refuses_what_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "progress.jsonl").write_text('{"settings": {}}\n{"nothing": 1}\n')
    with pytest.raises(ConfigError, match="damaged"):
        Journal(tmp_path, {}, resume=True)
    journal = Journal(tmp_path, {"a": 1}, resume=False)
    journal.add({"x": 1}, {"score": 1.0}, [{"answer": "y"}])
    again = Journal(tmp_path, {"a": 1}, resume=True)
    assert {"x": 1} in again
    assert again.take([{"x": 2}, {"x": 1}]) == ([{"score": 1.0}], [{"answer": "y"}])


def test_a_picture_has_every_point_and_panel(tmp_path) -> None:
    rng = random.Random(0)
    points = [
        Point(panel=p, method=m, resident=rng.random(), read=rng.random(), quality=rng.random())
        for p in ("first", "second")
        for m in ("x", "y")
    ]
    points.append(Point(panel="second", method="z", resident=1.0, read=None, quality=0.0))
    for name in ("1.svg", "2.svg"):
        draw(tmp_path / name, points, quality="KL", log=True)
    text = (tmp_path / "1.svg").read_text()
    assert text == (tmp_path / "2.svg").read_text()
    root = ElementTree.fromstring(text)
    assert len(root) == 4  # two panels, bytes held and bytes read
    tips = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(t.startswith("x: ") for t in tips) == 4
    assert sum(t.startswith("z: ") for t in tips) == 1
    assert any(t.startswith("z: ") and t.endswith("0.0001") for t in tips)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--tasks", "niah_singel_1"], "niah_single_1"),
        (["--protocol", "query_awre"], "query_aware"),
        (["--lengths", "10"], "tokens are too few"),
        (["--lengths", "0"], "--lengths"),
        (["--tasks", "cwe", "--protocol", "multi_question"], "--protocol"),
        (["--resume"], "--output"),
        (["--methods", "nothing"], "sparse method"),
    ],
)
def test_bad_input_is_one_error(capsys, model, flags: list[str], match: str) -> None:
    status, out, err = run(capsys, model, *SMALL, *flags)
    assert (status, out) == (2, "")
    assert match in err


def test_names_are_taken_once() -> None:
    assert names_of("--tasks", "b, a,b", ("a", "b", "c")) == ["b", "a"]
    assert names_of("--tasks", "all", ("a", "b")) == ["a", "b"]
