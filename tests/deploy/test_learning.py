"""Problems of learning: in `status`, `up` and the report, from `metrics.jsonl`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from deploy.config import load_config
from deploy.launch.launcher import Launcher
from deploy.run.history import PAST, RunHistory, read_history
from deploy.run.learning import learning_problems, learning_state
from deploy.run.snapshot import RunSnapshot
from foray.watch.status import problems, to_json
from foray.watch.status_page import render
from learner.observability.metrics import StepLog

WELL = {"reward_mean": 0.4, "reward_std": 0.3, "searches_mean": 1.5, "status/truncated": 0.1, "entropy": 0.8}
WELL |= {"zero_advantage_share": 0.5, "settled": 500.0, "dead": 2.0}


def history(steps: int = 20, **changed: float) -> RunHistory:
    recent = tuple({"step": n + 1, "epoch": 1, **WELL, **changed} for n in range(steps))
    return RunHistory(dict(recent[-1]), recent, recent)


@pytest.mark.parametrize(
    ("changed", "what", "todo"),
    [
        ({"reward_mean": 0.0, "reward_std": 0.0, "zero_advantage_share": 1.0}, "equal (0.000)", "The reward stays 0"),
        ({"zero_advantage_share": 0.99}, "99% of the trajectories of the last 20 steps have no adv", "group_size"),
        ({"status/truncated": 1.0}, "100% of the trajectories of the last 20 steps are truncated", "max_new_tokens"),
        ({"searches_mean": 0.0}, "no trajectory of the last 20 steps has searched", "rollout.episode.template"),
        ({"entropy": 0.001}, "entropy has collapsed", "clip_high"),
        ({"dead": 8.0, "settled": 50.0}, "8 of 50 questions (16.0%) failed", "foray dlq list"),
    ],
)
def test_a_run_that_cannot_learn_is_not_healthy(changed: dict[str, float], what: str, todo: str) -> None:
    (problem,) = learning_problems(history(**changed))
    assert what in problem.what and todo in problem.todo
    for state in ("done", "stopped"):
        seen = RunSnapshot("t", "", target_state=state, stopped=state == "stopped", history=history(**changed))
        assert problem in problems(seen, max_lag=2) and not to_json(seen, max_lag=2)["healthy"]
        assert f"run t: {state}, NOT healthy" in render(seen, max_lag=2)


def test_a_run_that_learns_that_has_solved_its_questions_or_has_just_begun_is_healthy() -> None:
    assert learning_problems(history()) == learning_problems(RunHistory()) == []
    solved = {"reward_mean": 1.0, "reward_std": 0.0, "zero_advantage_share": 1.0, "entropy": 0.0}
    assert learning_problems(history(**solved)) == []
    assert learning_problems(history(9, reward_std=0.0, searches_mean=0.0)) == []
    assert learning_problems(history(dead=2.0, settled=20.0)) == [], "two failures are no pattern"


def test_the_fields_are_those_of_the_file(tmp_path: Path) -> None:
    lines = [json.dumps({"step": n, "epoch": 1} | WELL | {"searches_mean": 0.0}) + "\n" for n in range(1, 12)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (problem,) = learning_problems(read_history(tmp_path / "metrics.jsonl"))
    assert problem.what == "no trajectory of the last 11 steps has searched"


def test_a_restart_does_not_make_a_run_healthy_that_learns_nothing(tmp_path: Path) -> None:
    equal = WELL | {"reward_mean": 0.0, "reward_std": 0.0}
    lines = [json.dumps({"step": n, "epoch": 1 + n // 10} | equal) + "\n" for n in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (problem,) = learning_problems(read_history(tmp_path / "metrics.jsonl"))
    assert problem.what == "nothing is learned: all rewards of the last 12 steps are equal (0.000)"


def test_up_says_each_problem_once(tmp_path: Path) -> None:
    said: list[str] = []
    launcher = Launcher(load_config(None, [f"run.dir={tmp_path}"]), say=said.append)
    log = StepLog(tmp_path / "metrics.jsonl")
    for step in range(1, 16):
        log.append({"step": step, "epoch": 1} | WELL | {"status/truncated": 0.9, "dead": 30.0})
        launcher._say_problems()
    log.close()
    assert [line.partition(";")[0] for line in said] == [
        "problem: 30 of 500 questions (6.0%) failed and are not trained",
        "problem: 90% of the trajectories of the last 10 steps are truncated",
    ]


def test_a_step_after_half_a_line_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    log = StepLog(path)
    log.append({"step": 2, "epoch": 2})
    log.close()
    assert read_history(path).last == {"step": 2.0, "epoch": 2.0}
    StepLog(path).close()
    assert path.read_text().endswith('"epoch":2}\n')


def told(past: list[dict[str, float]]) -> RunHistory:
    return RunHistory(past[-1], tuple(past[-20:]), tuple(past[-PAST:]))


def steps(count: int, seed: int = 0, **ends: tuple[float, float]) -> list[dict[str, float]]:
    """Steps whose metrics go evenly from one value to another, with a tenth of noise; the others are constant."""
    draw = random.Random(seed)
    constant = {"logprob_right": -0.3, "entropy": 0.8, "grad_norm": 0.4, "ratio_low": 0.001, "fell_turns": 0.3}
    values = {name: (value, value) for name, value in {"reward_mean": 0.4, **constant}.items()} | ends
    return [
        {name: (a + (b - a) * n / (count - 1)) * (1 + draw.gauss(0, 0.1)) for name, (a, b) in values.items()}
        for n in range(count)
    ]


def test_a_run_learns_stalls_or_cannot_be_judged_yet() -> None:
    rising = steps(60, reward_mean=(0.2, 0.6))
    assert learning_state(told(rising)).word == "learning"
    assert learning_state(told(rising[:19])).word == learning_state(RunHistory()).word == ""
    stalled = learning_state(told(steps(60)))
    assert stalled.word == "stalled" and "is no rise" in stalled.sign
    assert learning_state(told(steps(60, reward_mean=(0.95, 0.95)))).word == "learning", "solved"
    for state in ("learning", "stalled"):
        seen = RunSnapshot("t", "", target_state="done", history=told(rising if state == "learning" else steps(60)))
        assert to_json(seen, max_lag=2)["learning"]["word"] == state


FALLS = {
    "logprob_right": (-0.3, -0.7),
    "entropy": (0.5, 1.4),
    "grad_norm": (0.3, 2.0),
    "ratio_low": (0.001, 0.1),
    "fell_turns": (0.4, 0.9),
    "logprob_change": (-0.01, -0.02),
    "thoughts_empty": (0.01, 0.6),
    "turns_repeated": (0.01, 0.5),
}


@pytest.mark.parametrize("one", FALLS)
def test_two_signs_or_a_falling_reward_say_that_it_collapses(one: str) -> None:
    other = "entropy" if one != "entropy" else "grad_norm"
    rises = {"reward_mean": (0.3, 0.6)}
    assert learning_state(told(steps(60, **rises, **{one: FALLS[one]}))).word == "learning", "one sign is not enough"
    state = learning_state(told(steps(60, **rises, **{name: FALLS[name] for name in (one, other)})))
    assert state.word == "collapsing" and one in state.sign and other in state.sign
    fallen = told([*steps(40), *steps(20, 1, reward_mean=(0.2, 0.1))])
    (problem, *_) = learning_problems(fallen)
    assert "the run is collapsing: the reward falls: reward_mean 0.4" in problem.what
    assert "The reward collapses" in problem.todo
    better = {name: ends[::-1] for name, ends in FALLS.items()} | {"logprob_change": (0.02, 0.01)}
    assert learning_state(told(steps(60, **rises, **better))).word == "learning"


def test_good_answers_that_fall_in_each_step_are_seen_after_ten() -> None:
    falls = {"fell_turns": (0.7, 0.9), "logprob_change": (-0.02, -0.05)}
    assert learning_state(told(steps(10, **falls))).word == "collapsing"
    assert learning_state(told(steps(9, **falls))).word == ""
    assert learning_state(told(steps(10, **falls | {"fell_turns": (0.4, 0.5)}))).word == ""


def test_a_healthy_run_with_noise_never_collapses() -> None:
    for seed in range(12):
        run = steps(120, seed, reward_mean=(0.2, 0.7), entropy=(0.9, 0.3), logprob_right=(-0.5, -0.2))
        states = {learning_state(told(run[:n])).word for n in range(20, 121, 10)}
        assert "collapsing" not in states and "learning" in states
