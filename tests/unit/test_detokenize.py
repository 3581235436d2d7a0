"""Streaming text: no broken characters, no leaked stop strings, deltas that add up."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.engines import EOS, make_tokenizer
from sparseengine.engine.detokenize import Detokenizer

REPLACEMENT = "�"
TEXTS = [
    "plain ascii, with punctuation!",
    "안녕하세요 세계, 오늘은 날씨가 좋네요",
    "emoji 😀👍🏽 and 👨‍👩‍👧‍👦 families",
    "mixed 한글 and ünïcödé — “quotes” 漢字",
    "  leading and trailing spaces  ",
]


@cache
def tokenizer() -> Any:
    return make_tokenizer()


def backend() -> Any:
    return tokenizer().backend_tokenizer


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def full(ids: list[int], skip: bool = True) -> str:
    return str(backend().decode(ids, skip_special_tokens=skip))


def stream(ids: list[int], **options: Any) -> tuple[list[str], str | None]:
    """Deltas, the last one from `finish`, and the stop string that was hit."""
    text = Detokenizer(backend(), **options)
    deltas, shown, hit = [], "", None
    for token in ids:
        hit = text.push(token)
        assert text.text.startswith(shown), "text was taken back"
        deltas.append(text.text[len(shown) :])
        shown = text.text
        if hit is not None:
            return deltas, hit
    hit = text.finish()
    assert text.text.startswith(shown)
    return [*deltas, text.text[len(shown) :]], hit


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_add_up_without_replacement_characters(text: str) -> None:
    ids = ids_of(text)
    assert len(ids) > 5
    deltas, hit = stream(ids)
    assert hit is None
    assert "".join(deltas) == text == full(ids)
    assert not any(REPLACEMENT in d for d in deltas)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=40))
def test_any_tokens_add_up_to_the_full_decode(ids: list[int]) -> None:
    """Broken bytes included: U+FFFD appears exactly where the full decode has it."""
    ids = [i for i in ids if i < backend().get_vocab_size()]
    deltas, _ = stream(ids)
    assert "".join(deltas) == full(ids)


def test_an_unfinished_character_is_emitted_at_the_end_only() -> None:
    ids = ids_of("한")[:-1]
    deltas, _ = stream(ids)
    assert deltas[:-1] == [""] * len(ids)
    assert "".join(deltas) == full(ids)


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*ids_of("fox"), EOS]
    assert "".join(stream(ids)[0]) == "fox"
    assert "".join(stream(ids, skip_special_tokens=False)[0]) == "fox</s>"


def letters(*parts: str) -> list[int]:
    """Each part must be made of one token per character: upper case is not in the merges."""
    ids = [i for p in parts for i in ids_of(p)]
    return ids


def test_no_prefix_of_a_stop_string_leaks() -> None:
    """DEF, G, HI, J arrive one by one (case 15)."""
    deltas, hit = stream(letters("abc", "DEF", "G", "HI", "J"), stop=["DEFGHIJ"])
    assert hit == "DEFGHIJ"
    assert "".join(deltas) == "abc"


def test_a_prefix_that_turns_out_harmless_is_emitted() -> None:
    deltas, hit = stream(letters("abcDEFX"), stop=["DEFGHIJ"])
    assert hit is None
    assert "".join(deltas) == "abcDEFX"


def test_a_prefix_at_the_end_is_emitted_by_finish() -> None:
    deltas, hit = stream(letters("abcDEF"), stop=["DEFGHIJ"])
    assert hit is None
    assert deltas[-1] == "DEF"


def test_a_split_stop_string_does_not_leak_half() -> None:
    """Case 16."""
    deltas, hit = stream(ids_of("The quick brown fox"), stop=["own fox"])
    assert hit == "own fox"
    assert "".join(deltas) == "The quick br"


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [("stop!", "op", "st"), ("end ...", "..", "end "), ("the lazy dog", " l", "the")],
)
def test_stop_within_one_token_cuts_exactly(text: str, stop: str, want: str) -> None:
    """Case 19: `..` in the token `...`, `op` in `stop`."""
    deltas, hit = stream(ids_of(text), stop=[stop])
    assert hit == stop
    assert "".join(deltas) == want
    deltas, _ = stream(ids_of(text), stop=[stop], include_stop=True)
    assert "".join(deltas) == want + stop


def test_the_first_stop_string_to_end_wins_then_the_longest() -> None:
    ids = ids_of("xxABCD")
    assert stream(ids, stop=["ABCD", "BC"])[1] == "BC"
    assert stream(ids, stop=["BC", "ABC", "C"])[1] == "ABC"


def test_min_tokens_lets_early_stops_pass() -> None:
    ids = ids_of("AAAABAAAB")
    assert len(ids) == 9
    deltas, hit = stream(ids, stop=["B"], min_tokens=6)
    assert hit == "B"
    assert "".join(deltas) == "AAAABAAA"


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ABC한 ", min_size=1, max_size=25),
    st.lists(st.text(alphabet="ABC한 ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_equal_a_search_character_by_character(text: str, stops: list[str]) -> None:
    deltas, hit = stream(ids_of(text), stop=stops)
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            want = text[: end - max(map(len, found))]
            assert hit in found
            break
    else:
        want = text
        assert hit is None
    assert "".join(deltas) == want
