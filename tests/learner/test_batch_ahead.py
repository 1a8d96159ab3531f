"""The next batch is built while one trains: equal bit for bit to one built in its place, whatever came between."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import learner.loop as loop
from learner import main
from learner.algorithms import build_algorithm
from learner.checkpoint.journal import read_journal
from learner.config.learner import LearnerSettings
from learner.data.batch import Batch, build_batch
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.learner.test_loop import assert_exactly_once
from tests.support.tiny_learner import Player, TinyEngine

Serve = Callable[..., int]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[int, Batch]:
    """step -> the batch that it trained."""
    found: dict[int, Batch] = {}
    train = TinyEngine.train

    def note(self: TinyEngine, batch: Batch) -> Any:
        report = train(self, batch)
        if not report.skipped:
            found[self.updates] = batch
        return report

    monkeypatch.setattr(TinyEngine, "train", note)
    return found


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(thread, now_step) of every batch that was built."""
    found: list[tuple[str, int]] = []
    build = loop.batch_for_step

    def note(conditions: Any, *rest: Any, **more: Any) -> Any:
        found.append((threading.current_thread().name, conditions.now_step))
        return build(conditions, *rest, **more)

    monkeypatch.setattr(loop, "batch_for_step", note)
    return found


def plain(batch: Batch) -> Any:
    """Every value of a batch, arrays as their dtype, shape and bytes."""

    def content(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return [content(getattr(value, field.name)) for field in dataclasses.fields(value)]
        if isinstance(value, tuple):
            return [content(part) for part in value]
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return content(batch)


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [(), (4, 6)])
def test_a_batch_built_ahead_is_the_one_that_would_be_built_at_its_step(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    trained: dict[int, Batch],
    built: list[tuple[str, int]],
    skipped: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a reward scale that depends on every batch before, but on those that were skipped."""
    monkeypatch.setattr(main, "PREFETCH_STEPS", 4)
    given = {"algorithm": {"type": "reinforce_pp", "reward_scale": "running"}}
    settings = LearnerSettings.model_validate(settings.model_dump(exclude={"algorithm"}) | given)
    calls: list[int] = []

    def verdict(updates: int) -> str:
        calls.append(updates)
        return "not finite" if len(calls) in skipped else ""

    with Player(address, run.id):
        serve(run, settings, pace_s=0.2, verdict=verdict)
    assert_exactly_once(run, extra=4 * len(skipped))
    ahead = [step for thread, step in built if thread == "batch"]
    assert len(ahead) >= 3, "the groups of most steps were there before the last step ended"
    if not skipped:
        assert len(built) == run.steps, "no batch was built twice"
        assert set(ahead) | {step for thread, step in built if thread != "batch"} == set(range(run.steps))
    algorithm = build_algorithm(settings.algorithm)
    order: dict[int, list[Any]] = {}
    for entry in read_journal(run.dir / "journal"):
        order.setdefault(entry.step, []).append(entry.group)
    for step, groups in sorted(order.items()):
        facts = {
            "now_step": step - 1,
            "lineage": (PolicyVersion(1, 0),),
            "max_lag": run.max_lag,
            "settings": settings.batch,
            "temperature": run.temperature,
        }
        assert plain(trained[step]) == plain(build_batch(groups, algorithm, **facts)), step
        algorithm.after_update()


def test_nothing_is_built_ahead_if_groups_are_trained_again(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], built: list[tuple[str, int]]
) -> None:
    settings = LearnerSettings.model_validate(settings.model_dump() | {"replay_mix": {"share": 0.5}})
    with Player(address, run.id):
        serve(run, settings, pace_s=0.05)
    assert [step for _, step in built] == list(range(run.steps))
    assert "batch" not in {thread for thread, _ in built}


@pytest.mark.slow
def test_building_takes_place_while_the_last_batch_trains(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, train = loop.batch_for_step, TinyEngine.train
    training = threading.Event()
    overlaps: list[bool] = []

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.05)
        overlaps.append(training.is_set())
        return build(*args, **more)

    def watched(self: TinyEngine, batch: Batch) -> Any:
        training.set()
        report = train(self, batch)
        training.clear()
        return report

    monkeypatch.setattr(loop, "batch_for_step", slow)
    monkeypatch.setattr(TinyEngine, "train", watched)
    monkeypatch.setattr(main, "PREFETCH_STEPS", 4)
    with Player(address, run.id):
        serve(run, settings, pace_s=0.3)
    assert sum(overlaps) >= 3, "in the background"
