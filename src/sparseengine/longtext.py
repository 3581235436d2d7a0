"""A long text that hides one fact, made from a seed: what the demo and `eval needle` read."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_PLACES = ("harbour", "mill", "station", "orchard", "quarry", "chapel", "market", "bakery")
_PEOPLE = ("Marta", "Henrik", "Ilse", "Tomas", "Yara", "Bram", "Noor", "Piet", "Lena", "Oskar")
_THINGS = ("ladder", "map", "kettle", "lantern", "ledger", "rope", "barrel", "clock", "bell")
_DONE = ("repaired", "painted", "counted", "moved", "cleaned", "measured", "drew", "found")
_WHEN = (
    "At dawn",
    "Before noon",
    "After lunch",
    "In the evening",
    "On market day",
    "Late at night",
)
_WEATHER = ("rain fell on", "fog lay over", "a warm wind crossed", "snow covered", "the sun dried")
_FATE = ("sold", "lost", "mended")
_FEEL = ("nobody minded", "everyone was glad", "the children laughed", "few people noticed")

_SHAPES: tuple[Callable[[random.Random], str], ...] = (
    lambda r: (
        f"{r.choice(_WHEN)} {r.choice(_PEOPLE)} {r.choice(_DONE)} the {r.choice(_THINGS)} at the "
        f"{r.choice(_PLACES)}, and {r.choice(_FEEL)}."
    ),
    lambda r: (
        f"While {r.choice(_WEATHER)} the {r.choice(_PLACES)}, {r.choice(_PEOPLE)} and "
        f"{r.choice(_PEOPLE)} talked about the old {r.choice(_THINGS)}."
    ),
    lambda r: (
        f"The {r.choice(_THINGS)} that {r.choice(_PEOPLE)} had {r.choice(_DONE)} stood near the "
        f"{r.choice(_PLACES)} until somebody carried it to the {r.choice(_PLACES)}."
    ),
    lambda r: (
        f"{r.choice(_PEOPLE)} wrote a short letter about the {r.choice(_PLACES)}; it said that "
        f"{r.choice(_FEEL)} when the {r.choice(_THINGS)} was {r.choice(_FATE)}."
    ),
)


def make_sentence(rng: random.Random) -> str:
    """One sentence of such prose."""
    return rng.choice(_SHAPES)(rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """A chat message that ends with a question, and the answer that its text holds."""

    message: str
    answer: str


def is_right(text: str, puzzle: Puzzle) -> bool:
    """The answer occurs in the text, perhaps with separators between its digits."""
    digits = "".join(c for c in text if c.isdigit())
    return puzzle.answer in digits


def make_puzzle(
    count: Callable[[str], int], num_tokens: int = 4000, seed: int = 0, depth: float = 0.5
) -> Puzzle:
    """Prose of about `num_tokens` tokens by `count`, a five-digit fact in it, a question last.

    depth: where the fact stands, from 0 (first sentence) to 1 (last); the prose is the same.
    """
    rng = random.Random(seed)
    answer = str(rng.randrange(10_000, 100_000))
    fact = f"The secret number of the lighthouse is {answer}. Remember it."
    question = "What is the secret number of the lighthouse? Answer with the number only."
    sentences: list[str] = []
    have = count(fact) + count(question)
    while have < num_tokens:
        sentence = make_sentence(rng)
        have += count(" " + sentence)
        sentences.append(sentence)
    sentences.insert(int(len(sentences) * depth), fact)
    paragraphs = [" ".join(sentences[i : i + 8]) for i in range(0, len(sentences), 8)]
    text = "\n\n".join(paragraphs)
    return Puzzle(message=f"Read this text.\n\n{text}\n\n{question}", answer=answer)
