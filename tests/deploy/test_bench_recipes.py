"""`python -m benchmarks.demo_lm.recipes`: the arms' settings, their questions, several seeds as one, the page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo_lm import recipes, results
from benchmarks.demo_lm.command import FILES, LARGER, config_tree
from benchmarks.demo_lm.recipes import ARMS, Arm
from deploy.config import from_tree
from foray.data.files import write_questions
from foray.evaluation.store import EPISODES, RECIPE
from learner.config.questions import question_sources
from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.messages import Question
from tests.deploy.test_demo_lm import SMALL
from tests.support.sft_model import tiny_chat_model


@pytest.mark.parametrize("name", ARMS)
def test_the_settings_of_an_arm_are_valid(name: str, tmp_path: Path) -> None:
    arm = ARMS[name]
    args = argparse.Namespace(engine="cpu", seed=0, overrides=[*recipes.WARM[arm.warm], *arm.overrides])
    sizes = {"steps": 20, "updates": 72, "limit": 200, "dtype": "float32"}
    config = from_tree(config_tree(args, tmp_path, {kind: tmp_path / name for kind, name in FILES.items()}, sizes))
    rewards = {reward.type: reward.weight for reward in config.rollout.episode.rewards}
    assert {"em", "format", "f1"} <= rewards.keys()
    if "evidence" in name and name != "evidence-turns":
        assert rewards["f1"] == rewards["retrieval_hit"] == 0.5
        (hit,) = (reward for reward in config.rollout.episode.rewards if reward.type == "retrieval_hit")
        assert hit.share and hit.by == "passage"  # type: ignore[attr-defined]


def question(number: int, hops: int) -> Question:
    return Question(id=f"q{number}", text=f"who {number}?", answers=("a",), meta={"hops": hops, "source": "s"})


def test_hop_balanced_batches_draw_equally_many_questions_of_each_number(tmp_path: Path) -> None:
    write_questions(
        tmp_path / "base" / "questions" / "train.jsonl", [question(n, 4 if n % 8 == 0 else 2) for n in range(80)]
    )
    (setting,) = recipes._questions(Arm((), by_hops=True), tmp_path / "base", tmp_path / "arm", print)
    given = json.loads(setting.partition("=")[2])
    found = load_questions(question_sources([recipes_source(one) for one in given]))
    assert [count for count, _ in found.shares] == [70, 10] and len({weight for _, weight in found.shares}) == 1
    assert recipes._questions(Arm(()), tmp_path / "base", tmp_path / "arm", print) == []


def multi_hop(folder: Path) -> Path:
    """60 questions of two and three hops with their passages, in the layout of the larger data."""
    (folder / "multihop").mkdir(parents=True)
    asked = [
        {"id": f"q{n}", "question": f"Where is Town{n} ?", "answers": [f"river{n}"], "supporting": [f"p{n}"],
         "source": "musique", "hops": 2 + n % 2}
        for n in range(70)
    ]  # fmt: skip
    passages = [{"id": f"p{n}", "title": f"Town{n}", "text": f"Town{n} lies on river{n}."} for n in range(70)]
    for kind, records in (("train", asked[10:]), ("dev", asked[:10]), ("corpus", passages)):
        (folder / "multihop" / LARGER[kind]).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def recipes_source(given: dict[str, Any]) -> Any:
    from learner.config.questions import QuestionSource

    return QuestionSource.model_validate(given)


def test_questions_that_the_warm_start_answers_sometimes_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_questions(tmp_path / "base" / "questions" / "train.jsonl", [question(n, 2) for n in range(3)])
    monkeypatch.setattr(recipes, "run_phases", lambda *_: None)
    scores = {"q0": (0, 0), "q1": (0, 1), "q2": (1, 1)}
    episodes = [row(asked, f1, n, data_set="train") for asked, found in scores.items() for n, f1 in enumerate(found)]
    write_result(tmp_path / "base" / "eval" / "sampled", episodes)
    recipes._questions(Arm((), answered=(0.05, 0.8)), tmp_path / "base", tmp_path / "arm", print)
    assert [q.id for q in load_questions(tmp_path / "arm" / "questions" / "answered.jsonl").questions] == ["q1"]


def row(asked: str, f1: float, index: int = 0, *, data_set: str = "dev", searches: int = 1) -> dict[str, Any]:
    return {
        "method": "policy", "data_set": data_set, "question_id": asked, "index": index, "question": "?",
        "answers": ["a"], "status": "answered", "metrics": {"em": f1, "f1": f1}, "searches": searches, "evidence": None,
        "tokens_generated": 1, "tokens_read": 1, "segments": [],
    }  # fmt: skip


def write_result(folder: Path, episodes: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text("{}")
    (folder / EPISODES).write_text("".join(json.dumps(one) + "\n" for one in episodes))


def test_several_seeds_are_one_comparison_over_the_means_of_each_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, gain in enumerate((1.0, 0.5)):
        write_questions(tmp_path / str(seed) / "questions" / "dev.jsonl", [question(n, 2) for n in range(12)])
        for name, f1 in (("warm", 0.0), ("grpo", gain)):
            write_result(tmp_path / str(seed) / "eval" / name, [row(f"q{n}", f1, searches=2) for n in range(12)])
    (tmp_path / "seeds").mkdir()
    for seed in (0, 1):
        (tmp_path / "seeds" / f"{seed}.json").write_text(
            json.dumps(results.summary(tmp_path / str(seed), {"seed": seed}))
        )
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "seeds").iterdir())]
    lines = recipes.pooled(kept)
    assert any("dev        f1        s 2              12  0.000 -> 0.750: +0.750" in line for line in lines)
    assert any("searches  all" in line and "2.000 -> 2.000: +0.000" in line for line in lines)
    assert any("f1  warm start -> GRPO: +0.750" in line and "one-sided p 0.0" in line for line in lines)
    assert any("all       f1  warm start -> GRPO: +0.750" in line for line in lines)
    monkeypatch.setattr(recipes, "SEEDS", tmp_path / "seeds")
    monkeypatch.setattr(recipes, "EVALUATED", ("dev",))
    shown = recipes.seeds()
    assert "| 1 | dev | GRPO | 0.500 (0.50 to 0.50) | 2.00 |  | 0.0 |" in shown and "0.000 -> 0.750" in shown
    row_of_page = recipes.headline()
    assert row_of_page["result"].startswith("F1 0.750 on `dev`; on both +0.750 [")
    assert row_of_page["target"].endswith("**met**") and row_of_page["measured"] == "seed 0, 1"
    monkeypatch.setattr(recipes, "SEEDS", tmp_path / "none")
    assert recipes.headline()["result"] == "not measured"
    with pytest.raises(UserError, match="no warm start"):
        recipes.pooled([results.summary(tmp_path / "none", {})])


def test_the_page_is_what_the_results_and_the_template_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = recipes.PAGE.read_text()
    monkeypatch.setattr(recipes, "PAGE", tmp_path / "recipes.md")
    recipes.write_table()
    assert (tmp_path / "recipes.md").read_text() == kept, "python -m benchmarks.demo_lm.recipes table"
    kinds = [
        {"data_set": "validation", "kind": "all", "metric": m, "n": 9, "before": 0.2, "after": 0.3, "difference": 0.1,
         "low": 0.0, "high": 0.2, "p_value": 0.1}
        for m in ("f1", "searches")
    ]  # fmt: skip
    result: dict[str, Any] = {"name": "evidence", "seed": 0, "steps": 2, "kinds": kinds, "minutes": 20.2}
    result["curves"] = {"reward_mean": [0.1, 0.2]}
    change = "0.200 -> 0.300 | +0.100 (+0.000 to +0.200)"
    assert recipes.rows_of_arms([result])[-1] == f"| evidence | 0 | 2 | {change} | {change} | 0.150 | 20 |"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_arm_is_run_from_its_warm_start_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in {"RUNS": tmp_path / "runs", "FOLDER": tmp_path / "results"}.items():
        monkeypatch.setattr(recipes, name, folder)
    monkeypatch.setattr(recipes, "ARMS", {"evidence": Arm((recipes.HALF,), warm="small", by_hops=True)})
    monkeypatch.setattr(recipes, "WARM", {"small": SMALL})
    data = multi_hop(tmp_path / "data")
    model = tiny_chat_model(tmp_path / "model")
    monkeypatch.setattr(recipes, "STEPS", 2)

    def played(steps: int) -> None:
        words = ["arms", "--data", str(data), "--model", str(model), "--steps", str(steps), "--arm", "evidence"]
        assert recipes.main(words) == 0

    played(2)
    result = json.loads((tmp_path / "results" / "evidence-seed0.json").read_text())
    assert result["steps"] == 2 and len(result["curves"]["reward_mean"]) == 2
    assert {row["kind"] for row in result["kinds"]} == {"all", "musique 2", "musique 3"}
    assert {row["n"] for row in result["kinds"] if row["kind"] == "all"} == {6}
    played(3)
    longer = json.loads((tmp_path / "results" / "evidence-seed0-steps3.json").read_text())
    assert longer["steps"] == 3
    assert longer["curves"]["reward_mean"][:2] == result["curves"]["reward_mean"], "it goes on where it ended"
    monkeypatch.setattr(recipes, "play", None)
    played(2)  # it has a result
