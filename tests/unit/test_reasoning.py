"""Reasoning and content, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseengine.errors import ConfigError
from sparseengine.server.reasoning import splitter_for, structure_begins_after

THINK = "<think>\nHmm, < 3 </thin k>\n\nso\n</think>\n\nThe answer: </think> is a tag.\n"
PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "think>", "\n", " ", "a", "안", "😀"])
)


def stream(text: str, cuts: list[int], name: str, prompt: str | None = None):
    splitter = splitter_for(name, prompt=prompt)
    ends = sorted({min(c, len(text)) for c in cuts} | {len(text)})
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    deltas = [*map(splitter.push, parts), splitter.finish()]
    return "".join(r for r, _ in deltas), "".join(c for _, c in deltas), deltas


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", None, THINK, "Hmm, < 3 </thin k>\n\nso", "The answer: </think> is a tag.\n"),
        ("deepseek_r1", None, "a\n</think>\n\nb", "a", "b"),
        ("deepseek-r1", None, "<think>a</think>b", "a", "b"),
        ("glm45", None, "\n<think></think>\nhi", "", "hi"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "a</think>b", "a", "b"),
        ("qwen3", "<think>\n\n</think>\n\n", "just an answer", "", "just an answer"),
        ("deepseek_r1", "no tag", " answer ", "", " answer "),
        ("glm45", None, "<", "", "<"),
        ("qwen3", None, "<think>cut off </thi", "cut off </thi", ""),
        ("qwen3", None, "", "", ""),
        ("deepseek_r1", None, "never closed", "never closed", ""),
    ],
)
def test_splits_at_every_character(name, prompt, text, reasoning, content) -> None:
    for cut in range(len(text) + 1):
        assert stream(text, [cut], name, prompt)[:2] == (reasoning, content)
    assert stream(text, list(range(len(text))), name, prompt)[:2] == (reasoning, content)
    whole = splitter_for(name, prompt=prompt).split(text)
    assert whole == (reasoning or None, content or None)


def test_no_part_of_a_tag_is_shown_while_it_comes() -> None:
    deltas = stream("<think>a b</think>c", list(range(30)), "qwen3")[2]
    assert [d for d in deltas if d != ("", "")] == [("a", ""), (" b", ""), ("", "c")]


@given(PIECES.map("".join), st.lists(st.integers(0, 60)), st.sampled_from(["qwen3", "deepseek_r1"]))
def test_any_text_in_any_pieces(text: str, cuts: list[int], name: str) -> None:
    reasoning, content, _ = stream(text, cuts, name)
    assert (reasoning or None, content or None) == splitter_for(name).split(text)
    if "<think>" not in text and name == "qwen3":
        assert (reasoning, content) == ("", text)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'deepseek_r1'"):
        splitter_for("deepseek_r2")


def test_a_structured_answer_waits_for_reasoning_that_the_prompt_began() -> None:
    assert structure_begins_after("<|im_start|>assistant\n<think>\n") == "</think>"
    assert structure_begins_after("<think>\n\n</think>\n\n") is None
    assert structure_begins_after("<|im_start|>assistant\n") is None
