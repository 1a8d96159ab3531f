"""Decode one entry of the trajectory stream: header first, then the body's checksum, then the body."""

from __future__ import annotations

from dataclasses import dataclass

from learner.delivery.store import Fields
from protocol.codec import decode, number_of
from protocol.errors import CorruptMessage, ForayError, InvalidBody, ProtocolError
from protocol.header import EntryHeader, check_body, read_header
from protocol.messages import GroupFailed, TrajectoryGroup


@dataclass(frozen=True)
class StreamEntry:
    """A readable entry: stream id, header, body as a message, and the raw bytes of both (for the journal)."""

    id: bytes
    header: EntryHeader
    message: TrajectoryGroup | GroupFailed
    raw_header: bytes
    raw_body: bytes

    counted: int = 0
    """Tokens that Redis counted on publication; 0 if the rollout server did not report them."""

    @property
    def seq(self) -> int:
        return self.header.seq

    @property
    def published_s(self) -> float:
        """Return the publication time, in seconds on Redis' clock."""
        return int(self.id.partition(b"-")[0]) / 1000

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the policy sampled for it."""
        return sampled_in(self.message)


class BadEntry(ForayError):
    """An unusable entry. `seq` is 0 if unknown, `attempt` at least 1."""

    def __init__(self, reason: str, detail: str, seq: int, attempt: int = 1) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.seq, self.attempt = reason, detail, seq, attempt


def read_seq(fields: Fields) -> int:
    """Return the seq in the entry's plain field, 0 if missing. The publishing function wrote it, not the body."""
    return number_of(fields.get(b"seq", b""))


def read_tokens(fields: Fields) -> int:
    """Return the tokens in the entry's plain field `t`, written by the publishing function; 0 if missing."""
    return number_of(fields.get(b"t", b""))


def sampled_in(message: TrajectoryGroup | GroupFailed) -> int:
    """Return the number of tokens that the policy sampled for `message`."""
    if isinstance(message, GroupFailed):
        return message.generated_tokens
    return sum(trajectory.num_sampled for trajectory in message.trajectories)


def read_entry(id_: bytes, fields: Fields, run: str) -> StreamEntry:
    """Return the entry. Raises only BadEntry, for any input."""
    seq, attempt = read_seq(fields), 1
    try:
        raw_header, raw_body = fields[b"h"], fields[b"b"]
        header = read_header(raw_header)
        attempt = max(1, header.attempt)
        if header.run != run:
            raise BadEntry("foreign_run", f"it belongs to run {header.run!r}", seq, attempt)
        if not seq or header.seq != seq:
            raise InvalidBody(f"the header says seq {header.seq}, the entry {seq}")
        check_body(header, raw_body)
        message = decode(raw_body)
        if not isinstance(message, TrajectoryGroup | GroupFailed):
            raise InvalidBody(f"unexpected {type(message).__name__} in the trajectory stream")
        if (message.run, message.seq) != (run, seq):
            raise InvalidBody(f"the body is of run {message.run!r}, seq {message.seq}")
        counted, tokens = read_tokens(fields), sampled_in(message)
        if counted not in (0, tokens) or (isinstance(message, TrajectoryGroup) and sum(header.sampled) != tokens):
            raise InvalidBody(
                f"{tokens} tokens in the body, {sum(header.sampled)} in the header, {counted} counted by Redis"
            )
    except KeyError as error:
        raise BadEntry(CorruptMessage.reason, f"missing field {error}", seq, attempt) from None
    except ProtocolError as error:
        raise BadEntry(error.reason, str(error), seq, attempt) from None
    return StreamEntry(id_, header, message, raw_header, raw_body, counted)
