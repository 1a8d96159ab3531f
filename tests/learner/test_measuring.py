"""The numbers of a step's rollouts, against plain loops."""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from learner.interfaces import StepReport
from learner.observability import metrics as module
from learner.observability.metrics import Meter, StepLog, StepTimer
from learner.observability.reporting import (
    THOUGHTS,
    StepReporter,
    group_lags,
    group_metrics,
    thought_metrics,
    token_lags,
)
from learner.observability.trackers.base import RunInfo
from learner.observability.trackers.fanout import Trackers
from protocol.messages import Owner, Segment, Status, Trajectory, TrajectoryGroup, VersionSpan
from tests.support.messages import make_group, make_question, policy_segment, prompt_segment


def a_trajectory(draw: random.Random) -> Trajectory:
    """Segments of any length and version, an observation of each kind."""
    segments, turns, searches = [prompt_segment(range(draw.randint(1, 9)))], 0, 0
    for _ in range(draw.randint(0, 4)):
        length, cut = draw.randint(1, 12), 0
        spans = []
        for end in sorted({draw.randint(1, length), length}):
            spans.append(VersionSpan(epoch=1, step=draw.randint(3, 7), start=cut, end=end))
            cut = end
        ids, logprobs = np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32)
        segments.append(Segment(owner=Owner.POLICY, ids=ids, logprobs=logprobs, spans=tuple(spans)))
        turns += 1
        how = draw.choice(["search", "failed search", "tool", "invalid"])
        searches += "search" in how
        segments.append(
            Segment(
                owner=Owner.ENVIRONMENT,
                ids=np.arange(draw.randint(0, 6), dtype=np.int32),
                query="" if how == "invalid" else "q",
                tool="python" if how == "tool" else "",
                error="timeout" if how == "failed search" else "",
            )
        )
    status = draw.choice(list(Status))
    parts = {"em": float(draw.randint(0, 1)), "format": draw.random()} if status.is_valid else {}
    if draw.random() < 0.3:
        parts.pop("format", None)
    return Trajectory(
        status=status,
        segments=tuple(segments),
        reward=sum(parts.values()),
        rewards=parts,
        turns=turns,
        searches=searches,
    )


def some_groups(seed: int) -> list[TrajectoryGroup]:
    draw = random.Random(seed)
    return [
        TrajectoryGroup(
            run="r",
            seq=seq,
            question=make_question(seq),
            trajectories=tuple(a_trajectory(draw) for _ in range(draw.randint(1, 5))),
        )
        for seq in range(1, 7)
    ]


def slowly(groups: list[TrajectoryGroup], now_step: int) -> dict[str, float]:
    """The definitions of `learner.observability.metric_table`, one trajectory and one token at a time."""
    columns: dict[str, list[float]] = {}
    repeats: list[float] = []
    for group in groups:
        oldest: int | None = None
        for t in group.trajectories:
            sampled = whole = errors = invalid = 0
            for segment in t.segments:
                whole += len(segment.ids)
                if segment.owner is Owner.POLICY:
                    for span in segment.spans:
                        for _ in range(span.start, span.end):
                            sampled += 1
                            oldest = span.step if oldest is None or span.step < oldest else oldest
                if segment.owner is Owner.ENVIRONMENT and segment.query == "" and segment.tool == "":
                    invalid += 1
                if segment.error != "":
                    errors += 1
            for status in Status:
                columns.setdefault(f"status/{status}", []).append(1.0 if t.status == status else 0.0)
            for name, value in {
                "response_length": sampled, "trajectory_length": whole, "turns": t.turns, "searches": t.searches,
                "tool_errors": errors, "invalid_actions": invalid,
            }.items():  # fmt: skip
                columns.setdefault(name, []).append(value)
            written: list[list[int]] = []
            for segment in t.segments:
                if segment.owner is Owner.POLICY:
                    repeats.append(float(segment.ids.tolist() in written))
                    written.append(segment.ids.tolist())
            if t.status not in (Status.STALE, Status.FAILED):
                columns.setdefault("reward", []).append(t.reward)
                for part, value in t.rewards.items():
                    columns.setdefault(f"reward/{part}", []).append(value)
        if oldest is not None:
            columns.setdefault("group_lag", []).append(abs(now_step - oldest))
    found: dict[str, float] = {}
    for name, column in columns.items():
        total = 0.0
        for value in column:
            total += value
        if "/" in name:
            found[name] = total / len(column)
            continue
        found[f"{name}_mean"] = total / len(column)
        if name not in ("tool_errors", "invalid_actions", "reward"):
            found[f"{name}_max"] = max(column)
    if "reward" in columns:
        found["reward_std"] = statistics.pstdev(columns["reward"])
    if repeats:
        found["turns_repeated"] = sum(repeats) / len(repeats)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_number_is_that_of_a_slow_loop(seed: int) -> None:
    groups = some_groups(seed)
    assert group_metrics(groups, 8) == pytest.approx(slowly(groups, 8), abs=1e-12)


def test_what_the_groups_do_not_have_is_left_out() -> None:
    (group,) = (make_group(1, (0.0, 0.0)),)
    failed = [t.model_copy(update={"status": Status.FAILED, "rewards": {}}) for t in group.trajectories]
    values = group_metrics([group.model_copy(update={"trajectories": tuple(failed)})], 1)
    assert values["status/failed"] == 1.0 and values["status/answered"] == 0.0
    assert not [name for name in values if name.startswith("reward")], "no em of 0.000 that was never measured"
    plain = [t.model_copy(update={"rewards": {"f1": t.reward}}) for t in group.trajectories]
    assert {n for n in group_metrics([group.model_copy(update={"trajectories": tuple(plain)})], 1) if "/" in n} == {
        "reward/f1",
        *(f"status/{s}" for s in Status),
    }


def test_without_a_trajectory_there_is_nothing() -> None:
    empty = make_group(1, (0.0,)).model_copy(update={"trajectories": ()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert group_metrics([], 1) == group_metrics([empty], 1) == {}


def test_a_step_replaces_the_numbers_of_the_one_before(tmp_path: Path) -> None:
    def report_step(step: int, rewards: dict[str, float], metrics: dict[str, float]) -> None:
        group = make_group(step, (0.0, 1.0))
        trajectories = tuple(t.model_copy(update={"rewards": rewards}) for t in group.trajectories)
        report = StepReport(0.5, 1.0, False, "", metrics, tokens_trained=2, seconds=1.0)
        groups = [group.model_copy(update={"trajectories": trajectories})]
        reporter.step(step, groups, report, (1.0, {}), now_step=step - 1, epoch=1, more={})

    meter, run = Meter(), RunInfo("r", tmp_path, 1, {})
    reporter = StepReporter(meter, StepLog(tmp_path / "metrics.jsonl"), Trackers([], run), steps=2, model=tmp_path)
    meter.set(checkpoint_step=0)
    report_step(1, {"em": 1.0}, {"loss_lag_3": 0.25})
    assert {"reward/em", "loss_lag_3"} <= meter.snapshot("0").values.keys()
    report_step(2, {"f1": 1.0}, {"loss_lag_0": 0.75})
    values = meter.snapshot("0", issued=4).values
    reporter.close()
    assert (values["step"], values["reward/f1"], values["loss_lag_0"]) == (2.0, 1.0, 0.75)
    assert not {"reward/em", "loss_lag_3"} & values.keys(), "measured in step 1 only"
    assert (values["checkpoint_step"], values["issued"]) == (0.0, 4.0), "what is of no step stays"


def test_a_lap_has_the_seconds_since_the_last_one_in_total_and_by_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    meter = Meter()
    timer = StepTimer(meter)
    for waited, computed in ((2.0, 3.0), (0.5, 4.0)):
        for cause, seconds in (("data", waited), ("compute", computed)):
            with meter.blocked_on(cause):
                clock[0] += seconds
        clock[0] += 1.0
        others = dict.fromkeys(("publish", "checkpoint", "redis", "validation"), 0.0)
        assert timer.lap() == (waited + computed + 1.0, {"data": waited, "compute": computed, **others})


def test_lags_are_counted_by_token_and_by_group() -> None:
    groups = some_groups(3)
    slow: dict[int, int] = {}
    for span in (s for g in groups for t in g.trajectories for x in t.segments for s in x.spans):
        for _ in range(span.start, span.end):
            slow[8 - span.step] = slow.get(8 - span.step, 0) + 1
    assert token_lags(groups, 8) == slow and len(slow) > 3
    oldest = [min(v.step for t in g.trajectories if (v := t.first_version())) for g in groups]
    assert group_lags(groups, 8) == [8 - step for step in oldest]


def test_thoughts_that_are_empty_or_repeat_earlier_ones_are_counted() -> None:
    words = {1: "<think>a</think><search>", 2: "<think> </think><search>", 3: " a\n</think>", 4: "<answer>b</answer>"}

    def thinking(*turns: int) -> Trajectory:
        return Trajectory(status=Status.ANSWERED, segments=tuple(policy_segment([n]) for n in turns), reward=0.0)

    def groups(*each: Trajectory) -> list[TrajectoryGroup]:
        return [
            TrajectoryGroup(run="r", seq=n, question=make_question(n), trajectories=(t,)) for n, t in enumerate(each)
        ]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[n] for n in ids)

    # thoughts: a, none, a again (of a template that opens the tag itself); the last turn has none
    given = groups(thinking(1, 2, 3, 4), thinking(1, 4))
    assert thought_metrics(given, decode) == pytest.approx({"thoughts_empty": 1 / 4, "thoughts_repeated": 1 / 4})
    assert thought_metrics(groups(thinking(4, 4)), decode) == thought_metrics([], decode) == {}
    assert thought_metrics(groups(*[thinking(1)] * THOUGHTS, thinking(2)), decode)["thoughts_empty"] == 0, "a sample"
    assert group_metrics(groups(thinking(1, 1, 4)), 1)["turns_repeated"] == pytest.approx(1 / 3)


def test_rewards_are_reported_for_each_data_set() -> None:
    groups = []
    for seq, source, rewards in ((1, "nq", (1.0, 0.0)), (2, "hotpotqa", (0.5, 0.5)), (3, "nq", (1.0, 1.0))):
        group = make_group(seq, rewards)
        question = group.question.model_copy(update={"meta": {"source": source}})
        groups.append(group.model_copy(update={"question": question}))
    values = group_metrics(groups, 1)
    found = {name: value for name, value in values.items() if name.startswith("source")}
    assert found == {
        "source_groups/nq": 2.0,
        "source_groups/hotpotqa": 1.0,
        "source_reward/nq": 0.75,
        "source_reward/hotpotqa": 0.5,
        "source_reward_part/nq/em": 0.75,
        "source_reward_part/hotpotqa/em": 0.5,
    }
    assert not [name for name in group_metrics([make_group(1, (1.0,))], 1) if name.startswith("source")]
