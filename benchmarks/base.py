"""Base of the benchmarks: settings that run the measurement, and a figure with its baseline."""

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
"""Receives progress lines."""


@dataclass(frozen=True)
class BenchResult:
    """One figure and its baseline.

    value     in `unit`
    baseline  the same work without Foray on the same machine in the same run: `name`, and its figures
    ratio     Foray relative to the baseline, higher is better
    details   further figures by name
    """

    value: float
    unit: str
    baseline: dict[str, Any]
    ratio: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A target: the figure at `path` in the report (`ratio`, `load.p99_s`) is at least `at_least`.

    text  description of that figure
    """

    path: str
    at_least: float
    text: str


class BenchSettings(Settings):
    """Base of every benchmark. Its fields are the flags of `foray bench`; keep imports of its module light."""

    help: ClassVar[str] = ""
    """One line for `foray bench --help`."""
    quick: ClassVar[dict[str, Any]] = {}
    """Settings of `--quick`: a short run of all parts, whose figures are not meaningful."""

    targets: ClassVar[tuple[Target, ...]] = ()
    """Targets; the report shows whether each is met."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Files and folders, from the repository's root, that the figure depends on: a change makes it stale."""

    runner: ClassVar[str] = ""
    """"module:function" that takes the settings and `say`: what measures, where `measure` is not overridden."""

    def measure(self, say: Say) -> BenchResult:
        """Run Foray and the baseline. Leaves no process behind, even on errors."""
        result: BenchResult = resolve_name(self.runner)(self, say)
        return result


def machine_facts() -> dict[str, Any]:
    """Return facts for the report. `load_1m`: load average of the last minute; `commit`: "" outside a git checkout,
    with "-dirty" if the code differs from the commit.
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
    """Return the commit. Changes to figures and their page below docs do not make the code dirty."""
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
    """Return the CPU time of process `pid`, all threads, user and system, with a resolution of 10 ms."""
    # the command's name, in brackets, may contain spaces: count from its end
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds(root: int) -> float:
    """Return the CPU time of process `root` and its living descendants, in seconds, in any session: the engine of a
    node leads its own."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def below(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return sum(spent for pid, spent in seconds.items() if below(pid))
