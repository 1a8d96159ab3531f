"""The generated world: facts, passages, questions, and the texts' way into tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import bm25s
import pytest
from tokenizers import Tokenizer

from foray.demo.demonstrations import IMPERFECT, Scene, ideal, practice, query
from foray.demo.world import (
    NAME_WORDS,
    RELATION_NAMES,
    VERBS,
    Lookup,
    World,
    decode,
    encode,
    save_tokenizer,
    words,
    write_world,
)
from rollout_server.environment.prompts import demo


def scene(seed: int = 7) -> Scene:
    world = World(seed)
    return Scene(world, Lookup(world), random.Random(seed))


def indexed(passages: list[dict[str, str]]) -> bm25s.BM25:
    index = bm25s.BM25()
    tokens = bm25s.tokenize([p["contents"] for p in passages], stopwords="en", show_progress=False)
    index.index(tokens, show_progress=False)
    return index


def test_a_world_is_a_function_of_its_seed_and_two_seeds_share_hardly_a_fact() -> None:
    one, again, other = World(1), World(1), World(2)
    assert one.passages() == again.passages() and one.questions(2) == again.questions(2)
    assert not set(one.facts.items()) & set(other.facts.items())


def test_two_worlds_for_one_index_share_no_name_in_either_order() -> None:
    one = World(1)
    other = World(2, avoid=one.names)
    assert not {frozenset(n.split()) for n in one.names} & {frozenset(n.split()) for n in other.names}


def test_every_question_is_answered_by_its_supporting_passages_and_not_by_itself() -> None:
    world = World(3)
    texts = {p["id"]: p["contents"] for p in world.passages()}
    for hops in (1, 2):
        questions = world.questions(hops)  # type: ignore[arg-type]
        assert len({q["id"] for q in questions}) == len({q["question"] for q in questions}) == len(questions) > 200
        for question in questions:
            (answer,) = question["answers"]
            assert len(question["supporting_ids"]) == hops
            assert answer in texts[question["supporting_ids"][-1]]
            assert answer not in question["question"]


def test_a_two_hop_question_cannot_be_answered_from_its_first_passage() -> None:
    world = World(3)
    for puzzle in world.puzzles(2):
        first, last = puzzle.chain
        assert last.subject == first.value != puzzle.answer
        assert world.facts[first.subject, first.relation] == last.subject


def test_bm25_over_two_worlds_finds_the_passage_among_the_best_two() -> None:
    train = World(0)
    worlds = (train, World(1_000_000, avoid=train.names))
    passages = [p for world in worlds for p in world.passages()]
    index = indexed(passages)
    asked = [(world.passage_id(name), query(relation, name)) for world in worlds for name, relation in world.facts]
    tokens = bm25s.tokenize([text for _, text in asked], stopwords="en", show_progress=False)
    found, _ = index.retrieve(tokens, k=2, show_progress=False)
    hits = [wanted in [passages[i]["id"] for i in row] for (wanted, _), row in zip(asked, found, strict=True)]
    assert sum(hits) / len(hits) > 0.99


def test_the_demonstrations_lookup_ranks_as_the_real_index_does() -> None:
    world = World(5)
    lookup = Lookup(world)
    passages = world.passages()
    index = indexed(passages)
    texts = [query(relation, name) for name, relation in world.facts]
    found, scores = index.retrieve(bm25s.tokenize(texts, stopwords="en", show_progress=False), k=3, show_progress=False)
    for text, row, score in zip(texts, found, scores, strict=True):
        if score[0] - score[1] > 1e-4 and score[1] - score[2] > 1e-4:  # ties may be broken either way
            assert lookup.top(text, 2) == [lookup.names[i] for i in row[:2]], text


def test_the_saved_tokenizer_agrees_with_the_word_table_on_everything_the_system_writes(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    shown, world = scene(), World(7)
    texts = [p["contents"].replace('"', "").replace("\n", " ") for p in world.passages()]
    texts += [demo.PROMPT.format(question=q["question"]) for q in world.questions(2)]
    texts += [demo.INVALID, demo.OBSERVATION.format(passages=demo.EMPTY_RESULT)]
    texts += [decode(practice(shown, {1: world.puzzles(1), 2: world.puzzles(2)}).ids) for _ in range(20)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(text.split())


def test_tags_are_single_tokens_even_when_glued_to_words(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<search>mayor of kona</search>").ids == encode("<search> mayor of kona </search>")
    assert len(encode(" ".join(demo.TAGS))) == len(demo.TAGS)


def test_what_the_policy_reads_is_what_the_rollout_server_writes(tmp_path: Path) -> None:
    from protocol.search import Passage
    from rollout_server.environment.config import EnvironmentSettings
    from rollout_server.environment.environment import build_environment

    save_tokenizer(tmp_path)
    environment = build_environment(EnvironmentSettings(template="demo", max_context=448), tmp_path)
    shown = scene()
    puzzle = shown.world.puzzles(1)[11]
    ids = ideal(shown, puzzle, 2).ids
    prompt = environment.prompt(puzzle.question)
    assert ids[: len(prompt)] == prompt
    by_title = {p["contents"].split('"')[1]: Passage(**p) for p in shown.world.passages()}
    fact = puzzle.chain[0]
    passages = [by_title[name] for name in shown.lookup.top(query(fact.relation, fact.subject), 2)]
    observation = environment.observation(passages, 96)
    start = ids.index(encode("<information>")[0])
    assert ids[start : start + len(observation)] == observation


def test_imperfect_behaviours_are_shares_and_most_of_them_are_wrong() -> None:
    for mix in IMPERFECT.values():
        assert sum(share for _, share in mix) == pytest.approx(1.0)
        assert mix[0][0] is ideal and 0.1 <= mix[0][1] <= 0.3


def test_no_word_has_two_meanings() -> None:
    assert len(set(words())) == len(words())
    assert not {*VERBS.values(), *RELATION_NAMES} & set(NAME_WORDS)


def test_write_world_writes_what_the_ring_reads(tmp_path: Path) -> None:
    world = write_world(4, tmp_path, per_hops=10)
    corpus = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    questions = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert corpus == world.passages()
    assert sorted(q["hops"] for q in questions) == [1] * 10 + [2] * 10
