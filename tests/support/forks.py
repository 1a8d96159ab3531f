"""Processes that fork from one that has imported everything (zygote.py), as a test or the chaos driver sees them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from protocol.runtime.net import free_port

START_S = 120.0
"""Timeout of the imports on a busy machine, in seconds."""
RANKS_S = 300.0
CONTROL = Path(__file__).parents[1] / "chaos"


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
        order |= {"wrong": list(wrong), "control": str(CONTROL)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        with self._news:
            if not self._news.wait_for(lambda: ask in self._answers, 30):
                raise RuntimeError("the zygote does not answer")
            return self._answers.pop(ask)

    @property
    def pid(self) -> int:
        """The zygote itself, the parent of all."""
        return self._process.pid

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

    def kill(self, pid: int) -> None:
        """End a process at once, if it has not ended."""
        if self.ended(pid) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, pid: int, seconds: float) -> int:
        """The exit status of a process when it has ended. Raises TimeoutError."""
        with self._news:
            if not self._news.wait_for(lambda: pid in self._ends, seconds):
                raise TimeoutError(f"process {pid} has not ended after {seconds:.0f} s")
            return self._ends[pid]

    @contextlib.contextmanager
    def ranks(
        self, program: Path | str, argv: Sequence[str], folder: Path, size: int, env: Mapping[str, str] | None = None
    ) -> Iterator[list[int]]:
        """The pids of `program` run as `size` ranks, with the environment of torchrun; FORAY_STORE is a file to meet
        at without a port. They are killed in the end. Their output is in `folder`/rank*.log."""
        # on the CPU also where there is one GPU: two ranks cannot share it
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        shared |= {"CUDA_VISIBLE_DEVICES": ""}
        shared |= {"FORAY_STORE": str(folder / f"store.{next(self._asked)}")} | dict(env or {})
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        pids = [
            self.start(str(program), argv, folder / f"rank{rank}.log", shared | place, folder)
            for rank, place in enumerate(places)
        ]
        try:
            yield pids
        finally:
            for pid in pids:
                self.kill(pid)

    def run_ranks(self, program: Path | str, argv: Sequence[str], folder: Path, size: int) -> None:
        """As `ranks`, until all have ended, each with status 0."""
        with self.ranks(program, argv, folder, size) as pids:
            codes = [self.wait(pid, RANKS_S) for pid in pids]
        logs = sorted(folder.glob("rank*.log"))
        assert codes == [0] * size, "\n".join(log.read_text()[-3000:] for log in logs)
