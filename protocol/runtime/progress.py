"""Progress of long work: a bar on a terminal, otherwise a line every few seconds; count, rate and time left.

    progress = Progress.on(sys.stderr)
    with progress.task("vectors", total=n, unit="passages") as task:
        task(done)

Rate and time left are of the last WINDOW_S seconds: work that was done before an interruption, or at another speed,
does not count.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar, cast

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

T = TypeVar("T")
Say = Callable[[str], None]
EVERY_S = 5.0
"""Seconds without output before a line of progress."""
WINDOW_S, WINDOW_CHANGES = 30.0, 5
"""Rates are of at least this many seconds and changes."""
BAR_EVERY_S, SAMPLE_EVERY_S, LOOK_S = 0.1, 0.5, 0.05


class HungUp(OSError):
    """The terminal is gone. Its SIGHUP may come later than this error of a write."""


class _Terminal:
    """A terminal. When it is gone, one write of the thread that made this raises HungUp. Later ones and those of other
    threads do nothing: an orderly stop goes on, and the thread that redraws the bars ends without a traceback."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._gone, self._thread = stream, False, threading.current_thread()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._do(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, call: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            call()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            if threading.current_thread() is not self._thread:
                return
            self._gone = True
            raise HungUp(*error.args) from error


class Progress:
    """Prints lines, and bars while tasks are in progress. May be used where a function that prints a line is wanted."""

    def __init__(self, emit: Say, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit, self.every_s, self.clock = emit, every_s, clock
        self._said = clock()
        self._terminal: TextIO | None = None
        self._bars: Bars | None = None
        self._tasks = 0

    @classmethod
    def on(cls, stream: TextIO, *, stamp: Callable[[], str] = lambda: "", every_s: float = EVERY_S) -> Self:
        """Return the progress of a command that prints to `stream`, each line after `stamp()`."""

        def emit(line: str) -> None:
            try:
                if made._bars is None:
                    print(stamp() + line, file=stream, flush=True)
                else:
                    made._bars.console.print(stamp() + line, markup=False, highlight=False, soft_wrap=True)
            except OSError:
                made._emit = lambda line: None  # what follows, such as an orderly stop, must not fail by its messages
                raise

        made = cls(emit, every_s=every_s)
        if stream.isatty():
            stream = cast(TextIO, _Terminal(stream))
            made._terminal = stream if os.environ.get("TERM") != "dumb" else None
        return made

    @classmethod
    def of(cls, say: Say) -> Progress:
        """Return `say` itself if it is a Progress, else one that prints lines with it."""
        return say if isinstance(say, Progress) else cls(say)

    def __call__(self, line: str) -> None:
        """Print one line immediately."""
        self._said = self.clock()
        self._emit(line)

    def beat(self, line: Callable[[], str], *, every_s: float | None = None) -> None:
        """Print `line()` after a silence of `every_s` seconds. Call this in every iteration of a waiting loop."""
        if self.clock() - self._said >= (self.every_s if every_s is None else every_s):
            self(line())

    def beside(
        self,
        work: Callable[[TaskProgress], T],
        look: Callable[[], object],
        name: str,
        total: float | None = None,
        unit: str = "",
    ) -> T:
        """Run `work` in a thread as a task, and call `look` periodically meanwhile. Return what `work` returns.

        `work` reports with `TaskProgress.update`. Raises what either raises.
        """
        with self.task(name, total, unit) as task:

            def each() -> None:
                look()
                task.tick()

            return _beside(lambda: work(task), each)

    @contextmanager
    def task(self, name: str, total: float | None = None, unit: str = "") -> Iterator[TaskProgress]:
        """Track a piece of work. A line at its end tells how long it took, if it was long and not interrupted.

        total  of `unit`s, None if it is unknown
        unit   plural of what is counted; "B" for bytes; "" shows the share only
        """
        self._tasks += 1
        if self._terminal is not None and self._bars is None:
            self._bars = _start_bars(self._terminal)
        task = TaskProgress(self, name, total, unit)
        try:
            task.show(self._bars)
            yield task
        finally:
            self._tasks -= 1
            task.hide()
            if not self._tasks and self._bars is not None:
                self._bars.stop()
                self._bars = None
        task.finish()


class TaskProgress:
    """One piece of work in progress: call it with the units done. `Progress.task` makes one.

    note   text for the line, such as the loss
    total  may change while it is in progress
    """

    def __init__(self, progress: Progress, name: str, total: float | None, unit: str) -> None:
        self.name, self.total, self.unit, self.done, self.note = name, total, unit, 0.0, ""
        self._progress, self._clock = progress, progress.clock
        self._share: float | None = None
        self._begun = self._drawn = self._looked = self._clock()
        self._from: float | None = None
        """Units at the first call: an interrupted task starts in the middle."""
        self._samples: deque[tuple[float, float, float]] = deque()
        """(time, units, share) when they changed."""
        self._lock = threading.Lock()
        self._bar: tuple[Bars, Any] | None = None

    def __call__(self, done: float, share: float | None = None) -> None:
        """Record what is done in all, and show it if it is time. share: in [0, 1], if it is not `done` / `total`."""
        self.done, self._share = done, share
        now = self._clock()
        if self._from is None or now - self._looked >= LOOK_S:  # it may be called for every line of a file
            self._looked = now
            self.update(done, share)
            self.tick()

    def update(self, done: float, share: float | None = None) -> None:
        """Record what is done without showing it: for other threads than the one that calls `tick`."""
        with self._lock:
            self._record(done, share)

    def _record(self, done: float, share: float | None) -> None:
        self.done, self._share = done, share
        now, samples = self._clock(), self._samples
        self._from = done if self._from is None else self._from
        new = now, done, self._part() or 0.0
        if samples and samples[-1][1:] == new[1:]:
            return
        if len(samples) > 1 and now - samples[-2][0] < SAMPLE_EVERY_S:
            samples.pop()
        samples.append(new)
        while len(samples) > WINDOW_CHANGES and now - samples[1][0] > WINDOW_S:
            samples.popleft()

    def tick(self) -> None:
        """Show the state if it is time. Call this in every iteration of a waiting loop."""
        if self._bar is None:
            self._progress.beat(lambda: f"{self.name}: {self.text()}")
        elif self._clock() - self._drawn >= BAR_EVERY_S:
            self._draw()

    def text(self) -> str:
        """Return units, share, note, rate and time left, as far as they are known."""
        part, pace = self._part(), self._pace()
        of = f" of {self._count(self.total)}" if self.total is not None else ""
        words = [f"{self._count(self.done)}{of}{self._noun()}"] if self.unit else []
        if part is not None:
            words.append(f"{part:.0%}")
        words += [self.note] if self.note else []
        if pace is not None and self.unit:
            words.append(self._rate(pace[0]))
        words.append(self.left() or f"{duration(self._clock() - self._begun)} so far")
        return ", ".join(words)

    @property
    def drawn(self) -> bool:
        """Return whether a bar shows it."""
        return self._bar is not None

    def left(self) -> str:
        """Return the time left as text, "" while it is unknown."""
        part, pace = self._part(), self._pace()
        return f"about {duration((1 - part) / pace[1])} left" if part is not None and pace and pace[1] > 0 else ""

    def show(self, bars: Bars | None) -> None:
        """Draw a bar."""
        if bars is not None:
            self._bar = bars, bars.add_task(self.name, total=None, text="")
            self._draw()

    def hide(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar[0].remove_task(self._bar[1])
            self._bar = None

    def finish(self) -> None:
        """Print the duration if it was long."""
        took = self._clock() - self._begun
        if took < self._progress.every_s:
            return
        made = self.done - (self._from if self._from is not None else self.done)
        what = f"{self._count(self.done)}{self._noun()} in " if self.unit else ""
        rate = f", {self._rate(made / took)}" if self.unit and made > 0 else ""
        self._progress(f"{self.name}: {what}{duration(took)}{rate}")

    def _draw(self) -> None:
        assert self._bar is not None
        self._drawn = self._clock()
        part = self._part()
        bars, number = self._bar
        bars.update(number, total=None if part is None else 1.0, completed=part or 0.0, text=self.text())

    def _part(self) -> float | None:
        if self._share is not None:
            return self._share
        return None if self.total is None else min(1.0, self.done / self.total) if self.total > 0 else 1.0

    def _pace(self) -> tuple[float, float] | None:
        """Return units and share per second; None until something is done. A silence slows both."""
        if len(self._samples) < 2:
            return None
        (begun, done, part), (last, more, most) = self._samples[0], self._samples[-1]
        usual = (last - begun) / (len(self._samples) - 1)
        seconds = max(last - begun, self._clock() - begun - usual, 1e-9)
        return (more - done) / seconds, (most - part) / seconds

    def _count(self, number: float) -> str:
        return amount(number) if self.unit == "B" else f"{number:,.0f}"

    def _noun(self) -> str:
        return "" if self.unit == "B" else f" {self.unit}"

    def _rate(self, rate: float) -> str:
        if self.unit == "B":
            return f"{amount(rate)}/s"
        return f"{rate:,.0f} {self.unit}/s" if rate >= 1 or rate <= 0 else f"{duration(1 / rate)} each"


def _start_bars(terminal: TextIO) -> Bars:
    """Start drawing bars on `terminal`."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    # without markup: names of files may have brackets
    name, text = (TextColumn(part, markup=False) for part in ("{task.description}", "{task.fields[text]}"))
    columns = name, BarColumn(bar_width=24), text
    # rich would move what is printed to a redirected stdout to the terminal
    bars = Bars(*columns, console=Console(file=terminal), transient=True, redirect_stdout=False, redirect_stderr=False)
    bars.start()
    return bars


def _beside(work: Callable[[], T], look: Callable[[], None]) -> T:
    result: list[T] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=call, name="beside", daemon=True)
    thread.start()
    while thread.is_alive():
        look()
        thread.join(LOOK_S)
    if failure:
        raise failure[0]
    return result[0]


def duration(seconds: float) -> str:
    """Return `42 s`, `7 min 05 s`, `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def amount(size: float) -> str:
    """Return `1.24 GB`, `35 MB`, `160 kB` (powers of ten)."""
    if size >= 1e9:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e3:,.0f} kB"
