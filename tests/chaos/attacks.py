"""All kinds of faults, by name."""

from __future__ import annotations

from faults import Fault
from faults_data import CorruptCheckpoint, CorruptGroup, CorruptTask, CorruptWeights, PublishTwice
from faults_learner import DiskFull, SecondLearner, Takeover, Woken
from faults_network import CutInTheMiddle, CutReply, Down, Partition, Slow
from faults_process import Kill, Stop, Term
from faults_redis import Flush, RedisFull, Wipe

ALL: tuple[type[Fault], ...] = (
    *(Kill, Stop, Term),
    *(Partition, Down, Slow, CutReply, CutInTheMiddle),
    *(RedisFull, Flush, Wipe),
    *(DiskFull, SecondLearner, Takeover, Woken),
    *(CorruptGroup, CorruptTask, CorruptWeights, CorruptCheckpoint, PublishTwice),
)
KINDS: dict[str, type[Fault]] = {kind.name: kind for kind in ALL}
