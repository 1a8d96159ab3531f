"""Batches from a journal: as in the run, or newly formed. The position in them is stored in checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from learner.checkpoint.journal import BatchConditions, FrameLocation, all_locations, frames, rolled_back
from learner.data.filter import GroupFilter
from protocol.codec import decode_as
from protocol.errors import UserError
from protocol.messages import TrajectoryGroup
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replayed:
    """Groups and other inputs of one step.

    mixed     groups of earlier steps that the run mixed into this batch
    more_lag  steps by which a token may exceed max_lag
    """

    groups: list[TrajectoryGroup]
    conditions: BatchConditions
    mixed: tuple[TrajectoryGroup, ...] = ()
    more_lag: int = 0


class Batches(Protocol):
    """Iterates over batches. `position` is stored in checkpoints and can be set."""

    position: int

    @property
    def total(self) -> int:
        """Return the maximum number of steps."""

    def next(self) -> Replayed | None:
        """Return the next batch, or None at the end."""


class Recording:
    """The surviving groups of a journal in training order, without steps that a crash rolled back."""

    def __init__(self, folder: Path) -> None:
        everything = all_locations(folder)
        lineage = _lineage(everything)
        self.locations = [p for p in everything if not rolled_back(p, lineage)]
        if not self.locations:
            raise UserError(
                f"no journal found in {folder}",
                why="the learner writes it to `journal` in its run directory, unless learner.journal is false",
                todo="pass --replay a run directory, or the folder with groups-NNNNN.bin",
            )
        if self.locations[0].step > 1:
            log.warning("the journal begins at step %d: steps before it were dropped", self.locations[0].step)

    @property
    def fingerprint(self) -> str:
        """Return the sha256 (hex) of the groups' identities and checksums."""
        digest = hashlib.sha256()
        for location in self.locations:
            digest.update(f"{location.epoch} {location.step} {location.seq} {location.crc}\n".encode())
        return digest.hexdigest()


class RecordedBatches:
    """The original batches of the run."""

    def __init__(self, recording: Recording, passes: int) -> None:
        by_step = itertools.groupby(recording.locations, key=lambda location: (location.epoch, location.step))
        self._batches = [list(locations) for _, locations in by_step]
        self._find = {(location.step, location.seq): location for location in recording.locations}
        self._passes = passes
        self.position = 0

    @property
    def total(self) -> int:
        return len(self._batches) * self._passes

    def next(self) -> Replayed | None:
        while self.position < self.total:
            locations = self._batches[self.position % len(self._batches)]
            self.position += 1
            batch = self._read(locations)
            if batch is not None:
                return batch
            log.warning("skipping step %d of the journal: it is incomplete", locations[0].step)
        return None

    def _read(self, locations: Sequence[FrameLocation]) -> Replayed | None:
        found = list(_groups(locations))
        conditions = found[0][2] if found else None
        if conditions is None or len(found) != conditions.size:
            return None
        wanted = [self._find[pair] for pair in conditions.mixed if pair in self._find]
        mixed = tuple(group for _, group, _ in _groups(wanted))
        return Replayed([g for _, g, _ in found], conditions, mixed) if len(mixed) == len(conditions.mixed) else None


class RegroupedBatches:
    """New batches of `size` groups, in the run's order, without those that `group_filter` rejects.

    The remainder at the end of a pass is not trained. Lag is relative to the newest step in which one of the groups was
    trained, and may be larger by the difference of these steps: no token is masked that was not masked in the run.
    """

    def __init__(self, recording: Recording, passes: int, size: int, group_filter: GroupFilter) -> None:
        self._locations, self._passes, self._size, self._filter = recording.locations, passes, size, group_filter
        if len(self._locations) < size:
            raise UserError(f"the journal has {len(self._locations)} groups, fewer than run.groups_per_step ({size})")
        self._index = {location: at for at, location in enumerate(self._locations)}
        self.position = 0

    @property
    def total(self) -> int:
        return len(self._locations) // self._size * self._passes

    def next(self) -> Replayed | None:
        count = len(self._locations)
        while self.position < count * self._passes:
            passed, begin = divmod(self.position, count)
            chosen: list[tuple[TrajectoryGroup, BatchConditions]] = []
            for location, group, conditions in _groups(self._locations[begin:]):
                self.position = passed * count + self._index[location] + 1
                if not self._filter.refuses(group):
                    chosen.append((group, conditions))
                if len(chosen) == self._size:
                    return self._together(chosen)
            self.position = (passed + 1) * count
        return None

    def _together(self, chosen: list[tuple[TrajectoryGroup, BatchConditions]]) -> Replayed:
        all_conditions = [conditions for _, conditions in chosen]
        temperatures = {conditions.temperature for conditions in all_conditions}
        if len(temperatures) > 1:
            raise UserError(
                f"groups of one batch were sampled at different temperatures: {sorted(temperatures)}",
                why="the learner divides the logits of a batch by a single temperature",
                todo="replay the original batches, without --rebatch",
            )
        steps = [conditions.now_step for conditions in all_conditions]
        newest = max(all_conditions, key=lambda conditions: conditions.now_step)
        conditions = BatchConditions(max(steps), newest.lineage, newest.temperature, len(chosen))
        return Replayed([group for group, _ in chosen], conditions, more_lag=max(steps) - min(steps))


def _groups(locations: Sequence[FrameLocation]) -> Iterator[tuple[FrameLocation, TrajectoryGroup, BatchConditions]]:
    for location, frame in frames(locations):
        group = decode_as(TrajectoryGroup, frame["b"])
        yield location, group, _conditions(frame, location, group, len(locations))


def _conditions(frame: dict[str, Any], location: FrameLocation, group: TrajectoryGroup, size: int) -> BatchConditions:
    if "batch" in frame:
        return BatchConditions.from_plain(frame["batch"])
    # A journal of an older version without conditions: step n started from the policy of step n - 1.
    return BatchConditions(location.step - 1, (), group.sampling.temperature, size)


def _lineage(locations: Sequence[FrameLocation]) -> list[PolicyVersion]:
    """Return the first version of each learner start that trained: the step before its first journalled one."""
    firsts: dict[int, int] = {}
    for location in locations:
        firsts.setdefault(location.epoch, location.step - 1)
    return [PolicyVersion(epoch, step) for epoch, step in firsts.items()]
