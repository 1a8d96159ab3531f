"""Groups of trajectories as searches make them: some short, few long, most tokens read and not written. Deterministic.

Lengths are lognormal, which is what a policy that stops when it pleases and passages of a corpus give: a few
trajectories are several times as long as most, and most tokens of a trajectory are observations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from pydantic import Field

from deploy.bench.base import BenchSettings
from protocol.messages import Segment, Status, Trajectory, TrajectoryGroup
from protocol.testing import make_question, observation_segment, policy_segment, prompt_segment

FIRST_ID = 16
"""Ids below are often control tokens."""


class SkewedBatch(BenchSettings):
    """Which trajectories. Base of the benchmarks of packing and of the learner."""

    groups: int = Field(default=64, ge=1)
    """Questions in the batch."""
    group_size: int = Field(default=8, ge=2)
    """Trajectories of each."""
    turns: int = Field(default=4, ge=1)
    """Most turns of a trajectory; how many it takes is drawn from 1 to this."""
    prompt_tokens: int = Field(default=128, ge=1)
    """Tokens of each prompt."""
    turn_tokens: int = Field(default=96, ge=1)
    """Median tokens that the policy writes a turn."""
    observation_tokens: int = Field(default=256, ge=0)
    """Median tokens of what one search found."""
    sigma: float = Field(default=0.8, ge=0)
    """Standard deviation of the logarithm of both."""
    longest: int = Field(default=4096, ge=2)
    """Trajectories are cut at so many tokens."""
    vocabulary: int = Field(default=16384, ge=32)
    """Ids are drawn from so many."""
    seed: int = 0
    """Of all that is drawn."""


def skewed_groups(settings: SkewedBatch, number: int = 0) -> list[TrajectoryGroup]:
    """The groups of batch `number`: rewards 0 and 1, behaviour log-probs like those of an untrained policy."""
    return [
        TrajectoryGroup(
            run="bench",
            seq=seq,
            question=make_question(seq),
            trajectories=tuple(_trajectory(settings, number, seq, i) for i in range(settings.group_size)),
            producer="bench",
            template="search_r1",
        )
        for seq in range(1, settings.groups + 1)
    ]


def _trajectory(settings: SkewedBatch, number: int, seq: int, index: int) -> Trajectory:
    rng = np.random.default_rng([settings.seed, number, seq, index])
    segments = tuple(_segments(settings, rng, seq))
    return Trajectory(status=Status.ANSWERED, segments=segments, reward=float(rng.random() < 0.4), turns=1, searches=0)


def _segments(settings: SkewedBatch, rng: np.random.Generator, seq: int) -> Iterator[Segment]:
    room = settings.longest - settings.prompt_tokens

    def draw(median: int) -> int:
        return max(1, round(median * math.exp(settings.sigma * rng.standard_normal())))

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.integers(FIRST_ID, settings.vocabulary, count)]

    # siblings share their prompt
    prompt = np.random.default_rng([settings.seed, seq]).integers(FIRST_ID, settings.vocabulary, settings.prompt_tokens)
    yield prompt_segment(prompt.tolist())
    turns = int(rng.integers(1, settings.turns + 1))
    for turn in range(turns):
        written = min(draw(settings.turn_tokens), max(room, 1))
        # near those of a policy that knows nothing, and off by as much as a few updates would make them
        logprobs = -math.log(settings.vocabulary) + 0.1 * rng.standard_normal(written)
        yield policy_segment(ids(written), np.minimum(logprobs, 0.0).tolist())
        room -= written
        if turn == turns - 1 or room <= 1:
            return
        found = min(draw(settings.observation_tokens), room - 1) if settings.observation_tokens else 0
        if found:
            yield observation_segment(ids(found))
        room -= found
