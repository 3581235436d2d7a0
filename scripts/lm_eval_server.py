"""Score a small task through lm-eval against a server, and again without either: is it the same?

lm-eval 0.4.13 lives in an environment of its own in the user's cache folder (760 MB, a minute), or
where `--lm-eval PYTHON` says. The script serves SmolLM2-135M, runs lm-eval unmodified as
`local-completions` (multiple choice by echo and logprobs, and generation) and as
`local-chat-completions`, and fails when a single number or text differs from `LLM`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import own_env
from sparseengine import LLM, SamplingParams

PIN = "lm-eval[api]==0.4.13"
FACTS = [
    ("The capital of France is", ["Paris", "Madrid", "Oslo"], 0),
    ("The opposite of hot is", ["warm", "cold", "red"], 1),
    ("Two plus two equals", ["five", "seven", "four"], 2),
    ("A young dog is called a", ["puppy", "kitten", "calf"], 0),
    ("The Sun rises in the", ["west", "east", "night"], 1),
    ("Water is made of hydrogen and", ["iron", "gold", "oxygen"], 2),
    ("Bees make", ["honey", "milk and cheese", "paper"], 0),
    ("The largest planet is", ["Mars", "Jupiter", "the Moon"], 1),
]
CHOICE = """
task: facts_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """
task: facts_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""
SLACK = 1e-4  # per token: batches of other shapes round otherwise


def write_tasks(folder: Path) -> None:
    file = folder / "facts.jsonl"
    rows = [{"text": t, "choices": c, "label": i} for t, c, i in FACTS]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    for name, text in (("choice", CHOICE), ("text", TEXT)):
        (folder / f"{name}.yaml").write_text(text.format(file=file), encoding="utf-8")


def start_server(model: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "sparseengine.cli.main", "serve", model, "--port", "0"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", "--no-access-log"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if line.startswith("serving"):
            return server, line.split()[1]
    raise SystemExit("the server does not start")


def run_harness(
    python: str, kind: str, url: str, model: str, tasks: str, folder: Path, *more: str
) -> dict[str, Any]:
    """{task: (results, samples)} of one run of lm-eval."""
    out = folder / kind
    given = f"base_url={url},model={model},num_concurrent=4,max_length=512"
    command = [python, "-m", "lm_eval", "run", "--model", kind, "--model_args", given]
    command += ["--tasks", tasks, "--include_path", str(folder), "--log_samples"]
    command += ["--output_path", str(out), *more]
    home = {"HF_HOME": str(folder / "hf"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env={**os.environ, **home}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lm-eval failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    found = {}
    for task in tasks.split(","):
        file = next(out.rglob(f"samples_{task}_*.jsonl"))
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        found[task] = (results[task], sorted(samples, key=lambda s: s["doc_id"]))
    return found


def check_choices(llm: LLM, results: dict[str, Any], samples: list[dict[str, Any]]) -> dict:
    """Every choice's log-probability, whether it is greedy, and the accuracy."""
    tokenizer = llm.tokenizer
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    worst, right = 0.0, 0
    for (text, choices, label), sample in zip(FACTS, samples, strict=True):
        sums = []
        for choice, response in zip(choices, sample["filtered_resps"], strict=True):
            start = len(tokenizer.encode(text))
            ids = tokenizer.encode(f"{text} {choice}")
            rows = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs[start:]
            own = [row[t] for t, row in zip(ids[start:], rows, strict=True)]
            sums.append(sum(p.logprob for p in own))
            theirs, greedy = float(response[0]), str(response[1]) == "True"
            worst = max(worst, abs(theirs - sums[-1]) / len(own))
            assert greedy == all(p.rank == 1 for p in own), (text, choice)
        right += sums.index(max(sums)) == label
    assert worst <= SLACK, worst
    assert abs(results["acc,none"] - right / len(FACTS)) < 1e-9, results
    return {"acc": results["acc,none"], "offline_acc": right / len(FACTS), "worst": worst}


def check_texts(expected: list[str], results: dict[str, Any], samples: list[dict]) -> dict:
    got = [s["filtered_resps"][0] for s in samples]
    assert got == expected, list(zip(got, expected, strict=True))
    return {"exact_match": results["exact_match,none"], "texts_equal": len(got)}


def compare(python: str, model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        server, base = start_server(model)
        try:
            url = f"{base}/v1/completions"
            plain = run_harness(
                python, "local-completions", url, model, "facts_choice,facts_text", folder
            )
            url = f"{base}/v1/chat/completions"
            chat = run_harness(
                python, "local-chat-completions", url, model, "facts_text", folder,
                "--apply_chat_template",
            )  # fmt: skip
        finally:
            server.terminate()
            server.wait(60)
    params = SamplingParams(temperature=0, max_tokens=12, stop=["\n"])
    texts = [t for t, _, _ in FACTS]
    with LLM(model, max_model_len=512, quiet=True) as llm:
        written = [o.outputs[0].text for o in llm.generate(texts, params, use_tqdm=False)]
        talks = [[{"role": "user", "content": t}] for t in texts]
        said = [o.outputs[0].text for o in llm.chat(talks, params, use_tqdm=False)]
        return {
            "local-completions": {
                "facts_choice": check_choices(llm, *plain["facts_choice"]),
                "facts_text": check_texts(written, *plain["facts_text"]),
            },
            "local-chat-completions": {"facts_text": check_texts(said, *chat["facts_text"])},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm-eval", metavar="PYTHON", help="a Python that has lm-eval")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    python = args.lm_eval or str(own_env.environment("lm-eval", (PIN,), torch=False))
    print(json.dumps(compare(python, args.model), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
