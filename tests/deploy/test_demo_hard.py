"""`foray demo --hard`: its questions need exactly their searches, and its warm start ends half-way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foray.demo.run import TOPK, DemoOptions, demo_tree, half_gain, prepare, write_worlds
from foray.demo.world import HARD, NAME_WORDS, RELATION_NAMES, SHORT, VERBS, World
from retriever.index.bm25 import Bm25Index
from retriever.index.config import Bm25Settings
from tests.support.small_retriever import TextSource

Finds = dict[str, list[str]]
NAMES = frozenset(NAME_WORDS)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names_in(text: str) -> list[str]:
    """The names in a text, all of two words."""
    words = [word for word in re.findall(r"\w+", text) if word in NAMES]
    return [" ".join(pair) for pair in zip(words[::2], words[1::2], strict=True)]


def find_all(directory: Path, contents: list[str], names: list[str]) -> Finds:
    """The two best passages for a query about each name, from the index that a retriever uses."""
    directory.mkdir()
    Bm25Index.build(Bm25Settings(), TextSource(contents), directory)
    index = Bm25Index(Bm25Settings(), directory)
    by_relation = [index.search([f"{relation} of {name}" for name in names], TOPK).rows for relation in RELATION_NAMES]
    assert all((rows == by_relation[0]).all() for rows in by_relation), "no passage contains a relation"
    return {
        name: [names_in(contents[row])[0] for row in rows] for name, rows in zip(names, by_relation[0], strict=True)
    }


def fewest(start: str, wanted: str, finds: Finds, mentions: Finds) -> int:
    """The fewest searches for names that the question or passages mention until the wanted passage is found."""
    known, searches = {start}, 0
    while True:
        searches += 1
        found = {title for name in known for title in finds[name]}
        if wanted in found:
            return searches
        more = {name for title in found for name in mentions[title]} - known
        assert more, "no way"
        known |= more


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_every_question_needs_exactly_its_searches_of_the_real_index(tmp_path: Path, seed: int) -> None:
    write_worlds(seed, tmp_path / "world", HARD)
    corpus = read(tmp_path / "world" / "corpus.jsonl")
    title_of = {passage["id"]: names_in(passage["contents"])[0] for passage in corpus}
    text_of = {title_of[passage["id"]]: passage["contents"] for passage in corpus}
    finds = find_all(tmp_path / "index", [passage["contents"] for passage in corpus], list(text_of))
    mentions = {title: names_in(text) for title, text in text_of.items()}
    seen: Counter[tuple[int, int]] = Counter()
    for kind in ("questions", "held_out"):
        for question in read(tmp_path / "world" / f"{kind}.jsonl"):
            (start,) = names_in(question["question"])
            path = [title_of[passage] for passage in question["supporting_ids"]]
            # it can be answered with that many searches: each passage names the subject of the next one
            assert path[0] == start and all(title in finds[title] for title in path)
            assert all(later in mentions[earlier] for earlier, later in pairwise(path))
            assert question["answers"][0] in mentions[path[-1]]
            # and not with fewer
            assert fewest(start, path[-1], finds, mentions) == len(path) == question["searches"]
            seen[question["hops"], question["searches"]] += 1
    assert {hops for hops, _ in seen} == {1, 2, 3} and max(searches for _, searches in seen) == 4
    assert all(seen[hops, hops + 1] > 100 for hops in (1, 2, 3)), "a renamed subject forces one more search"


def test_a_renamed_subject_is_found_only_under_its_second_name_among_distractors() -> None:
    world = HARD.world(7)
    tempted = []
    for name, alias in world.alias.items():
        assert world.text(name) == f"{name} was {alias} ." and not set(world.text(name).split()) & set(VERBS.values())
        (first, _), (second, _) = ((r, v) for (n, r), v in world.facts.items() if n == name)
        assert VERBS[first] in world.text(alias) and VERBS[second] in world.text(alias)
        tempted += [any(set(name.split()) & set(other.split()) for other in world.kind_of if other != name)]
    assert len(world.alias) == 48 and all(tempted), "others have a name of the same words"


def test_a_world_without_second_names_is_the_one_of_the_short_demo() -> None:
    assert SHORT.world(3).passages() == World(3).passages() and not World(3).alias
    hard = HARD.world(3)
    assert hard.facts == World(3).facts and set(hard.names) > set(World(3).names)


def test_the_hard_demo_has_its_own_settings_and_overrides_still_win(tmp_path: Path) -> None:
    short, hard = (demo_tree(DemoOptions(tmp_path, 0, hard=hard)) for hard in (False, True))
    assert hard["run"]["steps"] > short["run"]["steps"] and hard["run"]["temperature"] < 1
    assert hard["rollout"]["search"]["topk"] == TOPK
    assert hard["rollout"]["episode"]["max_turns"] > HARD.searches
    given = demo_tree(DemoOptions(tmp_path, 0, overrides=("run.steps=2",), hard=True))
    assert given["run"]["steps"] == 2 and given["run"]["temperature"] == hard["run"]["temperature"]


def test_the_held_out_questions_are_as_many_of_each_depth(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    prepared = prepare(DemoOptions(tmp_path / "demo", 0, model=model, hard=True), lambda line: None)
    assert Counter(q["hops"] for q in prepared.held_out) == {1: 128, 2: 128, 3: 128}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "directory"),
    [
        ((), "demo-hard-3"),
        (("--control", "shuffled-reward"), "demo-hard-3-control"),
    ],
)
def test_the_command_prepares_in_a_folder_of_its_own(tmp_path: Path, flags: tuple[str, ...], directory: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    argv = [sys.executable, "-m", "foray", "demo", "--hard", "--seed", "3", *flags, "--model", "model"]
    done = subprocess.run([*argv, "--prepare-only"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / directory / "demo.yaml").exists()
    assert ("shuffle_rewards: true" in (tmp_path / "runs" / directory / "demo.yaml").read_text()) == bool(flags)


def test_half_of_the_gain_is_where_the_mean_of_ten_steps_is_half_way() -> None:
    assert half_gain([0.0] * 20 + [1.0] * 20) == 25
    assert half_gain([0.5] * 40) is None and half_gain([0.1] * 5) is None
