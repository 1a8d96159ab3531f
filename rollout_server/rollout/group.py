"""Run all trajectories of one question as a `TrajectoryGroup`, or a single episode for evaluation."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from protocol.messages import Question, Sampling, Status, Task, Trajectory, TrajectoryGroup
from protocol.runtime.tracing import span
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Generate
from rollout_server.environment.actions import ESCAPE_VERSION
from rollout_server.environment.environment import Environment, render_trajectory
from rollout_server.rollout.live import LiveGroup, LiveTrajectory
from rollout_server.rollout.trajectory import OnProgress, ShouldStop, ignore_progress, never_stop, run_trajectory
from rollout_server.search.base import Search

PlayOne = Callable[..., Awaitable[Trajectory]]
"""Runs one trajectory, with the parameters of `run_trajectory`."""


@dataclass(frozen=True)
class GroupRejected:
    """A group that must not be trained on; its task is retried.

    reason            the most frequent cause among the failed trajectories, e.g. no_engine, max_lag, search_timeout
    detail            every cause with its count
    generated_tokens  number of sampled tokens that are discarded, for the token accounting
    """

    reason: str
    detail: str
    generated_tokens: int


@dataclass(frozen=True)
class EpisodeResult:
    """One evaluation episode: the trajectory, and its full text."""

    trajectory: Trajectory
    text: str


async def run_group(
    environment: Environment,
    task: Task,
    generate: Generate,
    search: Search,
    *,
    run: str,
    producer: str,
    should_stop: ShouldStop = never_stop,
    on_progress: OnProgress | None = None,
    live: LiveGroup | None = None,
    play_one: PlayOne = run_trajectory,
    oversample: int = 0,
) -> TrajectoryGroup | GroupRejected:
    """Run `task.group_size` trajectories concurrently until all have ended. A failure does not cancel the others.

    oversample: trajectories in addition to `task.group_size`. Once `task.group_size` valid trajectories have ended, the
    remaining ones are cancelled.
    `play_one` runs one trajectory: `run_trajectory`, or an agent with the same parameters.
    `should_stop` gets the oldest version in the group, so the whole group ends when its oldest trajectory is too old.
    Returns GroupRejected if fewer than `min_valid` trajectories are valid, or if a search or tool failed and the
    setting is `drop`.
    """
    started = time.monotonic()
    oldest: PolicyVersion | None = None

    def group_should_stop(first: PolicyVersion) -> bool:
        nonlocal oldest
        oldest = first if oldest is None else min(oldest, first)
        return should_stop(oldest)

    group_id = uuid.uuid4().hex

    async def play(number: int, one: LiveTrajectory) -> Trajectory:
        playing = play_one(
            *(environment, task.question, generate, search, task.sampling),
            session=one.session,
            group=group_id,
            should_stop=group_should_stop,
            on_progress=on_progress or ignore_progress,
            live=one,
        )
        return await _traced(number, playing)

    shown = live or LiveGroup.of(task, oversample)
    trajectories = await _first([play(number, one) for number, one in enumerate(shown.trajectories)], task.group_size)
    if (rejected := _reject_reason(environment, trajectories)) is not None:
        return rejected
    return TrajectoryGroup(
        run=run,
        seq=task.seq,
        attempt=task.attempt,
        question=task.question,
        trajectories=trajectories,
        sampling=task.sampling,
        template=environment.template.name,
        escape_version=ESCAPE_VERSION,
        producer=producer,
        seconds=time.monotonic() - started,
    )


async def _first(plays: Sequence[Coroutine[Any, Any, Trajectory]], wanted: int) -> tuple[Trajectory, ...]:
    """Run all until `wanted` valid trajectories have ended, and cancel the others. Return `wanted` in the order of
    `plays`: those that ended first, invalid ones only if there are too few valid ones."""
    ended: list[tuple[bool, int, Trajectory]] = []

    def end(number: int, one: asyncio.Task[Trajectory]) -> None:
        if one.cancelled() or one.exception() is not None:
            return
        ended.append((not one.result().status.is_valid, number, one.result()))
        if sum(not invalid for invalid, _, _ in ended) == wanted:
            for other in running:
                other.cancel()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(play) for play in plays]
        for number, one in enumerate(running):
            one.add_done_callback(partial(end, number))
    chosen = sorted(ended, key=itemgetter(0))[:wanted]
    return tuple(trajectory for _, _, trajectory in sorted(chosen, key=itemgetter(1)))


async def _traced(number: int, playing: Awaitable[Trajectory]) -> Trajectory:
    with span("trajectory", number=number) as traced:
        trajectory = await playing
        traced.set(status=str(trajectory.status), reward=trajectory.reward)
        if not trajectory.status.is_valid:
            traced.fail(trajectory.cause)
        return trajectory


def _reject_reason(environment: Environment, trajectories: tuple[Trajectory, ...]) -> GroupRejected | None:
    lost = Counter(t.cause for t in trajectories if not t.status.is_valid)
    if not lost:
        return None
    outside = ("search_", "tool_")
    searches = [t.cause for t in trajectories if t.status is Status.FAILED and t.cause.startswith(outside)]
    valid = sum(t.status.is_valid for t in trajectories)
    if environment.settings.on_search_error == "drop" and searches:
        reason = searches[0]
    elif valid < min(environment.settings.min_valid, len(trajectories)):
        reason = lost.most_common(1)[0][0]
    else:
        return None
    return GroupRejected(
        reason=reason,
        detail=f"{valid} of {len(trajectories)} valid; " + ", ".join(f"{n} {cause}" for cause, n in lost.most_common()),
        generated_tokens=sum(t.num_sampled for t in trajectories),
    )


async def run_episode(
    environment: Environment,
    question: Question,
    generate: Generate,
    search: Search,
    sampling: Sampling,
    *,
    group: str = "",
    pinned: bool = False,
    on_progress: OnProgress = ignore_progress,
    play_one: PlayOne = run_trajectory,
) -> EpisodeResult:
    """Run one trajectory for evaluation, chat or demo: not part of a group or the ledger, never stale.

    group  episodes with the same non-empty id share an engine's prefix cache: the n attempts at one question
    """
    session = uuid.uuid4().hex
    trajectory = await play_one(
        environment,
        question,
        generate,
        search,
        sampling,
        session=session,
        group=group or session,
        pinned=pinned,
        on_progress=on_progress,
    )
    return EpisodeResult(trajectory, render_trajectory(environment, trajectory))
