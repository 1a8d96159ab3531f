"""Rewards before they become advantages, and moments that a checkpoint keeps."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantages.outcomes import overlong
from learner.algorithms.advantages.whitening import RunningMoments

VALUES = st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 6)), max_size=20)  # no squares that underflow


def test_overlong_by_hand_at_every_corner():
    lengths = np.array([0, 80, 81, 90, 100, 101, 150])
    found = overlong(np.ones(7), lengths, max_length=100, buffer=20)
    np.testing.assert_allclose(found, [1, 1, 0.95, 0.5, 0, 0, 0], atol=1e-12)
    assert found[-1] == 0, "AReaL's would be 1 - 3.5"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.data())
def test_overlong_is_the_papers_three_cases(longest, data):
    buffer = data.draw(st.integers(1, longest))
    length = data.draw(st.integers(0, 400))
    if length <= longest - buffer:
        punishment = 0.0
    elif length <= longest:
        punishment = ((longest - buffer) - length) / buffer
    else:
        punishment = -1.0
    found = overlong(np.array([0.7]), np.array([length]), max_length=longest, buffer=buffer, penalty=0.3)
    np.testing.assert_allclose(found, [0.7 + 0.3 * punishment], rtol=1e-12)


def test_without_a_buffer_overlong_is_a_step():
    assert overlong(np.zeros(3), np.array([99, 100, 101]), max_length=100, buffer=0).tolist() == [0, 0, -1]


@pytest.mark.parametrize("wrong", [{"max_length": 10, "buffer": 11}, {"max_length": 10, "buffer": -1}])
def test_a_buffer_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ValueError, match="does not fit"):
        overlong(np.zeros(1), np.zeros(1, np.int64), **wrong)


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES, VALUES)
def test_moments_of_parts_are_those_of_the_whole(first, second, third):
    whole = first + second + third
    running, other = RunningMoments(), RunningMoments()
    running.update(np.array(first))
    for value in second:
        other.update(np.array([value]))
    running.merge(other)
    running.update(np.array(third))
    assert running.count == len(whole)
    if whole:
        mean = math.fsum(whole) / len(whole)
        squares = math.fsum((v - mean) ** 2 for v in whole)
        size = max(map(abs, whole))
        assert running.mean == pytest.approx(mean, rel=1e-9, abs=1e-12 * size)
        assert running.std() == pytest.approx(math.sqrt(squares / len(whole)), rel=1e-7, abs=1e-9 * size)
    if len(whole) > 1:
        assert running.std(1) == pytest.approx(math.sqrt(squares / (len(whole) - 1)), rel=1e-7, abs=1e-9 * size)


def test_moments_keep_their_digits_far_from_zero():
    running = RunningMoments()
    for value in (1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16):
        running.update(np.array([value]))
    assert running.std(1) == pytest.approx(math.sqrt(30), rel=1e-9)


def test_moments_resume_bit_for_bit_through_json():
    values = np.random.default_rng(0).normal(size=50)
    whole, half = RunningMoments(), RunningMoments()
    whole.update(values[:20])
    half.update(values[:20])
    resumed = RunningMoments()
    resumed.load(json.loads(json.dumps(half.state())))
    for running in (whole, resumed):
        running.update(values[20:])
    assert resumed.state() == whole.state()
    assert isinstance(resumed.count, int)


def test_running_normalisation_by_hand():
    running = RunningMoments()
    assert running.normalize(np.array([3.0])).tolist() == [3.0], "nothing was seen"
    running.update(np.array([1.0, 1.0]))
    assert running.normalize(np.array([3.0])).tolist() == [2.0], "no spread yet"
    running.update(np.array([3.0, 3.0]))
    np.testing.assert_allclose(running.normalize(np.array([[3.0, 2.0]]), epsilon=0.0), [[1.0, 0.0]])
    np.testing.assert_allclose(running.normalize(np.array([3.0]), centre=False, epsilon=0.5), [2.0])
    np.testing.assert_allclose(running.normalize(np.array([3.0]), ddof=1, epsilon=0.0), [math.sqrt(3) / 2])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_moments_refuse_what_is_not_finite_and_stay_as_they_were(value):
    running = RunningMoments()
    running.update(np.array([1.0, 2.0]))
    before = running.state()
    with pytest.raises(ValueError, match="not finite"):
        running.update(np.array([0.0, value]))
    running.update(np.zeros(0))
    running.merge(RunningMoments())
    assert running.state() == before
