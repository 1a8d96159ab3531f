"""A learner's `/metrics` while it trains, found as people find it; and the same names in `metrics.jsonl`."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from learner.config.learner import LearnerSettings
from learner.observability.metric_table import STEP
from learner.observability.metrics import StepLog
from protocol.codec import decode_as
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot
from protocol.runtime.metrics import row_of
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.metrics_page import check_page


def test_the_page_of_a_learner_that_trains(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Callable[..., int],
    address: dict[str, Any],
    db: redis.Redis,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys, urls, pages = Keys(run.id), list[str](), list[str]()

    def look(updates: int) -> None:
        if updates == 5:
            reported = decode_as(MetricsSnapshot, db.get(keys.metrics("learner", "0")))
            urls.append(reported.text["url"])
            with urllib.request.urlopen(f"{urls[0]}/metrics", timeout=10) as answer:
                pages.append(answer.read().decode())

    with tiny_learner.Player(address, run.id):
        assert serve(run, settings, before=look) == 0
    families = check_page(pages[0])
    value = {s.name: s.value for f in families.values() for s in f.samples if not s.labels.keys() - {"run"}}
    assert {s.labels["run"] for f in families.values() for s in f.samples} == {run.id}
    assert value["foray_learner_trained_total"] == value["foray_learner_groups_trained_total"] == 5 * 4
    assert (
        value["foray_learner_group_lag_steps_count"] == value["foray_learner_group_queue_age_seconds_count"] - 4 == 20
    )
    assert value["foray_learner_token_lag_steps_count"] == value["foray_learner_tokens_sampled_total"] == 20 * 16
    parts = {s.labels["part"]: s.value for s in families["foray_learner_reward_part_mean"].samples}
    assert parts == {"em": 0.5}
    lines = tiny_learner.step_lines(run.dir)
    names = {name for line in lines for name in line} - {"seqs", "seconds"}
    assert {name for name in names if row_of(STEP, name)[0] not in STEP} == set()
    assert lines[-1]["status/answered"] == 1.0 and (lines[-1]["settled"], lines[-1]["dead"]) == (32, 0)
    arrived = sum(line["tokens_generated_per_s"] * line["step_s"] for line in lines)
    assert arrived == pytest.approx(8 * 4 * 16, rel=0.01), "no token is counted twice or left out"
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 8/8")]
    assert "reward_mean 0.500  reward/em 0.500" in shown[0] and "tok/s" in shown[0]
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{urls[0]}/metrics", timeout=2)


def test_counters_of_a_resumed_learner_begin_at_zero(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Callable[..., int],
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    keys, pages = Keys(run.id), list[dict[str, float]]()

    def snapshot() -> MetricsSnapshot:
        return decode_as(MetricsSnapshot, db.get(keys.metrics("learner", "0")))

    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    def look(updates: int) -> None:
        if updates == 4:  # one step of this process is done
            deadline = time.monotonic() + 30
            while (reported := snapshot()).values["epoch"] < 2:
                assert time.monotonic() < deadline, "the second learner does not report"
                time.sleep(0.02)
            with urllib.request.urlopen(f"{reported.text['url']}/metrics", timeout=10) as answer:
                families = check_page(answer.read().decode()).values()
            samples = [s for family in families for s in family.samples]
            pages.append({s.name: s.value for s in samples if not s.labels.keys() - {"run"}})

    with tiny_learner.Player(address, run.id):
        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=die)
        assert serve(run, settings, before=look) == 0
    (value,) = pages
    assert value["foray_learner_step"] == 4, "resumed from the checkpoint of step 3"
    assert value["foray_learner_trained_total"] == value["foray_learner_groups_trained_total"] == 4
    assert value["foray_learner_tokens_sampled_total"] == value["foray_learner_token_lag_steps_count"] == 4 * 16
    assert snapshot().values["groups_trained"] == 8 * 4, "the run's total"


def test_a_small_number_of_a_step_is_not_rounded_to_nothing(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.append({"lr": 1.7482517e-9, "loss": float("nan"), "tokens_trained": 123456789.0, "parts": {"x": 1.23456789}})
    log.close()
    (line,) = tiny_lines(tmp_path)
    assert line == {"lr": 1.74825e-09, "loss": None, "tokens_trained": 123456789.0, "parts": {"x": 1.234568}}


def tiny_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
