"""A tab of the browser, and the processes behind it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER_S = 60.0
ANSWER_MS = 1000 * ANSWER_S
SIZES = {1280: 800, 390: 844}
THEMES = ("light", "dark")


@dataclass
class Tab:
    """A page of the browser, and what went wrong in it: errors, dialogs, refused requests."""

    page: Any
    faults: list[str]

    def open(self, url: str) -> None:
        """Load an address and wait until the view has been drawn."""
        self.page.goto(url)
        self.page.locator("#main h1").first.wait_for(state="attached")

    def text(self, selector: str) -> str:
        """Return the text of the first such element."""
        return str(self.page.locator(selector).first.inner_text())

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds. The browser goes on meanwhile; the page allows no functions made of text."""
        deadline = time.monotonic() + ANSWER_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {ANSWER_S:g} s"
            self.page.wait_for_timeout(50)


@contextmanager
def running(*words: str, cwd: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run `foray WORDS`, and end it with Ctrl-C."""
    call, env = [sys.executable, "-m", "foray", *words], {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with (cwd / f"{words[0]}.log").open("a") as log:
        process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=log, text=True, cwd=cwd, env=env)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=ANSWER_S)
        finally:
            process.kill()


@contextmanager
def dashboard(directory: Path, *words: str, **env: str) -> Iterator[str]:
    """Run `foray dashboard` as a user does; yields its URL."""
    with running("dashboard", str(directory), "--port", "0", *words, cwd=directory.parent, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, (directory.parent / "dashboard.log").read_text() + line
        yield found[0]


@dataclass
class Ring:
    """A live ring, and the address of its dashboard."""

    process: subprocess.Popen[str]
    directory: Path
    url: str

    @property
    def steps(self) -> int:
        """Return the number of finished steps."""
        path = self.directory / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0
