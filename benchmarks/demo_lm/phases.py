"""Run the phases of the demo, each once: a finished phase is skipped, a stopped one continues.

A phase is a `foray` command in a separate process, which resumes by itself. `phases.json` records which are finished
and what they used, over all starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from protocol.errors import ForayError
from protocol.runtime.files import atomic_write
from protocol.runtime.lifecycle import SIGNALS
from protocol.runtime.service_cli import NOT_RESTARTED, exit_code

RECORD = "phases.json"
Record = dict[str, dict[str, Any]]


class PhaseFailed(ForayError):
    """A command failed. `code`: its exit code."""

    def __init__(self, name: str, code: int, log: Path) -> None:
        super().__init__(f"{name} failed (exit code {code}); its output: {log}")
        self.code = code
        self.acts = code in NOT_RESTARTED
        """The error in its output says what to do first."""


class PhaseStopped(ForayError):
    """A signal stopped the command. `number`: the signal; `directory`: of all results."""

    def __init__(self, name: str, number: int, directory: Path) -> None:
        super().__init__(f"{name} was stopped; what is finished is in {directory}")
        self.number = number


@dataclass(frozen=True)
class Phase:
    """One step of the demo. `argv`: the arguments of Python for its process; `title`: what it does."""

    name: str
    title: str
    argv: tuple[str, ...]

    @classmethod
    def foray(cls, name: str, title: str, *argv: str | Path) -> Phase:
        """Return a phase that runs `foray` with these arguments."""
        return cls(name, title, ("-m", "foray", *map(str, argv)))


def read_phases(directory: Path) -> Record:
    """Return name -> {seconds, cpu_seconds, starts, done} of the phases so far."""
    try:
        found: Record = json.loads((directory / RECORD).read_text())
    except FileNotFoundError:
        return {}
    return found


def run_phases(phases: Sequence[Phase], directory: Path, say: Callable[[str], None]) -> None:
    """Run the phases that are not finished. Raises PhaseFailed or PhaseStopped.

    The output of each goes to `directory`/logs/NAME.log and, line by line, to `say`.
    """
    for number, phase in enumerate(phases, 1):
        record = read_phases(directory)
        if record.get(phase.name, {}).get("done"):
            continue
        say(f"[{number}/{len(phases)}] {phase.title}")
        log = directory / "logs" / f"{phase.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        code, cpu, stopped = _run(phase, log, say)
        used = record.setdefault(phase.name, {"seconds": 0.0, "cpu_seconds": 0.0, "starts": 0})
        used["seconds"] = round(used["seconds"] + time.monotonic() - began, 1)
        used["cpu_seconds"] = round(used["cpu_seconds"] + cpu, 1)
        used["starts"] += 1
        used["done"] = code == 0 and not stopped
        atomic_write(directory / RECORD, json.dumps(record, indent=1) + "\n", durable=True)
        if stopped:
            raise PhaseStopped(phase.name, stopped, directory)
        if code:
            raise PhaseFailed(phase.name, code, log)


def phases_exit_code(run: Callable[[], int | None], again: str = "the same command continues") -> int:
    """Call `run` and return its exit code; print how to go on after a phase that failed (its code) or was stopped (130
    after Ctrl-C, else 1).
    """
    try:
        return exit_code(run)
    except PhaseStopped as stopped:
        print(f"{stopped}; {again}", file=sys.stderr)
        return 130 if stopped.number == signal.SIGINT else 1
    except PhaseFailed as failure:
        first = "do first what the error above says, then " if failure.acts else ""
        print(f"error: {failure}; {first}{again}", file=sys.stderr)
        return failure.code if failure.code > 0 else 1


def _run(phase: Phase, log: Path, say: Callable[[str], None]) -> tuple[int, float, int]:
    """Return (exit code, CPU seconds with all its processes, the signal that stopped it or 0)."""
    signals = [0]
    children: list[subprocess.Popen[str]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        # in its own session, so that Ctrl-C does not reach it directly as well: `forward` passes it on
        child = subprocess.Popen(
            [sys.executable, *phase.argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        children.append(child)
        if signals[-1]:  # it came before there was a child to pass it on to
            child.send_signal(signals[-1])
        assert child.stdout is not None
        with log.open("a", encoding="utf-8") as file, child.stdout:
            for line in child.stdout:
                file.write(line)
                file.flush()
                say(f"  {line.rstrip()}")
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return child.returncode, usage.ru_utime + usage.ru_stime, signals[-1]
