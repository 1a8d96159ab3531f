"""Upper bound of `issued` on disk, independent of Redis.

Written ahead, as databases cache a range of a sequence: a number is durable before any task up to it is issued, and is
AHEAD further, so that writes are rare. Each epoch has its own file next to the one that claims it: a fenced learner
that does not know it yet cannot lower its successor's bound.
"""

from __future__ import annotations

from pathlib import Path

from protocol.codec import number_of
from protocol.runtime.files import atomic_write, entries

AHEAD = 1000
SUFFIX = ".issued"


class IssueReservation:
    """The files in `epochs_dir` (`learner.delivery.lease`)."""

    def __init__(self, epochs_dir: Path) -> None:
        self._folder = epochs_dir
        self._reserved = 0

    def has_epochs(self) -> bool:
        """Return whether a learner has ever begun an epoch from this directory."""
        return bool(entries(self._folder, "e*"))

    def highest(self) -> int | None:
        """Return the bound on the seqs issued from this directory; None if an older Foray wrote none."""
        files = entries(self._folder, f"e*{SUFFIX}")
        return max((number_of(path.read_bytes().strip()) for path in files), default=None)

    def reserve(self, seq: int, epoch: int) -> None:
        """Reserve tasks up to `seq` for the learner of `epoch`. Raises OSError if the write fails."""
        if seq > self._reserved:
            atomic_write(self._folder / f"e{epoch}{SUFFIX}", f"{seq + AHEAD}\n", durable=True)
            self._reserved = seq + AHEAD
