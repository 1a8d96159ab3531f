"""`python -m benchmarks.diagnose`: the runs and their settings, the rewards, the broken retriever, the page."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.diagnose import __main__ as diagnose
from benchmarks.diagnose import breakages
from benchmarks.diagnose.__main__ import CHOSEN, planned
from benchmarks.diagnose.breakages import KINDS, Breakage, searching
from deploy.config import from_tree
from foray.demo.run import DemoOptions, demo_tree
from foray.watch.findings import REGISTRY
from protocol.messages import Question, Status
from rollout_server.rewards.base import RewardInput, TurnText


def test_a_breakage_that_judges_differs_from_that_of_the_thresholds_in_settings_and_seed() -> None:
    assert set(KINDS) <= set(REGISTRY) and len(KINDS) == 8
    thresholds, broken, healthy = (planned(phase) for phase in ("thresholds", "broken", "healthy"))
    assert [run.kind for run in broken] == [*KINDS] and len(healthy) == 4 and not any(run.kind for run in healthy)
    assert not {run.seed for run in (*broken, *healthy)} & {run.seed for run in thresholds}
    assert {run.seed for run in thresholds} == {*CHOSEN, 12}  # 12 was judged, and then used
    every = [*thresholds, *broken, *healthy]
    assert len({run.name for run in every}) == len(every) == 3 * 8 + 6 + 1 + 12
    for kind, variants in KINDS.items():
        assert len({*variants}) == len(variants) >= 2, kind
    for run in every:
        hard = run.breakage.level == "hard"
        config = from_tree(demo_tree(DemoOptions(Path("d"), run.seed, overrides=run.overrides, hard=hard)))
        assert config.run.steps == run.breakage.steps and config.run.seed == run.seed


def answered(text: str, *queries: str) -> RewardInput:
    question = Question(id="q", text="?", answers=("kona vesta",))
    turns = tuple(TurnText("", query=query, observation="( kona ) kona elected mira .") for query in queries)
    return RewardInput(question, Status.ANSWERED, text, turns, len(turns))


def test_the_rewards_pay_for_what_their_names_say() -> None:
    assert breakages.constant(answered("x")) == breakages.constant(answered("y", "z"))
    assert breakages.answered_at_once(answered("x")) > breakages.answered_at_once(answered("x", "q"))
    assert breakages.long_answers(answered("a b c d e f g")) > breakages.long_answers(answered("kona vesta"))
    assert breakages.copied_words(answered("kona kona elected mira", "q")) > breakages.copied_words(
        answered("kona", "q")
    )


def test_a_broken_engine_reports_log_probs_of_another_temperature() -> None:
    import numpy as np
    import torch

    from benchmarks.diagnose.engine import at_another_temperature
    from rollout_server.cpu_engine.model.sampler import SamplingBatch, sample

    one = np.ones(1, np.float32)
    rules = SamplingBatch(one, np.ones(1, np.int64), one, 0 * one, np.ones(1, np.uint64), np.ones(1, np.int64))
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    found = at_another_temperature(sample, 0.5)(logits.clone(), rules).all_logprobs
    assert torch.allclose(found, torch.log_softmax(logits / 0.5, -1))
    assert not torch.allclose(found, sample(logits.clone(), rules).all_logprobs)


def test_a_broken_search_answers_at_random_or_from_another_world(tmp_path: Path) -> None:
    with searching(Breakage(search="random"), 0, tmp_path / "corpus.jsonl") as (setting,):
        url = setting.partition("[")[2].rstrip("]")
        body = json.dumps({"queries": ["mayor of kona", "seat of mira"], "topk": 2}).encode()
        asked = urllib.request.Request(f"{url}/retrieve", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: Any = json.load(answer)["result"]
    assert [len(hits) for hits in found] == [2, 2] and "contents" in found[0][0]["document"]
    with searching(Breakage(search="foreign"), 0, tmp_path / "corpus.jsonl") as (setting,):
        passages = Path(setting.partition("=")[2]).read_text().count("\n")
    with searching(Breakage(search="tenth"), 0, tmp_path / "corpus.jsonl") as (setting,):
        assert 100 < passages <= 10 * Path(setting.partition("=")[2]).read_text().count("\n") < passages + 10
    with searching(Breakage(), 0, tmp_path / "none") as settings:
        assert settings == ()


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
    assert "| retriever-2-seed22 | retriever | yes | the searches / do not find: 3% | no-signal | 2 | 60 |" in page
    assert "| healthy-hard-seed31 | nothing | false alarm |" in page


def test_the_page_is_what_the_results_and_the_template_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = diagnose.PAGE.read_text()
    monkeypatch.setattr(diagnose, "PAGE", tmp_path / "diagnose.md")
    diagnose.write_table()
    assert (tmp_path / "diagnose.md").read_text() == kept, "python -m benchmarks.diagnose table"
