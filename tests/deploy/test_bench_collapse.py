"""`python -m benchmarks.collapse`: which runs, what a result shows, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import collapse
from benchmarks.collapse import FRESH, HEALTHY, REMEDIES, SEARCHED, SETTINGS, STEPS, judge, planned
from deploy.config import RunConfig, from_tree
from foray.demo.run import DemoOptions, demo_tree
from protocol.errors import ForayError, UserError


def config(run: collapse.Planned) -> RunConfig:
    return from_tree(demo_tree(DemoOptions(Path("d"), run.seed, overrides=run.overrides, hard=run.level == "hard")))


def result(rewards: list[float], **more: Any) -> dict[str, Any]:
    curves = {"reward_mean": rewards, **more.pop("curves", {})}
    return {
        "setting": "lag8-lr3-mb4",
        "remedy": "",
        "seed": 10,
        "level": "hard",
        "cpu_s": 60.0,
        "curves": curves,
    } | more


SIGNS = {"entropy": [0.5] * 80 + [1.5] * 70, "grad_norm": [0.3] * 90 + [5.0] * 60}
RISES, FALLS = [0.2 + 0.005 * n for n in range(100)], [0.7] * 10 + [0.3] * 40


def test_the_phases_have_the_runs_that_they_say_and_their_settings_are_valid() -> None:
    search, confirm = planned("search", ""), planned("confirm", "lag8-lr3-mb4")
    assert len(SETTINGS) >= 8 and {r.setting for r in search} == {*SETTINGS} and len(search) == 2 * len(SETTINGS)
    assert {r.seed for r in search[: len(SETTINGS)]} == {SEARCHED[0]}
    remedies, healthy = planned("remedies", "lag8-lr3-mb4"), planned("healthy", "")
    assert [r.seed for r in confirm] == [*FRESH] and len(remedies) == 5 * len(REMEDIES) and len(healthy) == 10
    assert not {*SEARCHED} & {*FRESH} and not {*HEALTHY} & {*FRESH, *SEARCHED}
    every = [*search, *confirm, *remedies, *healthy]
    assert len({r.name for r in every}) == len(every)
    run = config(confirm[0])
    assert (run.run.steps, run.run.max_lag, run.run.temperature) == (STEPS, 8, 0.5)
    assert (run.learner.optim.lr, run.learner.algorithm.minibatches) == (pytest.approx(1.5e-3), 4)
    found = {r.remedy: config(r).learner.algorithm for r in remedies}
    assert [found[f"preserve.{n}"].preserve.coefficient for n in (1, 2)] == [0.1, 0.2]
    assert found["calibadv"].turns == "calibrated" and found["calibadv"].preserve.coefficient == 0
    assert [config(r).learner.optim.lr for r in healthy[:2]] == pytest.approx([5e-4, 1e-3]), "those of the demos"
    (slow, _) = planned("search", "lag4-lr10-mb1-r1")
    optim = config(slow).learner.optim
    assert (optim.lr, optim.schedule, optim.warmup_steps) == (pytest.approx(5e-3), "constant", 0)
    assert optim.warmup_fraction == 0.285
    for wrong in ("lag8", "lag8-lr3-mb4-x"):
        with pytest.raises(UserError, match="not a setting"):
            config(planned("search", wrong)[0])
    with pytest.raises(UserError, match="needs a setting"):
        planned("remedies", "")


def test_a_fall_and_the_steps_before_it_are_those_counted_by_hand() -> None:
    found = judge(result(RISES + FALLS, curves=SIGNS))
    # a tenth is 15 steps: .675 to .695 five times and .7 ten times; it stays below half once it holds 14 steps at .3
    assert (found.best, found.best_step) == (pytest.approx((sum(RISES[-5:]) + 7) / 15), 110)
    assert found.last == pytest.approx(0.3) and found.fall == 124
    # with k of ten steps risen by 1 the window has risen by k / 10, and 4 standard errors are 4 (k (10 - k) / 900)^.5:
    # .6 < .653, .7 > .611
    assert found.signs["entropy"] == 87 and found.signs["grad_norm"] == 97
    assert found.alarm == found.early == 97
    risen = judge(result(RISES + [0.7] * 50))
    assert (risen.fall, risen.alarm, risen.early, risen.signs) == (None, None, None, {})
    assert judge(result([0.0] * 150)).fall is None, "nothing to fall from"
    missing = judge(result(RISES + FALLS, curves={"fell_turns": [None] * 150}))
    assert missing.early is None and missing.alarm == missing.signs["reward_mean"]


def test_a_run_without_a_right_answer_for_thirty_steps_is_dead() -> None:
    steps = {n: {"reward_mean": 0.0} for n in range(1, 31)}
    assert collapse.is_dead(steps) and not collapse.is_dead(dict(list(steps.items())[1:]))
    assert not collapse.is_dead(steps | {31: {"reward_mean": 0.01}})
    stopped = judge(result(RISES + [0.0] * 30))
    assert (stopped.last, stopped.fall) == (0.0, 108), "as if it had gone on"


def test_the_page_says_what_was_run_and_what_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for name, path in (("FOLDER", tmp_path), ("PAGE", tmp_path / "page.md")):
        monkeypatch.setattr(collapse, name, path)
    for seed in FRESH[:2]:
        for remedy, rewards in (("", RISES + FALLS), ("preserve.2", RISES + [0.7] * 50)):
            given = result(rewards, remedy=remedy, seed=seed, curves={} if remedy else SIGNS)
            (tmp_path / f"{collapse.Planned('lag8-lr3-mb4', remedy, seed).name}.json").write_text(json.dumps(given))
    assert collapse.main(["table"]) == 0
    text = (tmp_path / "page.md").read_text()
    assert "| coefficient 0 | 2 | 2 | 0.695 (0.695 to 0.695) | 0.300 (0.300 to 0.300) |  | 2 of 2 | 27 |" in text
    assert (
        "| preserve.2 | 2 | 0 | 0.700 (0.700 to 0.700) | 0.700 (0.700 to 0.700) | +0.400 (+0.400 to +0.400) |" in text
    )
    assert text.count("Not run yet.") == 2 and "0 of 0 runs raised an alarm" in text
    assert (tmp_path / "collapse-lag8-lr3-mb4.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_with_a_result_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(collapse, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(collapse, "play", lambda run, say: made.append(run.name) or {"cpu_s": 1.0})
    assert collapse.main(["confirm", "--setting", "lag1-lr3-mb4", "--most", "2"]) == 0
    assert collapse.main(["confirm", "--setting", "lag1-lr3-mb4"]) == 0
    assert made == [f"hard-lag1-lr3-mb4-seed{seed}" for seed in FRESH]


def test_an_interrupted_run_goes_on_and_its_cost_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, told = tmp_path / "hard-lag1-lr1-mb1-seed3", []

    class Learner:
        """Trains to the step that the test gives, and reports its configuration."""

        until = 100

        def __init__(self, config: RunConfig, say: object) -> None:
            told.append(config.run.id)
            self.supervisor = self

        def __enter__(self) -> Learner:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self) -> None:
            lines = [json.dumps({"step": n, "reward_mean": 0.5}) + "\n" for n in range(1, self.until + 1)]
            (directory / "metrics.jsonl").write_text("".join(lines))

        def check(self) -> None: ...

        def ended(self, name: str) -> bool:
            return True

    def prepared(run: collapse.Planned, directory: Path, say: object) -> RunConfig:
        directory.mkdir()
        (directory / collapse.CONFIG_COPY).write_text("run: {id: once}")
        return collapse.load_config(directory / collapse.CONFIG_COPY)

    monkeypatch.setattr(collapse, "RUNS", tmp_path)
    monkeypatch.setattr("deploy.launch.launcher.Launcher", Learner)
    monkeypatch.setattr(collapse, "_prepared", prepared)
    run = collapse.Planned("lag1-lr1-mb1", "", 3)
    with pytest.raises(ForayError, match="ended at step 100 of 150"):
        collapse.play(run, print)
    (directory / "cpu_s").write_text("70.0")
    Learner.until = STEPS
    found = collapse.play(run, print)
    assert (found["cpu_s"], len(found["curves"]["reward_mean"]), told) == (70.0, STEPS, ["once", "once"])
