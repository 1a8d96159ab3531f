"""Progress of a build: a bar on a terminal, otherwise a line every few seconds; passages/s, share and time left."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 3.0
_BAR_EVERY_S = 0.1


def to_stderr(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


class PassProgress:
    """One pass over the corpus in progress. Call it with (share done in [0, 1], passages done)."""

    def __init__(self, name: str, emit: Callable[[str], None], bar: tuple[Progress, TaskID] | None) -> None:
        self._name, self._emit, self._bar = name, emit, bar
        self._start = self._last = time.monotonic()
        self._first: tuple[float, int] | None = None
        self.passages = 0

    def __call__(self, share: float, passages: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = share, passages  # a resumed pass starts in the middle
        self.passages = passages
        if now - self._last < (LINE_EVERY_S if self._bar is None else _BAR_EVERY_S):
            return
        self._last = now
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=share, rate=f"{self._rate(now):,.0f} passages/s")
        else:
            self._emit(self._line(share, now))

    def _rate(self, now: float) -> float:
        before = self._first[1] if self._first else 0
        return (self.passages - before) / max(now - self._start, 1e-9)

    def _line(self, share: float, now: float) -> str:
        before = self._first[0] if self._first else 0.0
        left = (now - self._start) * (1 - share) / max(share - before, 1e-9)
        return (
            f"{self._name}: {self.passages:,} passages, {share:.0%}, {self._rate(now):,.0f} passages/s, "
            f"about {duration(left)} left"
        )

    def finish(self) -> None:
        """Report the duration of the pass if it was long enough."""
        now = time.monotonic()
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=1.0)
        elif now - self._start >= LINE_EVERY_S:
            took = duration(now - self._start)
            self._emit(f"{self._name}: {self.passages:,} passages in {took}, {self._rate(now):,.0f} passages/s")


class BuildProgress:
    """`with BuildProgress(emit) as progress:` `emit` receives lines; `bar` draws on stderr instead of progress
    lines."""

    def __init__(self, emit: Callable[[str], None], *, bar: bool = False) -> None:
        self._emit, self._bar = emit, _make_bar() if bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Report an event."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._emit(line)

    @contextmanager
    def track_pass(self, name: str) -> Iterator[PassProgress]:
        """Track one pass."""
        task = None if self._bar is None else (self._bar, self._bar.add_task(name, total=1.0, rate=""))
        current = PassProgress(name, self.say, task)
        yield current
        current.finish()


@contextmanager
def showing_index_log(progress: BuildProgress) -> Iterator[None]:
    """Show the log messages of index builds: `"%d of %d ..."` of passages becomes a pass, others a line."""
    logger = logging.getLogger("retriever.index")
    before = logger.level, logger.propagate
    with ExitStack() as passes:
        handler = _IndexLog(progress, passes)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]


class _IndexLog(logging.Handler):
    _STEP = "%d of %d passages "

    def __init__(self, progress: BuildProgress, passes: ExitStack) -> None:
        super().__init__()
        self._progress, self._passes = progress, passes
        self._name = ""
        self._pass: PassProgress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(self._STEP) or not isinstance(record.args, tuple):
            self._progress.say(record.getMessage())
            return
        name = str(record.msg).removeprefix(self._STEP)
        if self._pass is None or self._name != name:
            self._passes.close()  # the previous step is over
            self._name, self._pass = (
                name,
                self._passes.enter_context(self._progress.track_pass(f"index: {name.removeprefix('are ')}")),
            )
            self._pass(0.0, 0)
        done, total = (int(str(value)) for value in record.args)
        self._pass(done / total, done)


def _make_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}")
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


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
