"""What a benchmark is: settings that measure themselves, and a figure that comes with its baseline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from protocol.settings import Settings

Say = Callable[[str], None]
"""Told of progress, a line at a time."""


@dataclass(frozen=True)
class Measured:
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


class BenchSettings(Settings, ABC):
    """Base of every benchmark. Its fields are the flags of `foray bench`; importing it must import nothing heavy."""

    help: ClassVar[str] = ""
    """One line for `foray bench --help`."""
    quick: ClassVar[dict[str, Any]] = {}
    """Settings of `--quick`: everything runs, the figures mean little."""

    targets: ClassVar[tuple[Target, ...]] = ()
    """What is aimed at; the report says of each whether it was met."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Files and folders, from the repository's root, that the figure depends on: when one changes it is stale."""

    @abstractmethod
    def measure(self, say: Say) -> Measured:
        """Run ours and the baseline. Leaves no process behind, whatever happens."""
