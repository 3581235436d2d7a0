"""`serve`, `bench serve` and `chat --base-url` as commands: flags, results, what they refuse."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.servers import Served
from sparseengine.cli.main import main, parser_of
from sparseengine.errors import ConfigError
from sparseengine.server.settings import server_settings

ROOT = Path(__file__).resolve().parents[2]


def settings(*words: str) -> Any:
    return server_settings(parser_of("serve").parse_args(["some-model", *words]))


def test_defaults_are_safe() -> None:
    found = settings()
    assert (found.host, found.port) == ("127.0.0.1", 8000)
    assert found.allowed_origins == ()
    assert not found.log_requests


def test_a_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEENGINE_API_KEY", "from-env")
    assert settings("--api-key", "a", "b").api_keys == ("a", "b", "from-env")
    assert "from-env" not in repr(parser_of("serve").parse_args(["m"]))


FILE = """
model: some-model
max_model_len: 1K
port: 9001
served-model-name: [one, two]
server:
  api_key: "secret,with a comma"
  max-body-bytes: 1M
  reasoning_parser: qwen3
"""


def test_a_file_gives_what_flags_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(FILE)
    found = settings("--config", str(file), "--port", "9002", "--no-access-log")
    assert (found.port, found.max_body_bytes, found.access_log) == (9002, 1 << 20, False)
    assert found.served_model_names == ("one", "two")
    assert found.api_keys == ("secret,with a comma",)
    assert found.reasoning_parser == "qwen3"
    assert str(found.origins["port"]) == f"9002 (cli: --port; over 9001 from {file}: port; " + (
        "over 8000 from built in)"
    )
    monkeypatch.setenv("SPARSEENGINE_API_KEY", "another")
    assert settings("--config", str(file)).api_keys[1:] == ("another",)
    words = ["--config", str(file), "--port", "9002"]
    assert main(["config", "explain", "port", *words]) == 0
    assert f"9002 (cli: --port; over 9001 from {file}: port" in capsys.readouterr().out
    assert main(["config", "show", "--json", *words]) == 0
    shown = capsys.readouterr().out
    rows = {r["name"]: r for r in json.loads(shown)}
    assert rows["server.api_key"]["value"] == "<2 keys>"
    assert rows["server.max_body_bytes"]["source"] == "file"
    assert rows["model.max_model_len"]["value"] == 1024
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 70000", "port: 70000 is not allowed; it must be in"),
        ("max_queue: many", "max_queue: 'many' is not allowed; it must be an integer"),
        ("server: {prot: 1}", "unknown key 'prot' in section server"),
        ("server: [1]", "server must hold names"),
        ("port: 1\nserver: {port: 2}", "'port' is given twice"),
        ("hosts: x", "did you mean 'host'"),
        ("api_key: {secret: 1}", "api_key: it must be a text or a list of texts"),
    ],
)
def test_wrong_keys_of_a_file_are_named_by_every_command(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    for words in (["serve", "m"], ["config", "show"], ["generate", "m", "-p", "x"]):
        assert main([*words, "--config", str(file)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "secret" not in error


@pytest.mark.parametrize(
    "words",
    [
        ("--port", "70000"),
        ("--max-queue", "-1"),
        ("--max-n", "0"),
        ("--health-timeout", "0"),
        ("--client-timeout", "nan"),
        ("--log-text",),
        ("--enable-auto-tool-choice",),
        ("--chat-template", "/no/such/file"),
        ("--tool-call-parser", "no_such_parser"),
        ("--reasoning-parser", "no_such_parser"),
    ],
)
def test_wrong_flags_name_themselves(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*words)
    text = str(caught.value)
    assert words[0] in text or "parser" in text


def test_a_template_is_a_file_or_its_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert settings("--chat-template", str(file)).chat_template == "{{ messages }}"
    assert settings("--chat-template", "{{ x }}").chat_template == "{{ x }}"


def test_serve_says_what_is_wrong_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_bench_serve(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--base-url", served.url, "--num-prompts", "6"]
    words += ["--input-len", "20", "--output-len", "5", "--vocab-size", "290"]
    words += ["--max-concurrency", "3", "--request-rate", "500"]
    words += ["--sparse", '{"method": "snapkv", "budget": 32}']
    assert main(words) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["completed"], row["failed"]) == (6, 0)
    assert row["output_tok_s"] * row["seconds"] == pytest.approx(30, rel=0.05)
    assert row["ttft_ms"][0] <= row["e2e_ms"][0]
    assert main([*words, "--model", "other"]) == 2
    assert "every request failed" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2


def test_chat_with_a_server(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the quick\n/reset\nthe quick\n"))
    words = ["chat", "--base-url", served.v1, "--max-tokens", "6", "--system", "be brief"]
    assert main(words) == 0
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick"}]
    wanted = served.post(
        "/v1/chat/completions", {"messages": talk, "max_tokens": 6, "temperature": 0}
    ).json()["choices"][0]["message"]["content"]
    assert capsys.readouterr().out == f"{wanted}\n" * 2
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--base-url", served.url, "--max-tokens", "9999"]) == 0
    assert "maximum context length" in capsys.readouterr().err
    assert main(["chat", "some-model", "--base-url", served.url]) == 2
    assert main(["chat", "--base-url", "http://127.0.0.1:9"]) == 2
