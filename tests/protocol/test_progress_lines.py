"""Progress: count, rate and time left, in lines and as a bar."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading

import pytest

from protocol.runtime.progress import Progress, amount, duration


class Clock:
    """A clock that advances on request."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(said: list[str], clock: Clock) -> Progress:
    return Progress(said.append, every_s=3.0, clock=clock)


def test_a_line_now_and_then_says_rate_and_time_left() -> None:
    said, clock = list[str](), Clock()
    with made(said, clock).task("vectors", 1000, "passages") as task:
        for done in range(0, 1001, 100):
            task(done)
            clock.now += 1.0
    assert said == [
        "vectors: 300 of 1,000 passages, 30%, 100 passages/s, about 7.0 s left",
        "vectors: 600 of 1,000 passages, 60%, 100 passages/s, about 4.0 s left",
        "vectors: 900 of 1,000 passages, 90%, 100 passages/s, about 1.0 s left",
        "vectors: 1,000 passages in 11 s, 91 passages/s",
    ]


def test_a_resumed_task_counts_only_what_it_has_done_itself() -> None:
    said, clock = list[str](), Clock()
    with made(said, clock).task("vectors", 1000, "passages") as task:
        task(500)
        clock.now += 10.0
        task(600)
    assert said == [
        "vectors: 600 of 1,000 passages, 60%, 10 passages/s, about 40 s left",
        "vectors: 600 passages in 10 s, 10 passages/s",
    ]


def test_time_left_is_that_of_the_recent_rate() -> None:
    """A thousand at 100/s, then 1/s: from the start it would be 5 s."""
    said, clock = list[str](), Clock()
    with made(said, clock).task("texts", 1100, "passages") as task:
        for done in range(0, 1001, 100):
            task(done)
            clock.now += 1.0
        for done in range(1001, 1061):
            task(done)
            clock.now += 1.0
        assert task.left() == "about 40 s left"


def test_a_silence_makes_it_longer_and_steps_of_minutes_have_a_rate_too() -> None:
    said, clock = list[str](), Clock()
    with made(said, clock).task("training", 10, "steps") as task:
        for done in range(3):
            task(done)
            clock.now += 120.0
        assert "2 min 00 s each, about 16 min 00 s left" in task.text()
        clock.now += 1200.0
        assert "12 min 00 s each, about 96 min 00 s left" in task.text()


def test_without_a_total_or_a_first_unit_the_time_so_far_is_told() -> None:
    said, clock = list[str](), Clock()
    with made(said, clock).task("download", None, "B") as task:
        task(0)
        clock.now += 4.0
        task(20_000_000)
    with made(said, clock).task("evaluating", 600, "episodes") as task:
        clock.now += 4.0
        task.tick()
    with made(said, clock).task("loading") as task:
        clock.now += 4.0
        task.tick()
    assert said == [
        "download: 20 MB, 5,000 kB/s, 4.0 s so far",
        "download: 20 MB in 4.0 s, 5,000 kB/s",
        "evaluating: 0 of 600 episodes, 0%, 4.0 s so far",
        "evaluating: 0 episodes in 4.0 s",
        "loading: 4.0 s so far",
        "loading: 4.0 s",
    ]


def test_a_short_task_and_one_that_fails_say_nothing() -> None:
    said, clock = list[str](), Clock()
    with made(said, clock).task("scan", unit="passages") as task:
        task(10, 1.0)
    with pytest.raises(KeyboardInterrupt), made(said, clock).task("scan", unit="passages") as task:
        clock.now += 100.0
        raise KeyboardInterrupt
    assert said == []


def test_counts_may_come_from_several_threads() -> None:
    with Progress(lambda line: None).task("asking", 4000, "episodes") as task:
        threads = [
            threading.Thread(target=lambda: [task.update(n) for n in range(1000)])  # type: ignore[func-returns-value]
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            task.text()
        assert "of 4,000 episodes" in task.text()


SCRIPT = """
import json, sys
from protocol.runtime.progress import Progress
progress = Progress.on(sys.stderr, stamp=lambda: "12:00 ")
with progress.task("scan [/b]", 1000, "passages") as task:
    for done in range(0, 1001, 50):
        task(done)
        import time; time.sleep(0.03)
        if done == 500:
            progress("going on [at] row 7")
print(json.dumps({"stdout": "has only this"}))
"""


@pytest.mark.parametrize(("terminal", "rich"), [(True, True), (True, False), (False, True)])
def test_a_terminal_gets_a_bar_and_stdout_nothing(terminal: bool, rich: bool) -> None:
    """stderr is a terminal or a pipe; stdout is a pipe and holds only the result."""
    main, sub = pty.openpty()
    script = SCRIPT if rich else "import sys; sys.modules['rich'] = None\n" + SCRIPT
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=sub if terminal else subprocess.PIPE,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(sub)
    if terminal:
        shown = io.BytesIO()
        while True:
            try:
                part = os.read(main, 1 << 16)
            except OSError:  # the other side was closed
                break
            if not part:
                break
            shown.write(part)
        out, _ = child.communicate(timeout=60)
        seen = shown.getvalue().decode()
    else:
        out, err = child.communicate(timeout=60)
        seen = err.decode()
    os.close(main)
    assert child.returncode == 0 and json.loads(out) == {"stdout": "has only this"}
    assert "12:00 going on [at] row 7" in seen and ("scan [/b]" in seen) is (terminal and rich)
    assert ("of 1,000 passages" in seen and "\x1b[" in seen) is (terminal and rich)
    if terminal and rich:
        assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor is visible again"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (4.26, "4.3 s"), (99, "99 s"), (425, "7 min 05 s"), (12_000, "3 h 20 min")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(500, "0 kB"), (1.6e5, "160 kB"), (3.5e7, "35 MB"), (1.24e9, "1.24 GB")])
def test_sizes_are_for_people(size: float, text: str) -> None:
    assert amount(size) == text
