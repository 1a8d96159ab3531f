"""`foray bench learner`: a small run of Foray and the padded loop, and contenders that cannot run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learner.bench import ORDER, Contender, contenders_of, kept, refuse_other_work
from benchmarks.learner.ours import trainer_settings
from benchmarks.learner.settings import CLIP_HIGH, CLIP_LOW, TRL_VARIABLE, LearnerBench
from benchmarks.learner.workload import SHAPES, LearnerWorkload, head_share, skewed_groups, write_work
from benchmarks.report import judged
from foray.cli import main
from protocol.errors import ForayError, UserError

FACTS = {"trajectories": 32.0, "tokens_trained": 3000.0}
SMALL = {"groups": 2, "group_size": 2, "longest": 200, "vocabulary": 64, "shape": "tiny"}


@pytest.fixture
def no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRL_VARIABLE, raising=False)


@pytest.mark.slow
def test_a_small_run_is_of_the_same_step_and_says_who_was_left_out(
    capsys: pytest.CaptureFixture[str], no_trl: None
) -> None:
    assert main(["bench", "learner", "--quick", "--json", "--only", "padded"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ours"]["grad_norm"] == pytest.approx(result["baseline"]["grad_norm"], rel=1e-3) != 0
    assert result["ours"]["loss"] == pytest.approx(result["baseline"]["loss"], abs=1e-4) != 0
    assert result["ratio"] == pytest.approx(result["value"] / result["baseline"]["tokens_per_s"], rel=1e-2)
    assert (
        result["cpu_ratio"]["padded"] > 0
        and result["trajectories_each"] * result["micro_batches"] >= result["trajectories"]
    )
    assert 0 < result["ours"]["mfu"] < 1.5 and result["ours"]["step_mib"] > 0
    assert result["packing_efficiency"] > 0.9
    assert set(result["absent"]) == {"unfused", "padded_sorted", "trl"} and TRL_VARIABLE in result["absent"]["trl"]


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


def test_the_loss_of_ours_is_that_of_the_others() -> None:
    algorithm = trainer_settings(LearnerBench(), logit_chunk_mib=64).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (CLIP_LOW, CLIP_HIGH, 0)
    assert not algorithm.kl.coefficient and not algorithm.entropy_coefficient


def test_steps_that_are_not_the_same_are_not_compared() -> None:
    figures = {"loss": 0.1, "grad_norm": 1.0}
    refuse_other_work(LearnerBench(), {"ours": figures, "padded": figures | {"grad_norm": 1.0002}})
    with pytest.raises(ForayError, match="the contenders disagree"):
        refuse_other_work(LearnerBench(), {"ours": figures, "padded": figures | {"grad_norm": 1.1}})


def test_the_output_layer_weighs_what_it_weighs_in_the_model_that_people_train() -> None:
    """Qwen2.5-1.5B: 152k words, 0.15 of the matrix products; a small body with a large vocabulary flatters ours."""
    shape = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960}
    meant = head_share(shape | {"num_key_value_heads": 2, "vocab_size": 151936})
    ours = LearnerBench()
    shown = head_share(SHAPES[ours.shape] | {"num_key_value_heads": 2, "vocab_size": ours.vocabulary})
    assert meant == pytest.approx(0.151, abs=1e-3) and shown == pytest.approx(meant, abs=0.02)


def figures_of(**tokens_per_s: float) -> dict[str, dict[str, float]]:
    one = {"loss": 0.1, "grad_norm": 1.0, "start_mib": 1.0, "peak_mib": 2.0, "cpu_ms_per_token": 1.0}
    return {kind: one | {"tokens_per_s": value} for kind, value in tokens_per_s.items()}


@pytest.mark.parametrize(("padded", "in_order", "best"), [(10.0, 20.0, "padded_sorted"), (20.0, 10.0, "padded")])
def test_the_ratio_is_against_the_better_padded_loop(
    padded: float, in_order: float, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = figures_of(ours=60.0, padded=padded, padded_sorted=in_order, trl=15.0)
    monkeypatch.setattr("benchmarks.learner.bench.play", lambda *_: [row, row])
    monkeypatch.setattr("benchmarks.learner.workload.write_work", lambda *_: LearnerWorkload(Path("spec"), {**FACTS}))
    measured = LearnerBench().measure(lambda line: None)
    assert measured.ratio == 3.0 and ORDER[best] in measured.baseline["name"] and measured.details["ratio_trl"] == 4.0
    met = [judged(target, {"ratio": 3.0, **measured.details})["met"] for target in LearnerBench.targets]
    assert met == [True, True, None, None], "those without signs and with preserve have not run"


def test_signs_and_preserve_are_compared_in_each_round() -> None:
    speeds = [(1.0, 1.0, 9.0), (9.0, 10.0, 8.0), (95.0, 100.0, 90.0), (49.0, 50.0, 47.0)]
    rows = [figures_of(ours=ours, unmeasured=off, preserve=on) for ours, off, on in speeds]
    assert kept(rows) == {"kept_with_signs": 0.95, "kept_with_preserve": 0.9}, "the first round is the warm-up"
    assert [row.pop("preserve") for row in rows] and kept(rows) == {"kept_with_signs": 0.95}


def names(settings: LearnerBench, absent: dict[str, str]) -> list[str]:
    return [c.name for c in contenders_of(settings, LearnerWorkload(Path("spec.json"), {}), absent)]


def test_an_environment_without_trl_differs_from_a_misspelt_contender(no_trl: None) -> None:
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
    result = json.loads(capsys.readouterr().out)
    assert result["trl"]["grad_norm"] == pytest.approx(result["ours"]["grad_norm"], rel=1e-3)
