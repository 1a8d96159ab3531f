"""Groups: trajectories fail independently, and a group with too few valid ones is not trained on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import decode, encode
from protocol.messages import Question, Sampling, Segment, Status, Task, Trajectory, TrajectoryGroup
from protocol.search import Passage
from protocol.versions import PolicyVersion
from rollout_server.engine.base import GenerateRequest
from rollout_server.environment.environment import Environment
from rollout_server.rollout.group import GroupRejected, run_episode, run_group
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play
from tests.support.fake_search import FakeSearch

QUESTION = Question(id="q", text="a b ?", answers=("c",))


def task(size: int = 4) -> Task:
    return Task(seq=9, attempt=2, question=QUESTION, group_size=size, sampling=Sampling(temperature=0.7))


def by_member(*scripts: Callable[[int], Play]) -> FakeEngine:
    """The n-th session to arrive follows the n-th script."""
    members: dict[str, Callable[[int], Play]] = {}

    def script(request: GenerateRequest, turn: int) -> Play:
        if request.session not in members:
            members[request.session] = scripts[len(members)]
        return members[request.session](turn)

    return FakeEngine(script)


def answers(environment: Environment, word: str, **facts: Any) -> Callable[[int], Play]:
    return lambda turn: Play(environment.tokenizer.encode_trusted(f"<answer> {word} </answer>"), **facts)


def searches_then_answers(environment: Environment, word: str, **facts: Any) -> Callable[[int], Play]:
    def play(turn: int) -> Play:
        return Play(
            environment.tokenizer.encode_trusted("<search> a </search>" if turn == 0 else f"<answer> {word} </answer>"),
            **facts,
        )

    return play


async def run(
    environment: Environment, engine: FakeEngine, search: FakeSearch | None = None, size: int = 4, **options: Any
) -> TrajectoryGroup | GroupRejected:
    where = FakeSearch(otherwise=[Passage(id="p", contents="a\nc")]) if search is None else search
    return await run_group(environment, task(size), engine, where, run="r", producer="me", **options)


async def test_a_group_holds_every_attempt_with_its_reward_and_where_it_came_from(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    engine = by_member(*(answers(environment, w) for w in "cd"), *(searches_then_answers(environment, w) for w in "cd"))
    told: list[Segment | Trajectory] = []
    group = await run(environment, engine, on_progress=told.append)
    assert isinstance(group, TrajectoryGroup)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0, 0.0]
    assert [t.searches for t in group.trajectories] == [0, 0, 1, 1]
    assert (group.run, group.seq, group.attempt, group.question) == ("r", 9, 2, QUESTION)
    assert (group.template, group.escape_version, group.producer) == ("demo", 2, "me")
    assert group.sampling.temperature == 0.7 and all(r.sampling == group.sampling for r in engine.requests)
    assert len({r.session for r in engine.requests}) == 4 and len({r.group for r in engine.requests}) == 1
    assert sum(isinstance(event, Trajectory) for event in told) == 4
    again = decode(encode(group))
    assert (
        isinstance(again, TrajectoryGroup) and again.trajectories[2].ids.tolist() == group.trajectories[2].ids.tolist()
    )


async def test_trajectories_of_a_group_run_at_the_same_time(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    engine = by_member(*[searches_then_answers(environment, "c", latency_s=0.2)] * 8)
    started = time.monotonic()
    group = await run(environment, engine, FakeSearch(latency_s=0.2), size=8)
    assert isinstance(group, TrajectoryGroup)
    assert 0.6 <= time.monotonic() - started < 3  # one after the other would take 4.8 s


async def test_one_failure_neither_cancels_its_siblings_nor_loses_the_group(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    slow = answers(environment, "c", latency_s=0.05)
    group = await run(environment, by_member(lambda turn: Play(error="timeout"), slow, slow, slow))
    assert isinstance(group, TrajectoryGroup)
    assert [(t.status, t.cause) for t in group.trajectories] == [
        (Status.FAILED, "timeout"),
        *[(Status.ANSWERED, "")] * 3,
    ]


async def test_too_few_valid_trajectories_reject_the_group_with_its_commonest_cause(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)

    def searches_then_fails(turn: int) -> Play:
        return Play(error="no_engine") if turn else Play(environment.tokenizer.encode_trusted("<search> a </search>"))

    engine = by_member(
        answers(environment, "c"), searches_then_fails, searches_then_fails, lambda turn: Play(error="timeout")
    )
    rejected = await run(environment, engine)
    assert rejected == GroupRejected("no_engine", "1 of 4 valid; 2 no_engine, 1 timeout", generated_tokens=9)


@pytest.mark.parametrize("failing", [0, 2, 3])
async def test_the_slowest_beyond_the_groups_size_are_cancelled(tmp_path: Path, failing: int) -> None:
    """A group of 3 with two more: what fails counts only if there are too few others."""
    environment = make_environment(tmp_path)
    never = answers(environment, "d", latency_s=600.0)
    quick = answers(environment, "c")

    def fails(turn: int) -> Play:
        return Play(error="timeout")

    scripts = [fails] * failing + [quick] * (5 - failing) if failing else [never, quick, never, quick, quick]
    told: list[Segment | Trajectory] = []
    started = time.monotonic()
    group = await run(environment, by_member(*scripts), size=3, oversample=2, on_progress=told.append)
    assert time.monotonic() - started < 60
    assert isinstance(group, TrajectoryGroup)
    assert [t.status.is_valid for t in group.trajectories] == ([False, True, True] if failing == 3 else [True] * 3)
    assert sum(isinstance(event, Trajectory) for event in told) == (5 if failing else 3)


async def test_those_that_end_first_make_the_group_in_the_order_of_their_start(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    late = (0.3, 0.0, 600.0, 0.1)
    engine = by_member(*(answers(environment, word, latency_s=s) for word, s in zip("cdcd", late, strict=True)))
    group = await run(environment, engine, size=3, oversample=1)
    assert isinstance(group, TrajectoryGroup)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 0.0], "numbers 0, 1 and 3"


async def test_a_group_of_one_needs_one(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    assert isinstance(await run(environment, by_member(answers(environment, "c")), size=1), TrajectoryGroup)
    failed = await run(environment, by_member(lambda turn: Play(error="timeout")), size=1)
    assert isinstance(failed, GroupRejected) and failed.generated_tokens == 0


@pytest.mark.parametrize(("policy", "whole"), [("observe", True), ("mask", True), ("drop", False)])
@pytest.mark.fault(36)
async def test_a_failed_search_costs_what_the_setting_says(tmp_path: Path, policy: str, whole: bool) -> None:
    environment = make_environment(tmp_path, on_search_error=policy)
    engine = by_member(searches_then_answers(environment, "c"), *[answers(environment, "c")] * 3)
    group = await run(environment, engine, FakeSearch(failures=["garbage"]))
    assert isinstance(group, TrajectoryGroup) is whole
    if isinstance(group, TrajectoryGroup):
        assert group.trajectories[0].status.is_valid is (policy == "observe")
    else:
        assert group.reason == "search_garbage"


async def test_a_group_is_as_old_as_its_oldest_member(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    asked: list[PolicyVersion] = []

    def stop(first: PolicyVersion) -> bool:
        asked.append(first)
        return first.step < 5

    old = searches_then_answers(environment, "c", version=PolicyVersion(1, 4))
    new = searches_then_answers(environment, "c", version=PolicyVersion(1, 9), latency_s=0.02)
    group = await run(
        environment, by_member(answers(environment, "c"), answers(environment, "d"), old, new), should_stop=stop
    )
    assert isinstance(group, TrajectoryGroup)
    assert [t.status for t in group.trajectories] == [Status.ANSWERED, Status.ANSWERED, Status.STALE, Status.STALE]
    assert asked == [(1, 4), (1, 4)]


async def test_a_group_too_old_as_a_whole_is_rejected_as_such(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    engine = by_member(*[searches_then_answers(environment, "c")] * 4)
    rejected = await run(environment, engine, should_stop=lambda first: True)
    assert isinstance(rejected, GroupRejected)
    assert (rejected.reason, rejected.generated_tokens) == ("max_lag", 12)


async def test_cancelling_a_group_cancels_all_of_it(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    running = asyncio.create_task(run(environment, by_member(*[answers(environment, "c", latency_s=60)] * 4)))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_evaluation_episode_comes_with_its_text(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    engine = by_member(searches_then_answers(environment, "c"))
    search = FakeSearch()
    result = await run_episode(environment, QUESTION, engine, search, Sampling(temperature=0), group="g", pinned=True)
    assert result.trajectory.rewards == {"em": 1.0}
    nothing = "<information> nothing was found . </information>"
    assert result.text == f"question : a b ? <search> a </search> {nothing} <answer> c </answer>"
    assert all((r.pinned, r.group, r.sampling.temperature) == (True, "g", 0) for r in engine.requests)
