"""Builders of plausible messages, for tests and benchmarks of every package. They are deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.messages import Owner, Question, Segment, Status, Task, Trajectory, TrajectoryGroup, VersionSpan
from protocol.versions import PolicyVersion

V1 = PolicyVersion(1, 0)


def make_question(seq: int = 1) -> Question:
    return Question(id=f"q{seq}", text=f"what is fact {seq} ?", answers=(f"answer {seq}",), meta={"hops": 1})


def make_task(seq: int = 1, *, group_size: int = 4, attempt: int = 1) -> Task:
    return Task(seq=seq, attempt=attempt, question=make_question(seq), group_size=group_size)


def prompt_segment(ids: Sequence[int]) -> Segment:
    return Segment(owner=Owner.PROMPT, ids=np.asarray(ids, np.int32))


def policy_segment(ids: Sequence[int], logprobs: Sequence[float] | None = None, version: PolicyVersion = V1) -> Segment:
    given = [-0.5] * len(ids) if logprobs is None else list(logprobs)
    spans = (VersionSpan(epoch=version.epoch, step=version.step, start=0, end=len(ids)),) if len(ids) else ()
    return Segment(
        owner=Owner.POLICY, ids=np.asarray(ids, np.int32), logprobs=np.asarray(given, np.float32), spans=spans
    )


def observation_segment(ids: Sequence[int], *, query: str = "fact") -> Segment:
    return Segment(owner=Owner.ENVIRONMENT, ids=np.asarray(ids, np.int32), query=query, passage_ids=("p1",))


def make_trajectory(
    reward: float = 0.0,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    first: Sequence[int] = (4, 5),
    observation: Sequence[int] = (6, 7, 8),
    last: Sequence[int] = (9, 10),
    version: PolicyVersion = V1,
    status: Status = Status.ANSWERED,
) -> Trajectory:
    """prompt, a turn that searches, an observation, a turn that answers."""
    segments = (
        prompt_segment(prompt),
        policy_segment(first, version=version),
        observation_segment(observation),
        policy_segment(last, version=version),
    )
    return Trajectory(status=status, segments=segments, reward=reward, rewards={"em": reward}, turns=2, searches=1)


def make_group(
    seq: int = 1,
    rewards: Sequence[float] = (1.0, 0.0, 0.0, 1.0),
    *,
    run: str = "test",
    version: PolicyVersion = V1,
    length: int = 0,
) -> TrajectoryGroup:
    """A group with one trajectory a reward; `length` > 0 makes the last turn that many tokens long."""
    last = tuple(range(9, 9 + length)) if length else (9, 10)
    return TrajectoryGroup(
        run=run,
        seq=seq,
        question=make_question(seq),
        trajectories=tuple(make_trajectory(r, last=last, version=version) for r in rewards),
        producer="test",
        template="search_r1",
    )
