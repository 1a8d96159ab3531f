"""The number of engines that a run wants: votes on two snapshots, and votes in a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from learner.delivery.autoscale import CALM_STEPS, VOTES_DOWN, VOTES_UP, WINDOW_S, Autoscaler, frozen, vote
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState

PLACES, MANY = 4, 1000


@dataclass(frozen=True)
class Seen:
    now: float
    processes: tuple[MetricsSnapshot, ...]
    engines: tuple[EngineInfo, ...]


def engines(count: int, state: NodeState = NodeState.READY, **more: Any) -> tuple[EngineInfo, ...]:
    return tuple(
        EngineInfo(id=f"{state}{n}", url="http://e", state=state, max_running=PLACES, **more) for n in range(count)
    )


def seen(
    at: float,
    count: int,
    *,
    data: float = 0.0,
    window: float = 0.0,
    busy: float = 0.0,
    retriever: float = 0.0,
    step_s=10.0,
) -> Seen:
    """A run that has gone on like this from second 0. busy: engines' worth of requests in flight."""
    learner = MetricsSnapshot(
        process="learner",
        id="0",
        uptime_s=at,
        values={"step": at // step_s},
        waits={"data": data * at},
        text={"state": "training", "validating": ""},
    )
    rollout = MetricsSnapshot(
        process="rollout",
        id="r",
        uptime_s=at,
        values={"engine_ms": 1000 * busy * PLACES * at},
        waits={"window": window * at, "retriever": retriever * at, "credit": at},
    )
    return Seen(at, (learner, rollout), engines(count))


@pytest.mark.parametrize(
    ("count", "load", "wanted"),
    [
        (2, {"data": 0.5, "window": 0.5}, 1),
        (1, {"data": 0.8, "window": 0.8}, 1),  # at most twice as many
        (4, {"data": 0.5, "window": 0.4}, 2),
        (4, {"data": 0.5, "window": 0.05}, 0),  # no turn waits for an engine: it is something else
        (4, {"data": 0.5, "window": 0.4, "retriever": 0.3}, 0),  # more engines would wait for the retriever too
        (4, {"data": 0.08, "window": 0.4}, 0),  # nobody waits for the groups
        (4, {"data": 0.0, "busy": 2.6}, -1),
        (4, {"data": 0.0, "busy": 2.8}, 0),
        (4, {"data": 0.06, "busy": 1.0}, 0),
        (1, {"data": 0.0, "busy": 0.0}, 0),
    ],
)
def test_a_vote(count: int, load: dict[str, float], wanted: int) -> None:
    assert vote(seen(100, count, **load), seen(200, count, **load), MANY) == wanted


def test_engines_without_work_for_them_are_not_wanted() -> None:
    load = {"data": 0.6, "window": 0.6}
    before, now = seen(100, 4, **load), seen(200, 4, **load)
    assert vote(before, now, 18) == 1, "five engines have places for all 18 trajectories"
    assert vote(before, now, 16) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"text": {"state": "starting"}},
        {"text": {"state": "training", "validating": "step 4"}},
        {"process": "nobody"},
    ],
)
def test_what_says_nothing_is_not_voted_on(change: dict[str, Any]) -> None:
    now = seen(100, 2)
    assert not frozen(now) and not frozen(replace(now, engines=now.engines + engines(1, NodeState.QUARANTINED)))
    assert frozen(replace(now, processes=(now.processes[0].model_copy(update=change), now.processes[1])))
    for state in (NodeState.JOINING, NodeState.SYNCING, NodeState.DRAINING):
        assert frozen(replace(now, engines=now.engines + engines(1, state)))
        assert not frozen(replace(now, engines=now.engines + engines(1, state, role="eval")))
    pinned = now.processes[1].model_copy(update={"values": {"pinned_evaluations": 1.0}})
    assert frozen(replace(now, processes=(now.processes[0], pinned)))


def looks(scaler: Autoscaler, begin: float, count: int, number: int, **load: float) -> list[int]:
    return [scaler.look(seen(begin + 10 * n, count, **load)) for n in range(number)]


HUNGRY, IDLE = {"data": 0.5, "window": 0.5}, {"busy": 0.5}
FIRST = int(WINDOW_S // 10)
"""Looks before the first vote."""


def test_equal_votes_in_a_row_become_a_number_and_anything_else_begins_anew() -> None:
    scaler = Autoscaler(MANY)
    assert looks(scaler, 0, 2, FIRST + VOTES_UP, **HUNGRY) == [2] * (FIRST + VOTES_UP - 1) + [3]
    assert looks(scaler, 200, 3, FIRST + VOTES_UP - 1, **HUNGRY) == [3] * (FIRST + VOTES_UP - 1)
    calm = scaler.look(seen(2000, 3))
    assert calm == 3 and looks(scaler, 2010, 3, VOTES_UP - 1, **HUNGRY)[-1] == 3


def test_a_wanted_number_stays_while_engines_join_and_until_it_is_voted_down() -> None:
    scaler = Autoscaler(MANY)
    assert looks(scaler, 0, 2, FIRST + VOTES_UP, **HUNGRY)[-1] == 3
    joining = seen(300, 2, **HUNGRY)
    assert scaler.look(replace(joining, engines=joining.engines + engines(1, NodeState.JOINING))) == 3
    assert looks(scaler, 310, 2, FIRST + 2, busy=1.0)[-1] == 3, "nobody has followed yet"
    assert looks(scaler, 1000, 2, FIRST + VOTES_DOWN, busy=1.0)[-1] == 2, "it is fed without a third one"


def test_a_removal_that_was_wrong_is_not_repeated_for_long() -> None:
    scaler = Autoscaler(MANY)
    assert looks(scaler, 0, 3, FIRST + VOTES_DOWN, **IDLE)[-1] == 2
    assert looks(scaler, 300, 2, FIRST + VOTES_UP, **HUNGRY)[-1] == 3
    begin, end = 500, 500 + 10 * CALM_STEPS
    assert set(looks(scaler, begin, 3, (end - begin) // 10 - 30, **IDLE)) == {3}
    assert 2 in looks(scaler, end, 3, 2 * (FIRST + VOTES_DOWN), **IDLE)


def test_an_engine_that_starts_slowly_or_is_added_is_not_drained_again() -> None:
    scaler = Autoscaler(MANY)
    assert scaler.look(seen(0.0, 1)) == 1
    assert scaler.look(seen(10.0, 3)) == 3
    assert scaler.look(seen(20.0, 2)) == 3, "one that is lost comes back"
    assert scaler.look(seen(30.0, 3)) == 3
