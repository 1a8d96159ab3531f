"""The exceptions of all packages.

ForayError
  ProtocolError            invalid message: it goes to the dead-letter stream, and no process stops
    MessageTooLarge  CorruptMessage  UnknownKind  UnsupportedVersion  InvalidBody
  Fenced                   another learner took the lease
  StateLost                Redis lost its streams
  RedisUnavailable ...     see `protocol.runtime.redis.errors`
  UserError                the user must act: what happened, why and what to do, printed without a traceback
    NoSignal               a run from which nothing can be learned
"""

from __future__ import annotations

from protocol.redaction import for_terminal


class ForayError(Exception):
    """Base of every error that Foray raises intentionally. `exit_code`: of a process that ends with it."""

    exit_code = 1

    def render(self) -> str:
        """Return the message as printed: secrets redacted and control characters escaped."""
        return for_terminal(f"error: {self}")


class ProtocolError(ForayError):
    """Invalid message bytes. `reason` is a short word for metrics and the dead-letter stream."""

    reason = "protocol"


class MessageTooLarge(ProtocolError):
    """The message exceeds the size limit. Raised before decoding."""

    reason = "too_large"


class CorruptMessage(ProtocolError):
    """Not msgpack, truncated, nested too deeply, or its checksum does not match."""

    reason = "corrupt"


class UnknownKind(ProtocolError):
    """A valid envelope of an unknown kind."""

    reason = "unknown_kind"


class UnsupportedVersion(ProtocolError):
    """A schema major version that this process cannot read: upgrade the reader."""

    reason = "unsupported_version"


class InvalidBody(ProtocolError):
    """The envelope is valid, but a field has the wrong type, length or dtype, or a number that is not finite."""

    reason = "invalid_body"


class Fenced(ForayError):
    """Another learner took the lease: this one must stop writing immediately (exit code 75)."""

    exit_code = 75


class StateLost(ForayError):
    """Redis lost its streams (wiped, failed over, restarted empty): the learner re-creates them and reissues tasks."""


class UserError(ForayError):
    """An error that the user must act on.

    what  what happened, in one sentence
    why   why it matters or why it happened ("" when it is obvious)
    todo  what to do, preferably a command
    """

    exit_code = 2

    def __init__(self, what: str, why: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.todo = what, why, todo

    def render(self) -> str:
        """Return the message as printed: one to three lines, secrets redacted and control characters escaped."""
        lines = [f"error: {self.what}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.todo:
            lines.append(f"   do: {self.todo}")
        return for_terminal("\n".join(lines))


class NoSignal(UserError):
    """Nothing can be learned from what arrives; the state is kept. No launcher restarts the run (exit code 65)."""

    exit_code = 65
