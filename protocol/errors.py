"""The exceptions of all packages.

ForayError
  ProtocolError            invalid message: it goes to the dead-letter stream, and no process stops
    MessageTooLarge  CorruptMessage  UnknownKind  UnsupportedVersion  InvalidBody
  Fenced                   another learner took the lease
  StateLost                Redis lost its streams
  RedisUnavailable ...     see `protocol.runtime.redis.errors`
  UserError                needs a person: says what happened, why and what to do, printed without a traceback
"""

from __future__ import annotations

from protocol.redaction import redact


class ForayError(Exception):
    """Base of every error that Foray raises on purpose."""


class ProtocolError(ForayError):
    """Bytes that are no valid message. `reason` is a short word for metrics and the dead-letter stream."""

    reason = "protocol"


class MessageTooLarge(ProtocolError):
    """More bytes than the limit; raised before anything is decoded."""

    reason = "too_large"


class CorruptMessage(ProtocolError):
    """Not msgpack, truncated, nested too deep, or its checksum does not fit."""

    reason = "corrupt"


class UnknownKind(ProtocolError):
    """A well-formed envelope of a kind that this version does not know."""

    reason = "unknown_kind"


class UnsupportedVersion(ProtocolError):
    """A schema major that this version cannot read: upgrade the reader."""

    reason = "unsupported_version"


class InvalidBody(ProtocolError):
    """The envelope is sound but a field has the wrong type, length, dtype or a non-finite number."""

    reason = "invalid_body"


class Fenced(ForayError):
    """Another learner took the lease: this one must stop writing at once (exit code 75)."""


class StateLost(ForayError):
    """Redis lost its streams (wiped, failed over, restarted empty): the learner re-creates them and reissues."""


class UserError(ForayError):
    """An error that needs a person.

    what  what happened, in one sentence
    why   why it matters or why it happened ("" when it is obvious)
    todo  what to do about it, preferably a command
    """

    def __init__(self, what: str, why: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.todo = what, why, todo

    def render(self) -> str:
        """Return the message as it is printed: one to three lines, secrets cut out."""
        lines = [f"error: {self.what}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.todo:
            lines.append(f"   do: {self.todo}")
        return redact("\n".join(lines))
