"""`foray bench learner`: a small run of ours beside the padded loop, and what happens when one cannot take part."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from deploy.bench.learner import TRL_VARIABLE, LearnerBench
from deploy.bench.learner_contenders import Contender, contenders_of
from deploy.bench.learner_groups import skewed_groups
from deploy.bench.learner_work import Work, write_work
from deploy.cli import main
from protocol.errors import ForayError, UserError

SMALL = {"groups": 2, "group_size": 2, "longest": 200, "vocabulary": 64, "shape": "tiny"}


@pytest.fixture
def no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRL_VARIABLE, raising=False)


@pytest.mark.slow
def test_a_small_run_is_of_the_same_step_and_says_who_was_left_out(
    capsys: pytest.CaptureFixture[str], no_trl: None
) -> None:
    assert main(["bench", "learner", "--quick", "--json", "--only", "padded"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ours"]["grad_norm"] == pytest.approx(told["baseline"]["grad_norm"], rel=1e-3) != 0
    assert told["ours"]["loss"] == pytest.approx(told["baseline"]["loss"], abs=1e-4) != 0
    assert told["ratio"] == pytest.approx(told["value"] / told["baseline"]["tokens_per_s"], rel=1e-2)
    assert told["cpu_ratio"]["padded"] > 0
    assert 0 < told["ours"]["mfu"] < 1.5 and told["ours"]["step_mib"] > 0
    assert told["packing_efficiency"] > 0.9
    assert set(told["absent"]) == {"unfused", "padded_sorted", "trl"} and TRL_VARIABLE in told["absent"]["trl"]


@pytest.mark.slow
def test_the_batch_on_disk_is_what_was_drawn(tmp_path: Path) -> None:
    settings = LearnerBench.model_validate(SMALL)
    work = write_work(settings, tmp_path)
    with np.load(tmp_path / "batch.npz") as data:
        starts = np.cumsum(data["lengths"]) - data["lengths"]
        trajectories = [t for group in skewed_groups(settings) for t in group.trajectories]
        for trajectory, start, length in zip(trajectories, starts, data["lengths"], strict=True):
            assert (data["ids"][start : start + length] == trajectory.ids[:length]).all()
            assert (data["mask"][start : start + length] == trajectory.mask[:length]).all()
            assert not trajectory.mask[length:].any(), "what is left off must not be trained"
        assert data["mask"].sum() == work.facts["tokens_trained"]


def test_steps_that_are_not_the_same_are_not_compared() -> None:
    figures = {"loss": 0.1, "grad_norm": 1.0}
    LearnerBench()._refuse_other_work({"ours": figures, "padded": figures | {"grad_norm": 1.0002}})
    with pytest.raises(ForayError, match="not the same work"):
        LearnerBench()._refuse_other_work({"ours": figures, "padded": figures | {"grad_norm": 1.1}})


def names(settings: LearnerBench, absent: dict[str, str]) -> list[str]:
    return [c.name for c in contenders_of(settings, Work(Path("spec.json"), {}), absent)]


def test_an_environment_without_trl_and_a_misspelt_contender_are_told_apart(no_trl: None) -> None:
    absent: dict[str, str] = {}
    assert names(LearnerBench(trl_python=sys.executable), absent) == ["ours", "unfused", "padded", "padded_sorted"]
    assert absent == {"trl": f"{sys.executable} has no TRL"}
    names(LearnerBench(trl_python="/nowhere/python"), absent)
    assert "No such file" in absent["trl"]
    with pytest.raises(UserError, match="paded"):
        names(LearnerBench(only="paded"), absent)


def test_a_contender_that_dies_says_why(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "raise SystemExit('no memory')")
    with pytest.raises(ForayError, match="no memory"), Contender("padded", argv, tmp_path, 1) as contender:
        contender.ready()


@pytest.mark.skipif(TRL_VARIABLE not in os.environ, reason=f"{TRL_VARIABLE} names no interpreter with TRL")
def test_trl_makes_the_same_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "learner", "--quick", "--json", "--only", "trl"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trl"]["grad_norm"] == pytest.approx(told["ours"]["grad_norm"], rel=1e-3)
