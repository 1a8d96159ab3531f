"""What a benchmark is: settings that measure themselves, and a figure that comes with its baseline."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from protocol.settings import Settings

Say = Callable[[str], None]
"""Told of progress, a line at a time."""


@dataclass(frozen=True)
class BenchResult:
    """One figure and what it is compared with.

    value     in `unit`
    baseline  what the same machine did in the same run without us: `name` says what it is, the rest are its figures
    ratio     ours against the baseline, higher is better
    details   everything else that is worth keeping, by name
    """

    value: float
    unit: str
    baseline: dict[str, Any]
    ratio: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A goal of the project: the figure at `path` of the report (`ratio`, `load.p99_s`) is at least `at_least`.

    text  what that figure is, for people
    """

    path: str
    at_least: float
    text: str


class BenchSettings(Settings):
    """Base of every benchmark. Its fields are the flags of `foray bench`; importing it must import nothing heavy."""

    help: ClassVar[str] = ""
    """One line for `foray bench --help`."""
    quick: ClassVar[dict[str, Any]] = {}
    """Settings of `--quick`: everything runs, the figures mean little."""

    targets: ClassVar[tuple[Target, ...]] = ()
    """What is aimed at; the report says of each whether it was met."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Files and folders, from the repository's root, that the figure depends on: when one changes it is stale."""

    runner: ClassVar[str] = ""
    """"module:function" that takes the settings and `say`: what measures, where `measure` is not overridden."""

    def measure(self, say: Say) -> BenchResult:
        """Run ours and the baseline. Leaves no process behind, whatever happens."""
        result: BenchResult = resolve_name(self.runner)(self, say)
        return result


def machine_facts() -> dict[str, Any]:
    """Plain values for the report. `load_1m`: the load average of the last minute, as of now; `commit`: "" where the
    code is not a git checkout, with "-dirty" where it differs from the commit.
    """
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _commit(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    """Figures are made one after the other: those below docs, and their page, do not make the code dirty."""
    try:
        commit = _git("describe", "--always", "--exclude=*")
        return f"{commit}-dirty" if _git("diff", "--name-only", "HEAD", "--", ":/", ":(top,exclude)docs") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_seconds(pid: int) -> float:
    """Processor time that process `pid` has used so far, all its threads, user and system; in ticks of 10 ms."""
    # the command's name, in brackets, may hold blanks: count from behind it
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds(root: int) -> float:
    """Processor time of process `root` and all its living descendants, in seconds. Sessions do not matter: a node's
    engine leads another one."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def below(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return sum(spent for pid, spent in seconds.items() if below(pid))
