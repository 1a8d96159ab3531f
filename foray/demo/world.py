"""A generated world: persons, cities and companies, six facts about them, passages that state the facts, questions.

All names are pairs of words from one pool, for every kind of subject, and every world draws new ones. So a word carries
no information about the kind or the facts of its subject. A model can answer questions about an unseen world only by
finding and copying, not from memory of another world.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from learner.model.tokenizer_check import USE_AS_IS, write_tokenizer_config
from rollout_server.environment.prompts import demo

# fmt: off
NAME_WORDS = (
    "alba", "boren", "calix", "dorin", "elsa", "fenno", "garva", "hilde", "ivor", "jaro", "kona", "lumen",
    "mira", "nevis", "orla", "pavo", "quill", "rosta", "sola", "tolan", "ulma", "vesta", "wendel", "xanto",
    "yoren", "zelda", "brask", "corin", "delva", "ember", "frost", "gwyn", "harlo", "isken", "juno", "keld",
    "larch", "mosel", "norva", "oskar", "pella", "rudo", "silva", "torv", "umber", "valen", "wyra", "zorin",
    "adair", "bruno", "cato", "dagny", "edda", "falko", "greta", "henna", "iris", "jonas", "karst", "lotta",
    "marlo", "nadir", "odell", "petra", "quinn", "raska", "sigrid", "tamsin", "ursa", "vigo", "wolda", "xenia",
    "yaro", "zubin", "arden", "birch", "cedar", "dunes", "elder", "finch", "grove", "heron", "inlet", "jasper",
    "krill", "lotus", "maple", "nettle", "onyx", "pebble", "quartz", "raven", "slate", "thorn", "upland", "violet",
)
# fmt: on
"""Every name is an ordered pair of these."""

RELATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "person": (("birthplace", "city"), ("employer", "company")),
    "city": (("mayor", "person"), ("neighbour", "city")),
    "company": (("seat", "city"), ("founder", "person")),
}
"""Kind of a subject -> its relations, each with the kind of its value."""

RELATION_NAMES = tuple(name for pairs in RELATIONS.values() for name, _ in pairs)

VERBS = {
    "birthplace": "left",
    "employer": "serves",
    "mayor": "elected",
    "neighbour": "borders",
    "seat": "occupies",
    "founder": "honours",
}
"""Relation -> verb in a passage: "kona vesta elected mira tolan". It differs from the word in a question: a word with
one use is always followed by one thing, which a model of this size can learn to copy in a minute."""

TEXT = "{name} {first} {first_value} and {second} {second_value} ."
"""A passage's text: both facts about one subject."""

ALIAS = "{name} was {other} ."
"""The passage about the first name of a renamed subject. Its words are in the demo's vocabulary already."""
ALIASED = "name"
"""Relation of the two names of a renamed subject."""
SAID = VERBS | {ALIASED: "was"}
"""Relation -> verb, renaming included."""

ONE_HOP = "what is the {relation} of {name} ?"
TWO_HOP = "what is the {outer} of the {inner} of {name} ?"

Hops = Literal[1, 2, 3]


@dataclass(frozen=True)
class Fact:
    """`relation` of `subject` is `value`."""

    subject: str
    relation: str
    value: str


@dataclass(frozen=True)
class Puzzle:
    """A question with the facts that answer it, in the order of the lookups."""

    question: str
    chain: tuple[Fact, ...]

    @property
    def answer(self) -> str:
        """Return the value of the last fact."""
        return self.chain[-1].value


@dataclass(frozen=True)
class Step:
    """One search of an ideal trajectory: the relation and the name that it asks for, and the fact that it finds."""

    relation: str
    found: Fact

    @property
    def name(self) -> str:
        """Return the name in the query."""
        return self.found.subject


class World:
    """The facts of one world, a pure function of its arguments.

    avoid    names that must not occur (those of another world whose passages go into the same index)
    renamed  share of the subjects with a second name: the passage under the first name states only the second, and the
             facts are found under that one. Questions and values use the first name.
    """

    def __init__(
        self,
        seed: int,
        persons: int = 96,
        cities: int = 32,
        companies: int = 32,
        avoid: frozenset[str] = frozenset(),
        renamed: float = 0.0,
    ) -> None:
        self.seed = seed
        rng = random.Random(f"foray demo world {seed}")
        taken = {frozenset(name.split()) for name in avoid}
        # BM25 ignores the order of words, so at most one of "kona vesta" and "vesta kona" may exist.
        pairs = [rng.sample(pair, 2) for pair in itertools.combinations(NAME_WORDS, 2) if frozenset(pair) not in taken]
        names = [" ".join(pair) for pair in rng.sample(pairs, persons + cities + companies)]
        self.members: dict[str, list[str]] = {
            "person": names[:persons],
            "city": names[persons : persons + cities],
            "company": names[persons + cities :],
        }
        self.kind_of = {name: kind for kind, members in self.members.items() for name in members}
        self.facts: dict[tuple[str, str], str] = {}
        for kind, members in self.members.items():
            for relation, value_kind in RELATIONS[kind]:
                for name in members:
                    self.facts[name, relation] = rng.choice([v for v in self.members[value_kind] if v != name])

        # A fact must be found by its verb, not by its position in the text.
        self.flipped = frozenset(name for name in names if rng.random() < 0.5)
        self.alias: dict[str, str] = {}
        if renamed:
            free = sorted({" ".join(pair) for pair in pairs} - set(names))
            chosen = rng.sample(names, round(renamed * len(names)))
            self.alias = dict(zip(chosen, rng.sample(free, len(chosen)), strict=True))
        self.first_name = {alias: name for name, alias in self.alias.items()}

    @property
    def titles(self) -> list[str]:
        """Return the titles of all passages: every name, first the first names."""
        return [*self.kind_of, *self.first_name]

    @property
    def names(self) -> frozenset[str]:
        """Return all names of this world."""
        return frozenset(self.titles)

    def text(self, name: str) -> str:
        """Return the text of the passage about `name`: its two facts, in random order, or its second name."""
        if name in self.alias:
            return ALIAS.format(name=name, other=self.alias[name])
        subject = self.first_name.get(name, name)
        (first, _), (second, _) = RELATIONS[self.kind_of[subject]][:: -1 if subject in self.flipped else 1]
        return TEXT.format(
            name=name,
            first=VERBS[first],
            first_value=self.facts[subject, first],
            second=VERBS[second],
            second_value=self.facts[subject, second],
        )

    def mentioned(self, title: str) -> list[str]:
        """Return the names in the text of a passage, beside its title."""
        if title in self.alias:
            return [self.alias[title]]
        subject = self.first_name.get(title, title)
        return [self.facts[subject, relation] for relation, _ in RELATIONS[self.kind_of[subject]]]

    def passage_id(self, name: str) -> str:
        """Return the id of the passage about `name`, unique among worlds of different seeds."""
        return f"world{self.seed}:{name.replace(' ', '-')}"

    def passages(self) -> list[dict[str, str]]:
        """Return the corpus, one passage per name: `{"id", "contents"}`; contents: title in quotes, newline, text."""
        return [{"id": self.passage_id(n), "contents": f'"{n}"\n{self.text(n)}'} for n in self.titles]

    def fact(self, name: str, relation: str) -> Fact:
        """Return a fact. Raises KeyError if `name` has no such relation."""
        return Fact(name, relation, self.facts[name, relation])

    def steps(self, chain: Sequence[Fact]) -> list[Step]:
        """Return the searches that find the facts in order: one each, and one more for each renamed subject."""
        found = []
        for fact in chain:
            alias = self.alias.get(fact.subject)
            if alias is not None:
                found.append(Step(fact.relation, Fact(fact.subject, ALIASED, alias)))
            found.append(Step(fact.relation, Fact(alias or fact.subject, fact.relation, fact.value)))
        return found

    def puzzles(self, hops: Hops) -> list[Puzzle]:
        """Return every question of `hops` hops in a fixed order, without chains that visit a name twice."""
        return [
            Puzzle(ONE_HOP.format(relation=" of the ".join(f.relation for f in reversed(chain)), name=name), chain)
            for name in self.kind_of
            for chain in self._chains(name, hops, ())
        ]

    def _chains(self, name: str, hops: int, before: tuple[Fact, ...]) -> Iterator[tuple[Fact, ...]]:
        """Yield `before` continued by `hops` facts, the first one about `name`."""
        for relation, _ in RELATIONS[self.kind_of[name]]:
            chain = (*before, self.fact(name, relation))
            if chain[-1].value in {fact.subject for fact in chain}:
                continue
            if hops == 1:
                yield chain
            else:
                yield from self._chains(chain[-1].value, hops - 1, chain)

    def questions(self, hops: Hops) -> list[dict[str, Any]]:
        """Return `puzzles` as records `{"id", "question", "answers", "hops", "searches", "supporting_ids"}`."""
        return [self._question(hops, number, puzzle) for number, puzzle in enumerate(self.puzzles(hops))]

    def _question(self, hops: Hops, number: int, puzzle: Puzzle) -> dict[str, Any]:
        steps = self.steps(puzzle.chain)
        return {
            "id": f"world{self.seed}:{hops}hop:{number}",
            "question": puzzle.question,
            "answers": [puzzle.answer],
            "hops": hops,
            "searches": len(steps),
            "supporting_ids": [self.passage_id(step.name) for step in steps],
        }


@dataclass(frozen=True)
class Level:
    """What a demo asks.

    hops      numbers of hops of its questions
    renamed   share of the subjects with a second name
    searches  most searches of an ideal trajectory
    larger    size of the training world, relative to the others
    """

    hops: tuple[Hops, ...]
    renamed: float
    searches: int
    larger: int

    def world(self, seed: int, larger: int = 1, avoid: frozenset[str] = frozenset()) -> World:
        """Return a world of this level, of `larger` times the usual size."""
        return World(seed, 96 * larger, 32 * larger, 32 * larger, avoid, self.renamed)

    def puzzles(self, world: World) -> dict[int, list[Puzzle]]:
        """Return the puzzles of a world that need no more searches than `searches`, by number of hops."""
        return {h: [p for p in world.puzzles(h) if len(world.steps(p.chain)) <= self.searches] for h in self.hops}


SHORT = Level(hops=(1, 2), renamed=0.0, searches=2, larger=1)
HARD = Level(hops=(1, 2, 3), renamed=0.3, searches=4, larger=4)
"""`foray demo --hard`. Its training world is larger: in more steps, a small one would be learned by heart."""


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per line, in UTF-8."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def write_world(seed: int, directory: Path, per_hops: int | None = None, avoid: frozenset[str] = frozenset()) -> World:
    """Write `corpus.jsonl` and `questions.jsonl` (one- and two-hop, shuffled) of `World(seed)` into `directory`.

    per_hops  number of questions per number of hops, drawn without replacement; None: all one-hop questions and as
              many two-hop questions
    """
    world = World(seed, avoid=avoid)
    rng = random.Random(f"foray demo questions {seed}")
    one, two = world.questions(1), world.questions(2)
    wanted = min(len(one), len(two)) if per_hops is None else per_hops
    chosen = rng.sample(one, min(wanted, len(one))) + rng.sample(two, min(wanted, len(two)))
    rng.shuffle(chosen)
    directory.mkdir(parents=True, exist_ok=True)
    write_jsonl(directory / "corpus.jsonl", world.passages())
    write_jsonl(directory / "questions.jsonl", chosen)
    return world


Floats = npt.NDArray[np.float32]
K1, B = 1.5, 0.75
SKIPPED = frozenset((".",))
"""Not a word for the retriever."""


class Lookup:
    """Rank the passages of worlds for a query by BM25, as the retriever does. Results are cached.

    Scores are Lucene's BM25 (Robertson et al. 1995 with idf = ln(1 + (N - df + 0.5) / (df + 0.5))), k1 1.5, b 0.75, as
    in bm25s. It is implemented here because the warm start sends tens of thousands of single queries to worlds that
    exist for two steps: building a real index for each would take longer than the training.
    """

    def __init__(self, *worlds: World) -> None:
        about = [(name, world) for world in worlds for name in world.titles]
        self.names = [name for name, _ in about]
        self.fact_keys = [key for world in worlds for key in world.facts]
        texts = [[w for w in f"{name} {world.text(name)}".split() if w not in SKIPPED] for name, world in about]
        lengths = np.array([len(text) for text in texts], dtype=np.float32)
        norm = K1 * (1 - B + B * lengths / lengths.mean())
        counts: dict[str, Floats] = {}
        for number, text in enumerate(texts):
            for word, times in Counter(text).items():
                counts.setdefault(word, np.zeros(len(texts), dtype=np.float32))[number] = times
        self._weights: dict[str, Floats] = {}
        for word, count in counts.items():
            found = int((count > 0).sum())
            idf = math.log(1 + (len(texts) - found + 0.5) / (found + 0.5))
            self._weights[word] = (idf * count / (count + norm)).astype(np.float32)
        self._nothing = np.zeros(len(texts), dtype=np.float32)
        self._seen: dict[str, list[str]] = {}
        self._mentioned = {name: world.mentioned(name) for name, world in about}

    def fewest(self, start: str, wanted: str, topk: int, most: int) -> int:
        """Return the fewest searches, at most `most`, that find the passage about `wanted`, or `most` + 1.

        A search is for one name: `start`, or any that a passage found before mentions. The relation in a query changes
        nothing, because passages contain verbs instead.
        """
        known, fresh = {start}, {start}
        for searches in range(1, most + 1):
            found = {title for name in fresh for title in self.top(name, topk)}
            if wanted in found:
                return searches
            fresh = {name for title in found for name in (title, *self._mentioned[title])} - known
            known |= fresh
        return most + 1

    def needs_all(self, steps: Sequence[Step], topk: int) -> bool:
        """Return whether every step finds its passage, and no search of another name finds it earlier."""
        first = steps[0].name
        return all(self.fewest(first, step.name, topk, at) == at for at, step in enumerate(steps, 1))

    def top(self, query: str, topk: int) -> list[str]:
        """Return the names with the highest scores, best first, without those that share no word with the query."""
        ranked = self._seen.get(query)
        if ranked is None:
            scores = sum((self._weights.get(word, self._nothing) for word in query.split()), start=self._nothing)
            best = np.argsort(-scores, kind="stable")[:8]
            ranked = self._seen[query] = [self.names[i] for i in best if scores[i] > 0]
        return ranked[:topk]


PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"

THOUGHT = "i need to search"
"""Thought in a demonstration before its first search."""
GUESS_THOUGHT = "i know the answer"
"""Thought in a demonstration before it answers without a search."""


def _words_of(template: str) -> list[str]:
    return [word for word in template.split() if "{" not in word and word not in demo.TAGS]


@cache
def words() -> tuple[str, ...]:
    """Return all tokens in the order of their ids: pad, eos, unknown, tags, grammar, names."""
    texts = (demo.PROMPT, demo.PASSAGE, demo.OBSERVATION, demo.EMPTY_RESULT, demo.INVALID, TEXT, ONE_HOP, TWO_HOP)
    grammar = [word for text in (*texts, THOUGHT, GUESS_THOUGHT) for word in _words_of(text)]
    every = (PAD, EOS, UNKNOWN, *demo.TAGS, *grammar, *RELATION_NAMES, *VERBS.values(), *NAME_WORDS)
    return tuple(dict.fromkeys(every))


@cache
def ids_of_words() -> dict[str, int]:
    """Return word -> id."""
    return {word: index for index, word in enumerate(words())}


def encode(text: str) -> list[int]:
    """Return the ids of a text. Raises KeyError for a word that is not in the vocabulary."""
    table = ids_of_words()
    return [table[word] for word in text.split()]


def decode(ids: list[int]) -> str:
    """Return the words, joined by spaces."""
    table = words()
    return " ".join(table[index] for index in ids)


def save_tokenizer(directory: Path) -> None:
    """Write the files of a tokenizer into `directory`: one token per word and per tag.

    Text is split at spaces, so tokens of prompt, policy and observation never merge at their boundaries. The tags are
    added tokens that are *not* special: they are recognised without spaces around them, and decoding keeps them, so
    that an engine finds its stop strings.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel(dict(ids_of_words()), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (PAD, EOS, UNKNOWN)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in demo.TAGS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        **USE_AS_IS,
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    write_tokenizer_config(directory, config)


def main() -> None:
    """Run the command line: `python -m foray.demo.world --seed 7 --out DIR`."""
    parser = argparse.ArgumentParser(prog="python -m foray.demo.world", description="Write a generated world.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the world")
    parser.add_argument("--out", type=Path, required=True, help="directory for corpus.jsonl and questions.jsonl")
    options = parser.parse_args()
    world = write_world(options.seed, options.out)
    print(f"{options.out}: {len(world.kind_of)} passages of world {options.seed}")


if __name__ == "__main__":
    main()
