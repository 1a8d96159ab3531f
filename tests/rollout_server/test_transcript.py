"""Ids, mask, log-probs and versions stay aligned for all kinds of turns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode, encode
from protocol.messages import Owner, Question, Status, Trajectory, TrajectoryGroup, VersionSpan
from rollout_server.engine.base import Completion
from rollout_server.rollout.transcript import Transcript

ids_of = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """A turn of up to three version spans."""
    spans, ids, logprobs = [], list[int](), list[float]()
    step = draw(st.integers(0, 5))
    for length in draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
        spans.append(VersionSpan(epoch=1, step=step, start=len(ids), end=len(ids) + length))
        ids += draw(st.lists(st.integers(0, 999), min_size=length, max_size=length))
        logprobs += draw(st.lists(st.floats(-30, 0, width=32), min_size=length, max_size=length))
        step += draw(st.integers(0, 2))
    return Completion(ids, logprobs, tuple(spans), "stop", engine="e")


turns = st.lists(st.tuples(completions(), ids_of), max_size=6)


@given(prompt=ids_of, script=turns)
def test_ids_mask_logprobs_and_versions_stay_aligned_through_any_script(
    prompt: list[int], script: list[tuple[Completion, list[int]]]
) -> None:
    transcript = Transcript(prompt, max_context=10_000)
    ids, mask, logprobs, versions = list(prompt), [False] * len(prompt), [0.0] * len(prompt), [(-1, -1)] * len(prompt)
    for completion, observation in script:
        transcript.write(completion)
        ids += completion.ids
        mask += [True] * len(completion.ids)
        logprobs += completion.logprobs
        versions += [(s.epoch, s.step) for s in completion.spans for _ in range(s.start, s.end)]
        transcript.observe(observation, query="q")
        ids += observation
        mask += [False] * len(observation)
        logprobs += [0.0] * len(observation)
        versions += [(-1, -1)] * len(observation)
        assert transcript.ids == ids
        assert transcript.remaining == 10_000 - len(ids)
    made = Trajectory(status=Status.ANSWERED, segments=transcript.segments)
    group = TrajectoryGroup(run="r", seq=1, question=Question(id="q", text="?"), trajectories=(made,))
    again = decode(encode(group))
    assert isinstance(again, TrajectoryGroup)
    for trajectory in (made, again.trajectories[0]):
        assert trajectory.ids.tolist() == ids
        assert trajectory.mask.tolist() == mask
        np.testing.assert_array_equal(trajectory.logprobs, np.asarray(logprobs, np.float32))
        assert [tuple(v) for v in trajectory.versions.tolist()] == versions
    sampled = [v for v in versions if v != (-1, -1)]
    assert transcript.first_version == (min(sampled) if sampled else None)


def test_an_observation_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    transcript = Transcript([1, 2], max_context=4)
    with pytest.raises(ValueError, match="3 tokens does not fit into the 2 left"):
        transcript.observe([1, 2, 3])
    assert transcript.ids == [1, 2] and len(transcript.segments) == 1


@pytest.mark.parametrize(
    "completion",
    [
        Completion([1, 2], [-1.0], (VersionSpan(epoch=1, step=0, start=0, end=2),), "stop"),
        Completion([1, 2], [-1.0, -1.0], (VersionSpan(epoch=1, step=0, start=0, end=1),), "stop"),
        Completion([1], [float("nan")], (VersionSpan(epoch=1, step=0, start=0, end=1),), "stop"),
        Completion([1], [0.5], (VersionSpan(epoch=1, step=0, start=0, end=1),), "stop"),
    ],
    ids=["lengths", "gap", "nan", "positive"],
)
def test_a_completion_that_contradicts_itself_is_refused_and_changes_nothing(completion: Completion) -> None:
    transcript = Transcript([1], max_context=100)
    with pytest.raises(ValueError):
        transcript.write(completion)
    assert transcript.ids == [1] and len(transcript.segments) == 1


def test_what_a_search_was_about_stays_with_its_observation() -> None:
    transcript = Transcript([1], max_context=100)
    transcript.observe([5], query="q", passage_ids=["p" * 999], latency_s=0.5, error="")
    _, segment = transcript.segments
    assert (segment.owner, segment.query, segment.latency_s) == (Owner.ENVIRONMENT, "q", 0.5)
    assert segment.passage_ids == ("p" * 256,)
