"""The small header `h` of each entry in the trajectory stream.

Rank 0 plans a batch from headers alone (lengths, rewards, versions). Each rank then reads only its own bodies.
"""

from __future__ import annotations

from protocol.arrays import Count, Message, Name, Number
from protocol.codec import checksum, encode, read_body, refusing, write_body
from protocol.errors import CorruptMessage
from protocol.messages import GroupFailed, TrajectoryGroup
from protocol.versions import PolicyVersion

MAX_HEADER_BYTES = 1 << 20


class EntryHeader(Message, frozen=True, kw_only=True):
    """Metadata of an entry that the learner needs before it reads the body.

    lengths   tokens of each trajectory, prompt and observations included
    sampled   tokens the policy sampled, of each trajectory
    rewards   reward of each trajectory
    votes     whether each trajectory counts in the group's baseline
    first, last  oldest and newest version (epoch, step); (0, 0) if nothing was sampled
    crc       CRC-32 of the body
    """

    kind: Name
    run: Name
    seq: Count
    attempt: Count
    num_bytes: Count
    crc: Count
    lengths: tuple[Count, ...] = ()
    sampled: tuple[Count, ...] = ()
    rewards: tuple[Number, ...] = ()
    votes: tuple[bool, ...] = ()
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)

    @property
    def first_version(self) -> PolicyVersion:
        return PolicyVersion(*self.first)


def seal(message: TrajectoryGroup | GroupFailed) -> tuple[bytes, bytes]:
    """Return (header bytes, body bytes) of an entry for the trajectory stream."""
    body = encode(message)
    if isinstance(message, GroupFailed):
        header = EntryHeader(
            kind="failed",
            run=message.run,
            seq=message.seq,
            attempt=message.attempt,
            num_bytes=len(body),
            crc=checksum(body),
        )
    else:
        versions = message.versions()
        header = EntryHeader(
            kind="group",
            run=message.run,
            seq=message.seq,
            attempt=message.attempt,
            num_bytes=len(body),
            crc=checksum(body),
            lengths=tuple(sum(len(s.ids) for s in t.segments) for t in message.trajectories),
            sampled=tuple(t.num_sampled for t in message.trajectories),
            rewards=tuple(t.reward for t in message.trajectories),
            votes=tuple(t.status.is_valid for t in message.trajectories),
            first=min(versions, default=(0, 0)),
            last=max(versions, default=(0, 0)),
        )
    return write_body(header), body


def read_header(raw: bytes) -> EntryHeader:
    """Decode a header. Raises CorruptMessage or InvalidBody."""
    if len(raw) > MAX_HEADER_BYTES:
        raise CorruptMessage(f"a header of {len(raw)} bytes")
    return refusing(raw, lambda raw: read_body(EntryHeader, raw, "header"))


def check_body(header: EntryHeader, body: bytes) -> None:
    """Raise CorruptMessage if the checksum of `body` does not match `header`."""
    if len(body) != header.num_bytes or checksum(body) != header.crc:
        raise CorruptMessage(f"seq {header.seq}: the checksum of the body does not match its header")
