"""The command line: quick help, every command on a tiny model, bad input ends with status 2."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures.engines import VOCAB, save_checkpoint
from sparseengine.cli.demo import DemoCase, read_cases
from sparseengine.cli.main import COMMANDS, SUMMARIES, main, parser_of
from sparseengine.longtext import is_right, make_puzzle

SMALL = ["--kv-cache-memory-bytes", "4MiB", "--max-num-seqs", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny Llama with a byte-level tokenizer that has no chat template."""
    return str(save_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture
def run(capsys):
    """Run a command in this process -> (status, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            status = main(list(argv))
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sparseengine.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'numba'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    best = 60.0
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - start)
    assert best < 0.5


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_parses_without_torch(name: str) -> None:
    code = (
        f"import sys; from sparseengine.cli.main import parser_of; parser_of({name!r});"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_of_the_package_is_light_and_names_load_on_use() -> None:
    code = (
        "import sys, sparseengine; assert 'torch' not in sys.modules;"
        "sparseengine.SamplingParams(max_tokens=1); assert 'torch' not in sys.modules;"
        "assert sparseengine.LLM.__name__ == 'LLM'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_usage_lists_every_command(run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert all(f"  {name}" in out for name in SUMMARIES)
    assert set(SUMMARIES) == set(COMMANDS)
    assert run("--version")[1].startswith("sparseengine 0.")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_flag_has_help(name: str) -> None:
    for action in parser_of(name)._actions:
        assert action.help, action.option_strings
    assert name in parser_of(name).format_help()


def test_generate_json_equals_the_api(run, model) -> None:
    from sparseengine import LLM, SamplingParams

    ids = [3, 14, 15, 92, 65]
    status, out, _ = run(
        *["generate", model, "--prompt-token-ids", ",".join(map(str, ids)), "--json"],
        *["--max-tokens", "6", "--ignore-eos", "--logprobs", "2", *SMALL],
    )
    assert status == 0
    answer = json.loads(out)[0]
    assert answer["prompt_tokens"] == 5
    assert answer["completion_tokens"] == 6
    assert len(answer["outputs"][0]["logprobs"]) == 6
    with LLM(model, quiet=True, kv_cache_memory_bytes="4MiB", max_num_seqs=4) as llm:
        want = llm.generate(
            [ids], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False
        )
    assert answer["outputs"][0]["token_ids"] == want[0].outputs[0].token_ids


def test_generate_records_what_was_kept(run, model) -> None:
    prompt = ",".join(str(3 + i % 90) for i in range(100))
    status, out, _ = run(
        *["generate", model, "--prompt-token-ids", prompt, "--json", "--record", "--ignore-eos"],
        *["--sparse-method", "knorm", "--kv-budget", "0.5", "--max-tokens", "3", *SMALL],
        *["--sparse-config", '{"skip_layers": [], "recent": 8}'],
    )
    assert status == 0
    sparse = json.loads(out)[0]["outputs"][0]["sparse"]
    assert (sparse["method"], sparse["budget"]) == ("knorm", 50)
    rows = sparse["retained"][0]["positions"]
    assert set(rows) == {"0", "1", "2"}
    assert all(len(head) == 50 for layer in rows.values() for head in layer)


def test_explain_says_where_values_come_from_and_which_routes_lost(run, model) -> None:
    flags = ["--sparse-method", "snapkv", "--kv-budget", "0.25", "--max-model-len", "512"]
    status, out, _ = run("explain", model, *flags, "--json", "--prompt-len", "400")
    assert status == 0
    data = json.loads(out)
    assert data["values"]["model.max_model_len"]["source"] == "cli"
    assert data["values"]["model.dtype"]["source"] == "device"
    assert data["values"]["model.dtype"]["shadowed"][0]["value"] == "auto"
    route = data["routes"][0]
    assert route["layers"] == [0, 1, 2]
    assert {r["route"] for r in route["rejected"]} | {route["selected"]} >= {"cpu", "reference"}
    assert all(r["reason"] for r in route["rejected"])
    assert data["methods"][0]["demand"]["budget_tokens"] == 100
    assert data["methods"][0]["demand"]["peak_tokens"] >= 400
    assert data["cache_plan"]
    status, text, _ = run("explain", model, *flags)
    assert status == 0
    assert "--max-model-len" in text
    assert "not reference" in text or "reference (" in text


def test_methods_lists_the_registry(run) -> None:
    from sparseengine.methods import METHODS
    from sparseengine.methods.prefill import PATTERNS

    status, out, _ = run("methods", "--json")
    assert status == 0
    rows = json.loads(out)
    assert [row["name"] for row in rows] == [*METHODS, *PATTERNS]
    assert all(row["traits"]["prefill_policy"] for row in rows[: len(list(METHODS))])
    assert all(row["family"] == "prefill" for row in rows[len(list(METHODS)) :])
    assert all(knob["doc"] for row in rows for knob in row["knobs"])
    assert all(name in run("methods")[1] for name in [*METHODS, *PATTERNS])
    assert "window" in run("methods", "snapkv")[1]
    assert "antidiagonal" in run("methods", "xattention")[1]
    status, _, err = run("methods", "xatention")
    assert status == 2
    assert "unknown method or prefill pattern 'xatention'" in err
    assert "'xattention'" in err


def test_explain_runs_a_prompt_and_shows_what_is_kept_and_read(run, model) -> None:
    prompt = ["-p", "the quick brown fox " * 24, "--enable-methods", "snapkv,quest"]
    evicting = ["--sparse-method", "snapkv", "--kv-budget", "24"]
    status, out, _ = run("explain", model, *prompt, *evicting, "--json")
    assert status == 0
    record = json.loads(out)["record"]
    assert record["prompt_tokens"] > 24
    kept = record["retained"][0]
    assert all(len(head) == 24 for heads in kept["positions"].values() for head in heads)
    _, text, _ = run("explain", model, *prompt, *evicting)
    assert f"resident after the prompt: {kept['resident_bytes']:,} bytes" in text
    selecting = ["--sparse-method", "quest", "--kv-budget", "32", "--block-size", "4"]
    knobs = ["--sparse-config", '{"dense_layers": 1, "min_pages": 1}']
    _, out, _ = run("explain", model, *prompt, *selecting, *knobs, "--json")
    reads = json.loads(out)["record"]["reads"]
    assert len(reads) == 4
    assert "0" not in reads[0]["positions"]
    assert all(28 < len(head) <= 32 for head in reads[0]["positions"]["1"])


def test_config_shows_and_explains(run, tmp_path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"seed": 5}')
    status, out, _ = run("config", "show", "--json", "--config", str(file), "--block-size", "32")
    rows = {row["name"]: row for row in json.loads(out)}
    assert status == 0
    assert (rows["model.seed"]["value"], rows["model.seed"]["source"]) == (5, "file")
    assert rows["cache.block_size"]["over"] == "16 from built in"
    assert "--block-size" in run("config", "explain", "block-size", "--block-size", "32")[1]


def test_doctor_tries_the_model(run, model) -> None:
    status, out, _ = run("doctor", model, "--json", *SMALL)
    assert status == 0
    data = json.loads(out)
    assert data["engine"]["generated_tokens"] == 4
    assert data["engine"]["memory"]["fits"][0]["requests"] > 0
    assert any(row["works"] for row in data["backends"])
    assert all(row["reason"] for row in data["backends"])
    assert "requests of" in run("doctor", model, *SMALL)[1]


def test_bench_always_includes_dense_and_ends_with_one_json_line(run, model, tmp_path) -> None:
    status, out, _ = run(
        *["bench", "throughput", model, "--methods", "quest,snapkv", "--kv-budget", "32"],
        *["--input-len", "70", "--output-len", "9", "--batch-size", "1,2", "--repeats", "2"],
        *["--output", str(tmp_path / "run"), *SMALL, "--compare-transformers"],
    )
    assert status == 0
    line = json.loads(out.strip().splitlines()[-1])
    labels = [(row["method"], row["batch"]) for row in line["rows"]]
    methods = ("full", "quest", "snapkv", "transformers")
    assert labels == [(m, b) for m in methods for b in (1, 2)]
    for row in line["rows"]:
        assert row["full_steps"] >= 10
        low, high = row["step_ms"][1:]
        assert low <= row["step_ms"][0] <= high
        assert row["decode_vs_dense"] > 0
        assert row["decode_vs_transformers"] > 0
    by_label = dict(zip(labels, line["rows"], strict=True))
    dense, sparse = by_label["full", 2], by_label["snapkv", 2]
    assert sparse["kv_bytes_per_request"] < dense["kv_bytes_per_request"]
    info = json.loads((tmp_path / "run" / "run_info.json").read_text())
    assert info["threads"] >= 1
    raw = (tmp_path / "run" / "raw.jsonl").read_text().splitlines()
    assert len([x for x in raw if '"prefill_s"' in x]) == 16
    assert json.loads((tmp_path / "run" / "aggregate.json").read_text()) == line["rows"]


def test_bench_max_batch_is_what_fits(run, model) -> None:
    status, out, _ = run(
        *["bench", "throughput", model, "--input-len", "48", "--output-len", "8"],
        *["--batch-size", "max", "--num-gpu-blocks-override", "9", "--device", "cpu"],
    )
    assert status == 0
    rows = json.loads(out.strip().splitlines()[-1])["rows"]
    assert [row["batch"] for row in rows] == [2]  # 9 pages of 16 tokens, 4 for each request


SNAP = ["--sparse-method", "snapkv"]
TWO = ["--prompt-token-ids", "5,6"]
FLEX = ["--sparse-prefill", "flexprefill"]
LONG = ["--prompt-token-ids", "5," * 100 + "5"]
BAD = {
    "no such folder": ["generate", "/no/such/model", "-p", "x"],
    "no model": ["generate", "-p", "x"],
    "unknown command": ["generat"],
    "unknown bench": ["bench", "speed"],
    "unknown flag": ["generate", "MODEL", "--max-modle-len", "3"],
    "unknown method": ["generate", "MODEL", "-p", "x", "--sparse-method", "snapvk"],
    "unknown enabled method": ["generate", "MODEL", "-p", "x", "--enable-methods", "qest"],
    "unknown knob": ["explain", "MODEL", *SNAP, "--sparse-config", '{"windw": 3}'],
    "knob value": ["explain", "MODEL", *SNAP, "--sparse-config", '{"window": -3}'],
    "knobs not JSON": ["generate", "MODEL", "-p", "x", "--sparse-config", "window=3"],
    "unknown pattern": ["generate", "MODEL", "-p", "x", "--sparse-prefill", "flexprefil"],
    "pattern knob": ["explain", "MODEL", *FLEX, "--sparse-prefill-config", '{"gama": 0.9}'],
    "pattern value": ["explain", "MODEL", *FLEX, "--sparse-prefill-config", '{"gamma": 9}'],
    "pattern knobs alone": ["explain", "MODEL", "--sparse-prefill-config", '{"gamma": 0.9}'],
    "pattern not possible": ["explain", "MODEL", *FLEX, "--deterministic"],
    "budget 0": ["generate", "MODEL", "-p", "x", "--sparse-method", "snapkv", "--kv-budget", "0"],
    "budget negative": ["explain", "MODEL", "--sparse-method", "snapkv", "--kv-budget", "-4"],
    "ratio above 1": ["explain", "MODEL", "--sparse-method", "snapkv", "--kv-budget", "1.5"],
    "budget for dense": ["explain", "MODEL", "--kv-budget", "0.5"],
    "limit above the model's": ["explain", "MODEL", "--max-model-len", "2K"],
    "no length": ["explain", "MODEL", "--max-model-len", "0"],
    "unknown backend": ["explain", "MODEL", "--attention-backend", "cpuu"],
    "dtype": ["explain", "MODEL", "--dtype", "int8"],
    "page size": ["explain", "MODEL", "--block-size", "10"],
    "empty prompt": ["generate", "MODEL", "-p", ""],
    "prompt too long": ["generate", "MODEL", "--prompt-token-ids", "5," * 1100 + "5"],
    "token out of range": ["generate", "MODEL", "--prompt-token-ids", f"1,{VOCAB}"],
    "token negative": ["generate", "MODEL", "--prompt-token-ids", "1,-1"],
    "tokens not numbers": ["generate", "MODEL", "--prompt-token-ids", "1,x"],
    "no chat template": ["generate", "MODEL", "-p", "text", "--chat"],
    "NaN temperature": ["generate", "MODEL", "-p", "x", "--temperature", "nan"],
    "negative temperature": ["generate", "MODEL", "-p", "x", "--temperature=-1"],
    "top_p 0": ["generate", "MODEL", "-p", "x", "--top-p", "0"],
    "max_tokens 0": ["generate", "MODEL", "-p", "x", "--max-tokens", "0"],
    "n huge": ["generate", "MODEL", "-p", "x", "--n", "10000000"],
    "max_tokens huge": ["generate", "MODEL", "-p", "x", "--max-tokens", "1000000000000"],
    "logit bias": ["generate", "MODEL", "-p", "x", "--logit-bias", "{"],
    "no KV memory": ["generate", "MODEL", *TWO, "--kv-cache-memory-bytes", "100"],
    "never fits": ["generate", "MODEL", *LONG, "--num-gpu-blocks-override", "3"],
    "config file": ["generate", "MODEL", "-p", "x", "--config", "/no/file.yaml"],
    "pull": ["pull", "smollm"],
    "record without json": ["generate", "MODEL", *TWO, "--record"],
    "prompt length": ["explain", "MODEL", "--prompt-len", "0"],
    "artefacts": ["bench", "throughput", "MODEL", "--output", "/dev/null/x"],
    "bench output": ["bench", "throughput", "MODEL", "--output-len", "2"],
    "bench batch": ["bench", "throughput", "MODEL", "--batch-size", "none"],
    "hyper params": ["bench", "throughput", "MODEL", "--hyper-params", '{"qest": {}}'],
    "config name": ["config", "explain", "blok-size"],
    "unknown shape": ["explain", "--load-format", "dummy", "--hf-config", "qwen3-9b"],
}
HINTS = {
    "no such folder": "/no/such/model",
    "no model": "--model",
    "unknown command": "'generate'",
    "unknown bench": "throughput",
    "unknown flag": "--max-modle-len",
    "unknown method": "'snapkv'",
    "unknown enabled method": "'quest'",
    "unknown knob": "'window'",
    "unknown pattern": "'flexprefill'",
    "pattern knob": "'gamma'",
    "pattern value": "a number in [0.0, 1.0]",
    "pattern knobs alone": "dense: unknown knob 'gamma'",
    "pattern not possible": "no sparse prefill",
    "budget 0": "(0, 1]",
    "ratio above 1": "(0, 1]",
    "limit above the model's": "1024",
    "unknown backend": "'cpu'",
    "page size": "power of two",
    "empty prompt": "empty",
    "prompt too long": "1023",
    "token out of range": str(VOCAB - 1),
    "no chat template": "chat template",
    "NaN temperature": "temperature=nan",
    "top_p 0": "top_p",
    "never fits": "KV pages",
    "pull": "smollm2-135m",
    "config name": "'block_size'",
    "unknown shape": "'qwen3-8b'",
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_one_paragraph_and_status_2(run, model, case) -> None:
    argv = [model if word == "MODEL" else word for word in BAD[case]]
    status, out, err = run(*argv)
    assert status == 2, err
    assert out == ""
    assert "Traceback" not in err
    message = err[err.rindex("error:") :]
    assert len(message.strip().splitlines()) == 1
    assert len(message) > 25
    assert HINTS.get(case, "") in message


@pytest.mark.parametrize(
    "damage", ["weights", "config", "architecture", "empty", "gguf", "missing"]
)
def test_damaged_models_are_refused(run, model, tmp_path, damage) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    config = folder / "config.json"
    target = str(folder)
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "config":
        config.write_text("{")
    elif damage == "architecture":
        data = {**json.loads(config.read_text()), "architectures": ["Nothing"], "model_type": "no"}
        config.write_text(json.dumps(data))
    elif damage == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif damage == "gguf":
        target = str(folder / "m.gguf")
        Path(target).write_bytes(b"GGUF\x03\x00\x00\x00 broken")
    else:
        weights.unlink()
    status, _, err = run("generate", target, "--prompt-token-ids", "5,6", *SMALL)
    assert status == 2, err
    assert "Traceback" not in err
    assert str(folder) in err or "Nothing" in err


def test_prompt_comes_from_standard_input(run, model, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    piped = run("generate", model, "--max-tokens", "3", "--quiet", *SMALL)
    assert piped[0] == 0
    assert piped[1] == run("generate", model, "-p", "hello", "--max-tokens", "3", *SMALL)[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "empty" in run("generate", model, *SMALL)[2]


def test_chat_streams_answers_and_survives_a_bad_turn(run, tmp_path, model, monkeypatch) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    lines = ["hi", "x" * 3000, "", "again", "/reset", "hi", "/quit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    status, out, err = run("chat", str(folder), "--max-tokens", "4", "--ignore-eos", *SMALL)
    assert status == 0
    assert "error: the prompt has" in err
    answers = out.splitlines()
    assert answers[0] == answers[-1]  # the same conversation after /reset
    assert len(answers) == 3


def test_the_demo_text_holds_its_answer_once_in_the_middle() -> None:
    puzzle = make_puzzle(lambda text: len(text.split()), 2000, seed=3)
    assert puzzle.message.count(puzzle.answer) == 1
    at = puzzle.message.index(puzzle.answer) / len(puzzle.message)
    assert 0.4 < at < 0.6
    assert puzzle.message.endswith("number only.")
    assert make_puzzle(lambda text: len(text.split()), 2000, seed=3) == puzzle
    assert is_right(f"It is {puzzle.answer[:2]} {puzzle.answer[2:]}.", puzzle)
    assert not is_right("It is 1", puzzle)


def test_the_demo_runs_what_the_project_promises() -> None:
    cases = read_cases(None)
    assert [(c.method, c.ratio or c.budget, c.expect) for c in cases] == [
        ("full", None, "right"),
        ("snapkv", 0.25, "right"),
        ("quest", 512, "right"),
        ("streaming_llm", 0.25, "wrong"),
        ("random", 0.25, "any"),
    ]
    assert DemoCase(method="a", expect="wrong").holds(False)
    assert not DemoCase(method="a", expect="wrong").holds(True)


def test_pull_reports_a_misspelt_variable_and_reads_the_right_one(
    run, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("SPARSEENGINE_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="did you mean 'SPARSEENGINE_CACHE_DIR'"):
        run("pull")
    monkeypatch.delenv("SPARSEENGINE_CACHE")
    monkeypatch.setenv("SPARSEENGINE_CACHE_DIR", str(tmp_path))
    assert run("pull")[1].splitlines()[0].split() == ["smollm2-135m", "not", "pulled"]
