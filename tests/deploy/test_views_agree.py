"""Every view of a run shows the same numbers: status, top, report, replay and dashboard of one run."""

from __future__ import annotations

import argparse
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foray.commands.watch import replay, report, status, top
from foray.dashboard.source import RunData
from protocol.ledger import Ledger, Outcome
from tests.support.dashboard_run import located, read_all, write_run

SAMPLED = 216
"""Sampled tokens of the 24 trajectories, 9 each."""
SAID = {
    "step": r"step\s+(\d+) of 4",
    "reward": r"reward\s+([\d.]+) trained",
    "generated": r"generated (\d+) =",
    "generated/s": r"tokens/s\s+([\d,]+) generated",
    "trained/s": r"tokens/s\s+[\d,]+ generated, ([\d,]+) trained",
    "groups": r"issued \d+ = trained (\d+)",
    "dead": r"stale \d+ \+ dead (\d+)",
}
EXPECTED = {
    "step": 4,
    "reward": 0.167,
    "generated": SAMPLED + 7,
    "generated/s": 130,
    "trained/s": 27,
    "groups": 12,
    "dead": 1,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of 4 steps: 12 trained groups, a dead seq, a checkpoint, two steps that a crash rolled back."""
    directory = write_run(tmp_path / "run", redis_url="redis://127.0.0.1:1/0")
    rewards = {1: 1 / 3, 2: 1 / 6, 3: 1 / 3, 4: 1 / 6}
    lines = [
        {"step": step, "epoch": 1, "step_s": 2.0, "reward_mean": rewards[step], "lag_mean": 0.5, "tokens_trained": 54,
         "tokens_generated_per_s": 100.0 + 20 * (step % 4)}
        for step in (1, 2, 3, 2, 3, 4)
    ]  # fmt: skip
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = Ledger()
    for seq in range(1, 13):
        ledger.settle(seq, Outcome.TRAINED)
    ledger.settle(13, Outcome.DEAD)
    tokens = {"generated": SAMPLED + 7, "buckets": {"trained": SAMPLED, "failed": 7}}
    manifest = {"step": 4, "epoch": 1, "ledger": ledger.to_state(), "lineage": [[1, 0]], "tokens": tokens}
    (directory / "checkpoints" / "step_4.e1").mkdir(parents=True)
    (directory / "checkpoints" / "step_4.e1" / "manifest.json").write_text(json.dumps(manifest))
    (directory / "checkpoints" / "CURRENT").write_text("step_4.e1\n")
    return directory


@pytest.fixture
def printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(command: Any, **given: object) -> str:
        assert command.run(argparse.Namespace(given=[str(run_dir)], config=None, **given)) == 0
        return capsys.readouterr().out

    return call


def said(text: str) -> dict[str, float]:
    found = {name: re.search(pattern, text) for name, pattern in SAID.items()}
    return {name: float(match[1].replace(",", "")) for name, match in found.items() if match}


def test_status_top_report_and_dashboard_show_the_same_numbers(run_dir: Path, printed: Callable[..., str]) -> None:
    printed(report, out=None)
    page = html.unescape(re.sub(r"<[^>]+>", " ", (run_dir / "report.html").read_text()))
    assert said(printed(status, json=False)) == EXPECTED
    assert said(printed(top, json=False, once=True, interval=1.0)) == EXPECTED
    assert said(page) == EXPECTED
    given = {"json": True, "once": True, "interval": 1.0}
    seen = read_all(RunData(located(run_dir))).overview()
    for found in (seen, json.loads(printed(status, json=True)), json.loads(printed(top, **given))):
        assert {
            "step": found["figures"]["step"],
            "reward": round(found["figures"]["reward_mean"], 3),
            "generated": found["tokens"]["generated"],
            "generated/s": found["tokens_per_s"]["generated"],
            "trained/s": found["tokens_per_s"]["trained"],
            "groups": found["ledger"]["trained"],
            "dead": found["ledger"]["dead"],
        } == EXPECTED


def test_replay_shows_the_trajectories_that_these_numbers_count(run_dir: Path, printed: Callable[..., str]) -> None:
    given = {"run_dir": run_dir, "show": 99, "seq": None, "all": True, "model": None, "json": True}
    shown = [json.loads(line) for line in printed(replay, **given).splitlines()]
    last = [one["reward"] for one in shown if one["step"] == EXPECTED["step"]]
    assert max(one["step"] for one in shown) == EXPECTED["step"]
    assert round(sum(last) / len(last), 3) == EXPECTED["reward"]
    assert len({one["seq"] for one in shown}) == EXPECTED["groups"]
    assert sum(one["sampled"] for one in shown) == SAMPLED
    page = read_all(RunData(located(run_dir))).group_page(7, None)["trajectories"]
    for one, other in zip([one for one in shown if one["seq"] == 7], page, strict=True):
        pieces = [segment.pop("parts") for segment in other["segments"]]
        assert one == {name: value for name, value in other.items() if name != "decoded"} and all(pieces)
