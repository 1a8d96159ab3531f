"""Support for `messages.py`: processes forked from this one, a run directory, a Redis, a disk to fill.

This process has imported everything and has no threads, so that a learner starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis
import torch
import yaml

import learner.main
import learner.recovery
from deploy.run.redis_server import find_server
from foray import cli as foray
from learner import cli as learner_cli
from protocol.keys import Keys
from tests.support import tiny_learner as tiny
from tests.support.environments import write_tokenizer
from tests.support.waiting import wait_until

RUN = "demo"
LEASE_S = 1.0
PR_SET_PDEATHSIG = 1
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ", re.M)


@dataclass
class Process:
    """A fork that runs `call` and exits with its result; `log`: its output."""

    call: Callable[[], int | None]
    log: Path
    status: int | None = None
    pid: int = 0

    def start(self) -> Process:
        self.pid = os.fork()
        if self.pid == 0:
            self._become()
        return self

    def _become(self) -> None:
        """In the fork. Never returns."""
        status: int | None = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            status = self.call()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status or 0)

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it lives."""
        if self.status is None:
            pid, raw = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(raw) if pid else None
        return self.status

    def wait(self) -> int:
        """Wait until it ends; fail if it does not."""
        wait_until(lambda: self.poll() is not None, f"the end of {self.log.name}:\n{self.text}")
        assert self.status is not None
        return self.status

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass
class Stage:
    """One run in a directory of its own, which is the current one: paths in messages are short."""

    db: redis.Redis
    processes: list[Process] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def keys(self) -> Keys:
        return Keys(RUN)

    @property
    def run_dir(self) -> Path:
        return Path("runs") / RUN

    def fork(self, name: str, call: Callable[[], int | None]) -> Process:
        self.processes.append(Process(call, Path(f"{name}-{len(self.processes)}.log").absolute()).start())
        return self.processes[-1]

    def learner(self, *argv: str, prepare: Callable[[], None] = lambda: None, **engine: Any) -> Process:
        """A learner with the engine of four numbers. prepare: called in its process before it begins"""

        def call() -> int:
            prepare()
            make = partial(tiny.TinyEngine, **{"pace_s": 0.05, **engine})
            learner.main.serve.__kwdefaults__["make_engine"] = make
            learner.recovery.RETRY_CHECKPOINT_S = 1.0
            return learner_cli.main(["--config", "run.yaml", *argv])

        return self.fork("learner", call)

    def player(self) -> Process:
        """A rollout server that makes up its groups."""

        def call() -> int:
            address = self.db.connection_pool.connection_kwargs["path"]
            with tiny.Player({"unix_socket_path": address}, RUN):
                signal.pause()
            return 0

        return self.fork("player", call)

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def reaches(self, step: int) -> None:
        wait_until(lambda: self.step() >= step, f"step {step}; the learner said:\n{self.processes[-1].text[-3000:]}")

    # --- what is printed ---

    def tell(self, command: str, text: str, status: int | None = None, expected: int | None = None) -> None:
        """Print the command, the output of its process, and how it ended."""
        print(f"$ {command}\n{_STAMP.sub('', text).rstrip()}")
        if status is not None:
            print(f"[exit code {status}]")
        print()
        if status != expected:
            self.failures.append(f"{command}: exit code {status}, not {expected}")

    def status(self) -> None:
        """`foray status`, as it is now."""
        asked = self.fork("status", lambda: foray.main(["status", "--config", "run.yaml"]))
        code = asked.wait()
        self.tell("foray status --config run.yaml", asked.text, code, 1)

    def clear(self) -> None:
        """Ends every process of this situation."""
        for process in self.processes:
            if process.poll() is None:
                process.send(signal.SIGCONT)
                process.send(signal.SIGKILL)
                process.wait()


def last_words(text: str, *words: str) -> str:
    """The warnings, errors and final message of a log; only lines with one of `words`, where any are given."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("error:")), len(lines))
    kept = [line for line in lines[:end] if re.search(r" (WARNING|ERROR) ", line)]
    if words:
        kept = [line for line in kept if any(word in line for word in words)]
    return "\n".join([*dict.fromkeys(kept), *lines[end:]])


PADDING = 300_000


def heavy() -> None:
    """Checkpoints and versions of a third of a megabyte."""
    save, weights = tiny.TinyEngine.save_state, tiny.TinyEngine.iter_weights

    def padded(self: Any, directory: Path) -> None:
        save(self, directory)
        (directory / "padding").write_bytes(b"s" * PADDING)

    def large(self: Any, device: str = "cpu") -> Iterator[Any]:
        yield from weights(self, device)
        yield "padding", torch.ones(PADDING // 4)

    tiny.TinyEngine.save_state, tiny.TinyEngine.iter_weights = padded, large


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A separate file system for `folder`, filled up; a limit on file sizes if mounting is not permitted."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def fill() -> None:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (PADDING // 2, resource.RLIM_INFINITY))
            return
        try:
            with (folder / ".filler").open("wb", buffering=0) as file:
                while True:
                    file.write(b"f" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC

    try:
        yield fill
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def redis_in(folder: Path) -> Iterator[redis.Redis]:
    """A Redis on `folder/s`."""
    argv = [
        str(find_server().path),
        "--unixsocket",
        str(folder / "s"),
        "--dir",
        str(folder),
        "--port",
        "0",
        "--save",
        "",
    ]
    child = subprocess.Popen([*argv, "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL, cwd=folder)
    try:
        wait_until((folder / "s").exists, "Redis listens")
        client = redis.Redis(unix_socket_path=str(folder / "s"))
        wait_until(lambda: _answers(client), "Redis answers")
        yield client
        client.close()
    finally:
        child.terminate()
        child.wait(10)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def prepare(folder: Path) -> None:
    """The run's configuration, model and questions in the current directory."""
    model = write_tokenizer(folder / "model", "words")
    (model / "config.json").write_text('{"model_type": "tiny"}')
    lines = (json.dumps({"id": f"q{i}", "question": f"what is {i} ?", "answers": [str(i)]}) for i in range(7))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    run = {"id": RUN, "dir": f"runs/{RUN}", "model": "model", "group_size": 4, "groups_per_step": 4, "steps": 100_000}
    how = {"questions": "questions.jsonl", "checkpoint_every": 2, "reconcile_s": 0.5, "lease_s": LEASE_S}
    (folder / "run.yaml").write_text(yaml.safe_dump({"run": run, "learner": how}))
