"""The client of `fuzz_services`: start a service, query its resources, and read its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from tests.support import engine_openapi

SERVICES = Path(__file__).with_name("fuzz_services.py")
SETTLE_S = 30.0
"""Timeout for a service's resources to fall back to their earlier values."""


@dataclass(frozen=True)
class Held:
    """Resources of a process: resident memory, open files, asyncio tasks, threads."""

    rss_mb: float
    fds: int
    tasks: int
    threads: int


class Service:
    """`with Service("retriever") as service:` it answers at `service.url` while the block runs.

    body_s  its deadline for a body in seconds, 0 for the usual one
    env     more of its environment, e.g. tokens
    """

    def __init__(self, kind: str, *, body_s: float = 0.0, env: Mapping[str, str] = MappingProxyType({})) -> None:
        self.kind, self._body_s, self._env = kind, body_s, env
        # short: the path of Redis' socket may have 107 characters
        self._scratch = tempfile.TemporaryDirectory(prefix="foray-f-")
        self.folder = Path(self._scratch.name)
        self.log = self.folder / "log"

    def __enter__(self) -> Self:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        for name in [name for name in env if name.startswith("FORAY_")]:
            del env[name]
        env |= self._env
        with self.log.open("wb") as log:
            argv = [sys.executable, str(SERVICES), self.kind, str(self.folder), str(self._body_s)]
            self._child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=self.folder
            )
        try:
            self.port = int(self._line()["port"])
        except BaseException:
            self._child.kill()
            raise
        self.pid = self._child.pid
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self.code = self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self.code = self._child.wait()
        self._child.stdout.close()
        self._scratch.cleanup()

    def look(self) -> Held:
        """What it holds now."""
        assert self._child.stdin is not None
        self._child.stdin.write("look\n")
        self._child.stdin.flush()
        return Held(**self._line())

    def steady(self) -> Held:
        """What it holds when two looks in a row, a second apart, find the same files and tasks; at most SETTLE_S."""
        end, before = time.monotonic() + SETTLE_S, self.look()
        while True:
            time.sleep(1.0)
            now = self.look()
            if (now.fds, now.tasks) == (before.fds, before.tasks) or time.monotonic() > end:
                return now
            before = now

    def settled(self, before: Held) -> Held:
        """What it holds once files, tasks and threads are no more than `before`, or after SETTLE_S."""
        end = time.monotonic() + SETTLE_S
        while True:
            now = self.look()
            back = now.fds <= before.fds and now.tasks <= before.tasks and now.threads <= before.threads
            if back or time.monotonic() > end:
                return now
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Whether /health says 200."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
            return bool(answer.status == 200)

    def document(self) -> dict[str, Any]:
        """Its OpenAPI description: the engine serves none."""
        if self.kind == "engine":
            return engine_openapi.describe()
        with urllib.request.urlopen(f"{self.url}/openapi.json", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def tracebacks(self) -> list[str]:
        """The last line of each traceback in its log, each once."""
        found = re.findall(
            r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(.*)", self.log.read_text(errors="replace")
        )
        return sorted(set(found))

    def _line(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        while line := self._child.stdout.readline():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"the {self.kind} ended: {self.log.read_text()[-2000:]}")
