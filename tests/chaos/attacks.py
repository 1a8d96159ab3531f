"""All kinds of faults, by name."""

from __future__ import annotations

from faults import Fault
from faults_data import Burst, CorruptCheckpoint, CorruptGroup, CorruptTask, CorruptWeights, PublishTwice
from faults_host import ClockJumps, NoDescriptors, NoSpace
from faults_learner import DiskFull, SecondLearner, Takeover, Woken
from faults_network import CutInTheMiddle, CutReply, Down, Partition, Slow
from faults_process import Kill, Stop, Term
from faults_redis import Flush, RedisFull, Wipe
from faults_resume import DeadlyBatch, KillInCheckpoint, SecondInResume
from faults_standstill import BlockedLoop, Standstill, Suspended

ALL: tuple[type[Fault], ...] = (
    *(Kill, Stop, Term),
    *(Standstill, Suspended, BlockedLoop),
    *(ClockJumps, NoDescriptors, NoSpace),
    *(Partition, Down, Slow, CutReply, CutInTheMiddle),
    *(RedisFull, Flush, Wipe),
    *(DiskFull, SecondLearner, Takeover, Woken),
    *(KillInCheckpoint, SecondInResume, DeadlyBatch),
    *(CorruptGroup, CorruptTask, CorruptWeights, CorruptCheckpoint, PublishTwice, Burst),
)
KINDS: dict[str, type[Fault]] = {kind.name: kind for kind in ALL}
