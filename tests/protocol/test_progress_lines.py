"""Progress: count, rate and time left, in lines and as a bar."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from protocol.runtime.progress import HungUp, Progress, _Terminal, amount, duration


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


@pytest.mark.parametrize(
    ("interval_s", "counts", "wait_s", "rate"),
    [
        (0.125, (0, 1000, 2000), 0.75, "2,667"),  # within SAMPLE_EVERY_S: one change of 0.25 s, and 0.75 s since
        (0.25, (0, 1000, 2000), 0.5, "2,667"),  # two changes of 0.25 s
        (11.0, (0, 1000, 1010, 1020, 1030), 0.0, "23"),  # WINDOW_CHANGES are kept for as long as they take
        (7.5, (0, 1000, 1010, 1020, 1030, 1040), 0.0, "28"),
        (7.6, (0, 1000, 1010, 1020, 1030, 1040), 0.0, "1"),  # more than WINDOW_S
        (0.05, (0, 5), 0.0, "100"),
        (1.0, (0, 1), 0.0, "1"),
    ],
)
def test_a_rate_is_of_the_last_changes(interval_s: float, counts: tuple[int, ...], wait_s: float, rate: str) -> None:
    clock = Clock()
    clock.now = 0.0
    with made([], clock).task("vectors", None, "passages") as task:
        for number, count in enumerate(counts):
            clock.now = number * interval_s
            task(count)
        clock.now += wait_s
        assert task.text().split(", ", 1)[1].startswith(f"{rate} passages/s, ")


def test_a_share_may_grow_without_a_unit() -> None:
    clock = Clock()
    with made([], clock).task("merge", 4, "passes") as task:
        task(1, 0.25)
        clock.now += 5.0
        task(1, 0.5)
        assert task.text() == "1 of 4 passes, 50%, 0 passes/s, about 10 s left"


@pytest.mark.parametrize(("total", "done", "share"), [(0, 0, "100%"), (1, 0, "0%"), (1, 1, "100%"), (2, 3, "100%")])
def test_the_share_of_a_total_is_at_most_all(total: int, done: int, share: str) -> None:
    with made([], Clock()).task("copy", total, "files") as task:
        task(done)
        assert task.text() == f"{done} of {total} files, {share}, 0 s so far"


def test_a_task_as_long_as_the_interval_tells_its_duration() -> None:
    said, clock = list[str](), Clock()
    with made(said, clock).task("scan", unit="rows") as task:
        task(0)
        clock.now += 3.0
        task.update(6)
    assert said == ["scan: 6 rows in 3.0 s, 2 rows/s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_there_while_any_task_is_in_progress_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    progress = Progress.on(terminal)
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    with progress.task("outer", 10, "steps") as outer:
        with progress.task("inner", 10, "steps") as inner:
            assert outer.drawn and inner.drawn
        assert outer.drawn and not inner.drawn
        assert (terminal.getvalue().count(hidden), terminal.getvalue().count(visible)) == (1, 0)
    assert not outer.drawn and terminal.getvalue().count(visible) == 1
    before = terminal.getvalue()
    progress("a plain [line]")
    assert terminal.getvalue() == before + "a plain [line]\n"
    with progress.task("later"):
        assert terminal.getvalue().count(hidden) == 2
    assert terminal.getvalue().count(visible) == 2


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with Progress.on(terminal).task("work") as task:
        assert not task.drawn
    assert terminal.getvalue() == ""


def test_several_tasks_share_one_silence() -> None:
    said, clock = list[str](), Clock()
    progress = made(said, clock)
    clock.now += 2.9
    progress.beat(lambda: "too early")
    progress.beat(lambda: "now", every_s=2.0)
    clock.now += 3.0
    progress.beat(lambda: "later", every_s=3.1)
    progress.beat(lambda: "again")
    assert said == ["now", "again"]


def test_work_beside_a_look_returns_its_result_or_raises() -> None:
    said, looked = list[str](), list[int]()
    begun = threading.Event()

    def work(task: Any) -> str:
        begun.wait(10)
        task.update(3)
        return "done"

    def look() -> None:
        looked.append(1)
        begun.set()

    assert Progress(said.append).beside(work, look, "scan", 3, "rows") == "done" and looked and said == []
    with pytest.raises(ZeroDivisionError):
        Progress(said.append).beside(lambda task: 1 / 0, look, "scan")
    begun.clear()
    with pytest.raises(KeyError):
        Progress(said.append).beside(work, lambda: {}["x"], "scan")
    begun.set()


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


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_bar_and_stdout_nothing(terminal: bool) -> None:
    """stderr is a terminal or a pipe; stdout is a pipe and holds only the result."""
    main, sub = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
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
    assert "12:00 going on [at] row 7" in seen and ("scan [/b]" in seen) is terminal
    assert ("of 1,000 passages" in seen and "\x1b[" in seen) is terminal
    if terminal:
        assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor is visible again"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (4.26, "4.3 s"), (10, "10 s"), (99, "99 s"), (100, "1 min 40 s"), (425, "7 min 05 s")),
        *((5999, "99 min 59 s"), (6000, "1 h 40 min"), (12_000, "3 h 20 min")),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(500, "0 kB"), (1.6e5, "160 kB"), (1e7, "10 MB"), (3.5e7, "35 MB"), (1e9, "1.00 GB"), (1.24e9, "1.24 GB")],
)
def test_sizes_are_for_people(size: float, text: str) -> None:
    assert amount(size) == text


def test_a_terminal_that_is_gone_is_told_from_a_full_disk() -> None:
    def unbuffered(file: str | int) -> io.TextIOWrapper:
        return io.TextIOWrapper(open(file, "wb", buffering=0), write_through=True)

    ours, theirs = pty.openpty()
    with unbuffered(theirs) as terminal, unbuffered("/dev/full") as full:
        progress = Progress.on(terminal)
        os.close(ours)
        with pytest.raises(HungUp):
            progress("one")
        progress("what follows is silent")
        with pytest.raises(OSError, match="No space") as failed:
            Progress.on(full)("one")
        assert not isinstance(failed.value, HungUp)


def test_a_thread_that_draws_to_a_terminal_that_is_gone_leaves_the_error_to_the_command() -> None:
    ours, theirs = pty.openpty()
    with io.TextIOWrapper(open(theirs, "wb", buffering=0), write_through=True) as stream:
        terminal = _Terminal(stream)
        os.close(ours)
        drawing = threading.Thread(target=terminal.write, args=("bar",))
        drawing.start()  # an exception in a thread fails the test
        drawing.join()
        with pytest.raises(HungUp):
            terminal.write("line")
        assert terminal.write("after it") == 8


def test_bars_end_as_lines_do_when_the_terminal_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with io.TextIOWrapper(open(theirs, "wb", buffering=0), write_through=True) as terminal:
        progress = Progress.on(terminal)
        with pytest.raises(HungUp), progress.task("work", 5) as task:
            assert task.drawn
            os.close(ours)
            for done in range(20):
                task(done % 5)
                task._draw()
                time.sleep(0.02)
        progress("silent")
