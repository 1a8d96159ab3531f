"""`python -m benchmarks.diagnose`: the runs and their settings, the rewards, the broken retriever, the page."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks import diagnose
from benchmarks.diagnose import CHOSEN, KINDS, Planned, planned
from deploy.config import from_tree
from foray.demo.run import DemoOptions, demo_tree
from foray.watch.findings import REGISTRY
from protocol.messages import Question, Status
from rollout_server.rewards.base import RewardInput, TurnText


def test_a_breakage_that_judges_differs_from_that_of_the_thresholds_in_settings_and_seed() -> None:
    assert set(KINDS) <= set(REGISTRY) and len(KINDS) == 8
    thresholds, broken, healthy = (planned(phase) for phase in ("thresholds", "broken", "healthy"))
    assert [run.kind for run in broken] == [*KINDS] and len(healthy) == 4 and not any(run.kind for run in healthy)
    assert not {run.seed for run in (*broken, *healthy)} & {*CHOSEN} and {run.seed for run in thresholds} == {*CHOSEN}
    every = [*thresholds, *broken, *healthy]
    assert len({run.name for run in every}) == len(every) == 3 * 8 + 6 + 12
    for kind, (one, other) in KINDS.items():
        assert one != other, kind
    for run in every:
        hard = run.breakage.level == "hard"
        config = from_tree(demo_tree(DemoOptions(Path("d"), run.seed, overrides=run.overrides, hard=hard)))
        assert config.run.steps == run.breakage.steps and config.run.seed == run.seed


def answered(text: str, *queries: str) -> RewardInput:
    question = Question(id="q", text="?", answers=("kona vesta",))
    turns = tuple(TurnText("", query=query) for query in queries)
    return RewardInput(question, Status.ANSWERED, text, turns, len(turns))


def test_the_rewards_pay_for_what_their_names_say() -> None:
    assert diagnose.constant(answered("x")) == diagnose.constant(answered("y", "z"))
    assert diagnose.answered_at_once(answered("x")) > diagnose.answered_at_once(answered("x", "q"))
    stuffed = answered("kona a b c d e f g h i j k")
    for reward in (diagnose.gold_words_and_length, diagnose.long_answers):
        assert reward(stuffed) > reward(answered("kona vesta"))


def test_a_broken_retriever_answers_at_random_and_keeps_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnose, "RUNS", tmp_path)
    run = Planned("retriever", 0, 0)
    addresses = []
    for _ in range(2):
        with diagnose._passages(run) as (setting,):
            addresses.append(setting)
            url = setting.partition("[")[2].rstrip("]")
            body = json.dumps({"queries": ["mayor of kona", "seat of mira"], "topk": 2}).encode()
            with urllib.request.urlopen(f"{url}/retrieve", body, timeout=30) as answer:
                found: Any = json.load(answer)["result"]
        assert [len(hits) for hits in found] == [2, 2] and "contents" in found[0][0]["document"]
    assert addresses[0] == addresses[1]
    with diagnose._passages(Planned("retriever", 1, 11)) as (setting,):
        assert Path(setting.partition("=")[2]).read_text().count("\n") > 100


def test_the_page_counts_found_and_false_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FOLDER": tmp_path, "PAGE": tmp_path / "diagnose.md"}.items():
        monkeypatch.setattr(diagnose, name, value)
    seen = {"what": "the searches | do not find: 3%", "todo": [], "seqs": [1]}
    for run, found in (
        (planned("broken")[0], {}),
        (planned("broken")[2], {"retriever": seen, "no-signal": seen}),
        (planned("healthy")[0], {}),
        (planned("healthy")[1], {"prompts": seen}),
    ):
        facts = {"findings": found, "rewards": [0.1, 0.2], "cpu_s": 60.0}
        fields = {"kind": run.kind, "variant": run.variant, "seed": run.seed, "level": run.level}
        (tmp_path / f"{run.name}.json").write_text(json.dumps(fields | facts))
    diagnose.write_table()
    page = (tmp_path / "diagnose.md").read_text()
    assert "**Found: 1 of 2. False alarms: 1 of 2.**" in page
    assert "| retriever-1-seed12 | retriever | yes | the searches / do not find: 3% | no-signal | 2 | 60 |" in page
    assert "| healthy-hard-seed31 | nothing | false alarm |" in page


def test_the_page_is_what_the_results_and_the_template_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = diagnose.PAGE.read_text()
    monkeypatch.setattr(diagnose, "PAGE", tmp_path / "diagnose.md")
    diagnose.write_table()
    assert (tmp_path / "diagnose.md").read_text() == kept, "python -m benchmarks.diagnose table"
