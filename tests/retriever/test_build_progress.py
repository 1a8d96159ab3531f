"""Share, rate and time left, in lines and as a bar."""

from __future__ import annotations

import logging

import pytest

from retriever.indexing import progress as indexing_progress
from retriever.indexing.progress import BuildProgress, amount, duration, showing_index_log


class Clock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(indexing_progress, "time", made)
    return made


def test_a_line_now_and_then_says_rate_and_time_left(clock: Clock) -> None:
    said: list[str] = []
    with BuildProgress(said.append) as progress, progress.track_pass("vectors") as report:
        for done in range(0, 101, 10):
            report(done / 100, done * 10)
            clock.now += 1.0
    assert said == [
        "vectors: 300 passages, 30%, 100 passages/s, about 7.0 s left",
        "vectors: 600 passages, 60%, 100 passages/s, about 4.0 s left",
        "vectors: 900 passages, 90%, 100 passages/s, about 1.0 s left",
        "vectors: 1,000 passages in 11 s, 91 passages/s",
    ]


def test_a_resumed_pass_counts_only_what_it_has_done_itself(clock: Clock) -> None:
    said: list[str] = []
    with BuildProgress(said.append) as progress, progress.track_pass("vectors") as report:
        report(0.5, 500)
        clock.now += 10.0
        report(0.6, 600)
    assert said[0] == "vectors: 600 passages, 60%, 10 passages/s, about 40 s left"


def test_a_short_pass_says_nothing(clock: Clock) -> None:
    said: list[str] = []
    with BuildProgress(said.append) as progress, progress.track_pass("scan") as report:
        report(1.0, 10)
    assert said == []


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with BuildProgress(lambda line: None, bar=True) as progress:
        with progress.track_pass("scan") as report:
            report(0.4, 400)
        progress.say("going on [at] row 7")
    shown = capsys.readouterr().err
    assert "scan" in shown and "100%" in shown and "going on [at] row 7" in shown


def test_what_an_index_logs_becomes_a_pass(clock: Clock) -> None:
    said: list[str] = []
    log = logging.getLogger("retriever.index.some")
    with BuildProgress(said.append) as progress, showing_index_log(progress):
        log.info("training %d lists", 7)
        log.info("%d of %d passages have a list", 100, 1000)
        clock.now += 4.0
        log.info("%d of %d passages have a list", 500, 1000)
        log.info("%d of %d passages are in their lists", 10, 1000)
    log.info("%d of %d passages have a list", 900, 1000)
    assert said == [
        "training 7 lists",
        "index: have a list: 500 passages, 50%, 125 passages/s, about 4.0 s left",
        "index: have a list: 500 passages in 4.0 s, 125 passages/s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (4.26, "4.3 s"), (99, "99 s"), (425, "7 min 05 s"), (12_000, "3 h 20 min")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(500, "0 kB"), (1.6e5, "160 kB"), (3.5e7, "35 MB"), (1.24e9, "1.24 GB")])
def test_sizes_are_for_people(size: float, text: str) -> None:
    assert amount(size) == text
