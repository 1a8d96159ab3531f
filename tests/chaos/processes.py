"""The zygote as the driver sees it, and the lives of one process: each start is a life with a log of its own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

START_S = 120.0
"""How long the imports may take on a busy machine."""


@dataclass
class Life:
    """One start of a process until its end. `status`: exit status, negative for a signal, None while it lives."""

    name: str
    number: int
    pid: int
    handle: int
    log: Path
    began: float
    status: int | None = None
    ended: float = 0.0
    doomed: str = ""
    """The fault that may end it: an end without one is a finding."""

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal to this very process; False when it has ended."""
        if self.status is not None:
            return False
        try:
            signal.pidfd_send_signal(self.handle, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """Frees the handle."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class Zygote:
    """Forks processes on demand, in milliseconds. `with Zygote(log) as zygote`."""

    def __init__(self, log: Path) -> None:
        self._log, self._asked = log, itertools.count()
        self._news = threading.Condition()
        self._answers: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._ready = False

    def __enter__(self) -> Zygote:
        scratch = self._log.parent / "tmp"  # what killed nodes leave behind goes with the rest
        scratch.mkdir(exist_ok=True)
        env = {
            **os.environ,
            "TMPDIR": str(scratch),
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "zygote.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, name="zygote", daemon=True)
        self._reader.start()
        with self._news:
            if not self._news.wait_for(lambda: self._ready, START_S):
                raise RuntimeError(f"the zygote did not start:\n{self._log.read_text()[-2000:]}")
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._news:
                if "ready" in said:
                    self._ready = True
                elif "ask" in said:
                    self._answers[said["ask"]] = said["pid"]
                    self._ends.pop(said["pid"], None)  # of an earlier process that had this number
                else:
                    self._ends[said["pid"]] = said["status"]
                self._news.notify_all()

    def start(
        self, module: str, argv: Sequence[str], log: Path, env: dict[str, str], cwd: Path, wrong: Sequence[str] = ()
    ) -> int:
        """The pid of a new process."""
        ask = next(self._asked)
        order = {"ask": ask, "module": module, "argv": list(argv), "log": str(log), "env": env, "cwd": str(cwd)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order | {"wrong": list(wrong)}) + "\n")
        self._process.stdin.flush()
        with self._news:
            if not self._news.wait_for(lambda: ask in self._answers, 30):
                raise RuntimeError("the zygote does not answer")
            return self._answers.pop(ask)

    def ended(self, pid: int) -> int | None:
        """The exit status of a process, None while it lives."""
        with self._news:
            return self._ends.get(pid)

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # its children die with it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class Ward:
    """A process that is kept running: `start` begins a life, `look` notices its end and begins the next one.

    wanted   False: held down by a fault
    lives    all of them, oldest first
    """

    name: str
    begin: Callable[[], int]
    end_of: Callable[[int], int | None]
    logs: Path
    pause_s: float = 0.3
    wanted: bool = True
    lives: list[Life] = field(default_factory=list)
    _due: float = 0.0

    @property
    def life(self) -> Life:
        """The present life (of two, the later one), or the last one."""
        living = [life for life in self.lives if life.status is None]
        return (living or self.lives)[-1]

    @property
    def alive(self) -> bool:
        """Whether it runs (stopped processes do)."""
        return any(life.status is None for life in self.lives)

    def next_log(self) -> Path:
        """The log of the next life."""
        return self.logs / f"{self.name}.{len(self.lives) + 1:04d}.log"

    def start(self) -> Life:
        """Begins a life."""
        log = self.next_log()
        return self.adopt(self.begin(), log)

    def adopt(self, pid: int, log: Path) -> Life:
        """A process that runs already takes the place of the present one, which is looked after until it ends."""
        life = Life(self.name, len(self.lives) + 1, pid, os.pidfd_open(pid), log, time.time())
        self.lives.append(life)
        return life

    def look(self) -> list[Life]:
        """The lives that have just ended; starts the next one when it is due."""
        ended = []
        for life in self.lives:
            if life.status is None and (status := self.end_of(life.pid)) is not None:
                life.status, life.ended = status, time.time()
                life.close()
                ended.append(life)
        if ended and not self.alive:
            self._due = time.monotonic() + self.pause_s
        elif self.lives and not self.alive and self.wanted and time.monotonic() >= self._due:
            self.start()
        return ended


def die_with_parent() -> None:
    """For `preexec_fn`: the child is killed when the driver ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
