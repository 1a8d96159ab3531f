"""What the demo prepares, and what it must never delete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foray.demo.run import HELD_OUT_PER_HOPS, DemoOptions, demo_tree, prepare, write_worlds
from protocol.errors import UserError
from protocol.keys import Keys


def silent(line: str) -> None:
    """Say nothing."""


def test_the_worlds_share_no_name_and_every_held_out_question_can_be_answered_from_the_corpus(tmp_path: Path) -> None:
    held_out = write_worlds(3, tmp_path)
    assert [q["hops"] for q in held_out] == [1] * HELD_OUT_PER_HOPS + [2] * HELD_OUT_PER_HOPS
    corpus = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    text = {passage["id"]: passage["contents"] for passage in corpus}
    assert all(q["answers"][0] in text[q["supporting_ids"][-1]] for q in held_out)
    trained = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    titles = {
        kind: {text[i].split('"')[1] for q in questions for i in q["supporting_ids"]}
        for kind, questions in (("trained", trained), ("held_out", held_out))
    }
    assert not titles["trained"] & titles["held_out"]


def test_a_directory_that_no_demo_made_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("mine")
    with pytest.raises(UserError, match="is not a demo"):
        prepare(DemoOptions(tmp_path, 0), silent)
    assert (tmp_path / "demo.yaml").read_text() == "mine"


def test_an_old_demo_makes_way_for_a_new_one_only_when_that_is_said(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    directory = tmp_path / "demo"
    prepare(DemoOptions(directory, 0, model=model), silent)
    prepare(DemoOptions(directory, 0, model=model), silent)  # nothing was trained in it
    (directory / "metrics.jsonl").write_text('{"epoch": 1, "step": 1}\n')
    with pytest.raises(UserError) as kept:
        prepare(DemoOptions(directory, 1, model=model), silent)
    assert "was stopped (1 steps)" in kept.value.what and f"foray up {directory}/demo.yaml" in kept.value.todo
    (directory / "summary.json").touch()
    with pytest.raises(UserError, match="has finished") as kept:
        prepare(DemoOptions(directory, 1, model=model), silent)
    assert "--fresh" in kept.value.todo and "foray up" not in kept.value.todo
    prepared = prepare(DemoOptions(directory, 1, model=model, shuffled_reward=True, fresh=True), silent)
    assert not (directory / "metrics.jsonl").exists() and prepared.config.run.seed == 1
    assert prepared.config.learner.batch.shuffle_rewards


def test_two_demos_are_two_runs_to_one_redis(tmp_path: Path) -> None:
    ids = [demo_tree(DemoOptions(tmp_path / "d", 0))["run"]["id"] for _ in range(2)]
    assert ids[0] != ids[1] and all(Keys(run_id) and run_id.startswith("demo-") for run_id in ids)
    assert demo_tree(DemoOptions(tmp_path / "d", 0, overrides=("run.id=mine",)))["run"]["id"] == "mine"


def test_overrides_win_over_the_demos_own_settings(tmp_path: Path) -> None:
    tree = demo_tree(DemoOptions(tmp_path / "d", 5, overrides=("run.steps=7", "launch.engines=2")))
    assert tree["run"]["steps"] == 7 and tree["run"]["seed"] == 5 and tree["launch"]["engines"] == 2
