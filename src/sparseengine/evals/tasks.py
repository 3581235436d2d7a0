"""Long texts with questions, made from a seed: RULER's tasks (arXiv:2404.06654) in our own words.

    niah_single_1, 2, 3     a fact in repeated noise; in prose; in prose with a uuid as its value
    niah_multikey_1         in prose, beside three like it
    niah_multikey_2, 3      the whole text is such facts: words -> numbers, uuids -> uuids
    niah_multivalue         one key with four values, all asked for
    niah_multiquery         four keys, all asked for
    vt                      follow assignments: every name that ends up with a value
    cwe, fwe                the commonest words of a list; of a coded text
    qa                      an attribute of a person from one of many short documents

A task makes a text from a number of *units* of haystack (sentences, words, documents), and `fit`
finds the number that fills a length in tokens. Asked for more than one question, a text hides as
much as all of them need; cwe and fwe have only one.

Deviations from the published tasks: prose comes from our grammar, not from essays; documents are
made up, not taken from SQuAD or HotpotQA; questions are in our words; common words are pairs of an
adjective and a noun everywhere.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from sparseengine.errors import ConfigError
from sparseengine.evals.words import (
    ADJECTIVES,
    CITIES,
    FIRST_NAMES,
    INSTRUMENTS,
    JOBS,
    LAST_NAMES,
    NOUNS,
)
from sparseengine.longtext import make_sentence

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
DEPTHS = 40  # places at which a fact may stand, spread evenly
PARAGRAPH = 8  # sentences
COMMON, COMMON_TIMES, RARE_TIMES = 10, 30, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question behind the text, how its answer begins, and the strings the answer should hold.

    needs_all: the score is the part of `wanted` that the answer holds; else any one is enough.
    """

    question: str
    cue: str
    wanted: tuple[str, ...]
    needs_all: bool = True

    def score(self, answer: str) -> float:
        """From 0 to 1; upper and lower case are the same."""
        found = [want.lower() in answer.lower() for want in self.wanted]
        return sum(found) / len(found) if self.needs_all else float(any(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    context: str
    queries: tuple[Query, ...]


Make = Callable[[random.Random, int, int], Text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """make(rng, units of haystack, questions) -> a text; the most tokens an answer needs."""

    make: Make
    answer_tokens: int
    asks_many: bool = True


def fit(task: Task, count: Callable[[Text], int], length: int, seed: str, questions: int) -> Text:
    """The longest text of at most `length` tokens by `count`. Raises `ConfigError` if none is."""

    def make(units: int) -> Text:
        return task.make(random.Random(seed), units, questions)

    least = count(make(0))
    if least > length:
        raise ConfigError(f"{seed}: {length} tokens are too few, what it hides needs {least}")
    low, high = 0, 64
    while count(make(high)) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(make(middle)) <= length else (low, middle)
    return make(low)


# ── needles ───────────────────────────────────────────────────────────────────────────────────────


def _word(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_KINDS: Mapping[str, Callable[[random.Random], str]] = {
    "words": _word,
    "numbers": _number,
    "uuids": _uuid,
}


def _distinct(make: Callable[[random.Random], str], rng: random.Random, number: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < number:
        found[make(rng)] = None
    return list(found)


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _hide(rng: random.Random, sentences: list[str], facts: list[str]) -> list[str]:
    """Facts in their order at distinct depths, while there are enough."""
    if len(facts) <= DEPTHS:
        depths = rng.sample(range(DEPTHS), len(facts))
    else:
        depths = [rng.randrange(DEPTHS) for _ in facts]
    total, out = len(sentences), list(sentences)
    for fact, depth in reversed(list(zip(facts, sorted(depths), strict=True))):
        out.insert(round(depth / (DEPTHS - 1) * total), fact)
    return out


def _prose(rng: random.Random, units: int) -> list[str]:
    return [make_sentence(rng) for _ in range(units)]


def _noise(units: int) -> list[str]:
    return [NOISE[i % len(NOISE)] for i in range(units)]


def _paragraphs(sentences: list[str]) -> str:
    blocks = [" ".join(sentences[i : i + PARAGRAPH]) for i in range(0, len(sentences), PARAGRAPH)]
    return "\n\n".join(blocks)


def _niah(
    rng: random.Random,
    units: int,
    questions: int,
    *,
    hay: str,
    key_kind: str = "words",
    kind: str = "numbers",
    keys: int = 1,
    values: int = 1,
    asked: int = 1,
) -> Text:
    """`keys` facts at least, of `values` values each; every question is about `asked` keys."""
    names = _distinct(_KINDS[key_kind], rng, max(keys, questions * asked))
    held = {name: [_KINDS[kind](rng) for _ in range(values)] for name in names}
    facts = [_needle(kind, name, value) for name in names for value in held[name]]
    rng.shuffle(facts)
    if hay == "needles":
        others = _distinct(_KINDS[key_kind], rng, len(names) + units)
        sentences = [_needle(kind, n, _KINDS[kind](rng)) for n in others if n not in held][:units]
    else:
        sentences = _noise(units) if hay == "noise" else _prose(rng, units)
    text = _paragraphs(_hide(rng, sentences, facts))
    intro = f"Some special magic {kind} are hidden in the following text. Keep them in mind."
    queries = []
    for i in range(questions):
        mine = names[i * asked : (i + 1) * asked]
        wanted = tuple(value for name in mine for value in held[name])
        queries.append(_niah_query(kind, mine, wanted))
    return Text(context=f"{intro}\n\n{text}", queries=tuple(queries))


def _niah_query(kind: str, names: list[str], wanted: tuple[str, ...]) -> Query:
    about = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    if len(wanted) == 1:
        what = kind.removesuffix("s")
        question = f"What is the special magic {what} for {about} mentioned in the text?"
        cue = f"The special magic {what} for {about} mentioned in the text is:"
    else:
        question = f"What are all the special magic {kind} for {about} mentioned in the text?"
        cue = f"The special magic {kind} for {about} mentioned in the text are:"
    return Query(question=question, cue=cue, wanted=wanted)


# ── assignments ───────────────────────────────────────────────────────────────────────────────────


def _letters(rng: random.Random, number: int) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(number))


def _vt(rng: random.Random, units: int, questions: int, *, hops: int = 4) -> Text:
    names = _distinct(lambda r: _letters(r, 5), rng, questions * (hops + 1))
    numbers = _distinct(lambda r: str(r.randrange(10_000, 100_000)), rng, questions)
    chains = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(questions)]
    steps: list[list[str]] = []
    for chain, number in zip(chains, numbers, strict=True):
        lines = [f"VAR {chain[0]} = {number}."]
        lines += [f"VAR {b} = VAR {a}." for a, b in pairwise(chain)]
        steps.append(lines)
    turns = [i for i in range(questions) for _ in range(hops + 1)]
    rng.shuffle(turns)
    left = [iter(lines) for lines in steps]
    facts = [next(left[i]) for i in turns]  # interleaved, each chain in its own order
    text = _paragraphs(_hide(rng, _noise(units), facts))
    intro = "Remember how variables are assigned in the following text."
    queries = tuple(
        Query(
            question=f"Which variables have the value {number}, directly or through others?",
            cue=f"The {hops + 1} variables with the value {number} are:",
            wanted=tuple(chain),
        )
        for chain, number in zip(chains, numbers, strict=True)
    )
    return Text(context=f"{intro}\n\n{text}", queries=queries)


# ── counting ──────────────────────────────────────────────────────────────────────────────────────


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _cwe(rng: random.Random, units: int, questions: int) -> Text:
    """units: uncommon words."""
    most = len(ADJECTIVES) * len(NOUNS) - 4 * COMMON
    if units > most:
        raise ConfigError(f"cwe has {most} uncommon words, and this length needs {units} or more")
    words = _distinct(_word, rng, 4 * COMMON + units)
    shown, common, rare = words[: 3 * COMMON], words[3 * COMMON : 4 * COMMON], words[4 * COMMON :]
    example = shown[:COMMON] * 3 + shown[COMMON:]
    rng.shuffle(example)
    listed = common * COMMON_TIMES + rare * RARE_TIMES
    rng.shuffle(listed)
    ask = f"Which {COMMON} words are the most common in this list?"
    cue = f"The {COMMON} most common words are:"
    answer = _numbered(shown[:COMMON])
    context = (
        "Below is a numbered list of words, in which some words are more common than others. "
        f"Remember those.\n\n{_numbered(example)}\n\n{ask} {cue} {answer}\n\n"
        f"Below is another one. Remember its most common words.\n\n{_numbered(listed)}"
    )
    return Text(context=context, queries=(Query(question=ask, cue=cue, wanted=tuple(common)),))


def _fwe(rng: random.Random, units: int, questions: int, *, alpha: float = 2.0) -> Text:
    """units: words. The commonest is noise; the vocabulary is a word in fifty, at least six."""
    vocabulary = max(6, units // 50)
    coded = _distinct(lambda r: _letters(r, 6).lower(), rng, vocabulary)
    weights = [(rank + 1) ** -alpha for rank in range(vocabulary)]
    total = max(units, 60)
    counts = [max(1, round(total * weight / sum(weights))) for weight in weights]
    words = ["..." if i == 0 else coded[i] for i, n in enumerate(counts) for _ in range(n)]
    rng.shuffle(words)
    context = (
        "Read the following coded text and keep track of how often each coded word appears. "
        f"Dots stand for noise.\n\n{' '.join(words)}"
    )
    query = Query(
        question="Which three coded words appear most often in this text? Leave out the dots.",
        cue="The three coded words that appear most often are:",
        wanted=tuple(coded[1:4]),
    )
    return Text(context=context, queries=(query,))


# ── documents ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Person:
    name: str
    city: str
    job: str
    instrument: str
    year: str

    def document(self) -> str:
        return (
            f"{self.name} was born in {self.city} in {self.year} and went to school there. After "
            f"some years abroad {self.name} came back to work as a {self.job}. In the evenings "
            f"one can hear {self.name} play the {self.instrument}."
        )

    def query(self, rng: random.Random) -> Query:
        """One of the attributes."""
        question, cue, wanted = rng.choice(
            (
                (f"In which city was {self.name} born?", "was born in", self.city),
                (f"What does {self.name} work as?", "works as a", self.job),
                (f"Which instrument does {self.name} play?", "plays the", self.instrument),
                (f"In which year was {self.name} born?", "was born in the year", self.year),
            )
        )
        return Query(question=question, cue=f"{self.name} {cue}", wanted=(wanted,), needs_all=False)


def _qa(rng: random.Random, units: int, questions: int) -> Text:
    """units: documents beside those asked about."""
    most = len(FIRST_NAMES) * len(LAST_NAMES)
    if units + questions > most:
        raise ConfigError(f"qa has {most} persons, and this length needs {units} or more")
    names = _distinct(
        lambda r: f"{r.choice(FIRST_NAMES)} {r.choice(LAST_NAMES)}", rng, questions + units
    )
    people = [
        _Person(
            name,
            rng.choice(CITIES),
            rng.choice(JOBS),
            rng.choice(INSTRUMENTS),
            str(rng.randrange(1900, 2000)),
        )
        for name in names
    ]
    queries = tuple(person.query(rng) for person in people[:questions])
    documents = _hide(
        rng,
        [person.document() for person in people[questions:]],
        [person.document() for person in people[:questions]],
    )
    listed = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(documents, 1))
    intro = "Answer from the following documents. Give the answer only."
    return Text(context=f"{intro}\n\n{listed}", queries=queries)


TASKS: Mapping[str, Task] = {
    "niah_single_1": Task(make=partial(_niah, hay="noise"), answer_tokens=128),
    "niah_single_2": Task(make=partial(_niah, hay="prose"), answer_tokens=128),
    "niah_single_3": Task(make=partial(_niah, hay="prose", kind="uuids"), answer_tokens=128),
    "niah_multikey_1": Task(make=partial(_niah, hay="prose", keys=4), answer_tokens=128),
    "niah_multikey_2": Task(make=partial(_niah, hay="needles"), answer_tokens=128),
    "niah_multikey_3": Task(
        make=partial(_niah, hay="needles", key_kind="uuids", kind="uuids"), answer_tokens=128
    ),
    "niah_multivalue": Task(make=partial(_niah, hay="prose", values=4), answer_tokens=128),
    "niah_multiquery": Task(make=partial(_niah, hay="prose", keys=4, asked=4), answer_tokens=128),
    "vt": Task(make=_vt, answer_tokens=30),
    "cwe": Task(make=_cwe, answer_tokens=120, asks_many=False),
    "fwe": Task(make=_fwe, answer_tokens=50, asks_many=False),
    "qa": Task(make=_qa, answer_tokens=32),
}
