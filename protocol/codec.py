"""Encode and decode messages: a msgpack envelope {v, kind, body}.

`decode` checks in this order: size, envelope, kind, then the types and limits of the body (msgspec), then what its
fields must have in common and the number of values. It raises `ProtocolError` with a `reason`, and no other exception.
Bytes that it refuses, and large ones, are also read as plain values: what is not msgpack has its own reason. A field of
an unknown name is skipped unread, whatever its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, TypeVar

import msgpack
import msgspec
from isal import isal_zlib

from protocol import messages
from protocol.arrays import Message, read_array, write_array
from protocol.errors import CorruptMessage, InvalidBody, MessageTooLarge, ProtocolError, UnknownKind, UnsupportedVersion
from protocol.weights import WeightPlan

SCHEMA_MAJOR, SCHEMA_MINOR = 1, 8
MAX_BYTES = 32 << 20
"""Largest message. 8 trajectories of 32k tokens take 8 * 32k * 8 B = 2 MiB."""
MAX_VALUES = 1_000_000
"""Maximum number of values in a message: array elements and map entries. One byte of msgpack may become a dict of 64
bytes in memory, or a string of 76; a turn with its observation takes about 40 values."""
COUNTED_BYTES = 2 << 20
"""The values of larger messages are counted before they are decoded into a message, those of smaller ones after it."""

KINDS: dict[str, type[Message]] = {
    "task": messages.Task,
    "group": messages.TrajectoryGroup,
    "failed": messages.GroupFailed,
    "weights": messages.WeightUpdate,
    "view": messages.WeightView,
    "plan": WeightPlan,
    "answer": messages.ViewAnswer,
    "engine": messages.EngineInfo,
    "metrics": messages.MetricsSnapshot,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
SMALL_BYTES = 1 << 20
LIMITS = dict.fromkeys(KINDS, SMALL_BYTES) | {"group": MAX_BYTES, "view": 8 << 20, "plan": 8 << 20}
"""Maximum size of each kind of message, in bytes. A plan names every tensor of the model."""

M = TypeVar("M", bound=Message)
C = TypeVar("C", bound=Collection[Any])


class _Envelope(msgspec.Struct):
    v: tuple[int, int]
    kind: msgspec.Raw
    body: msgspec.Raw


_read_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_write = msgspec.msgpack.Encoder(enc_hook=write_array).encode


@cache
def _reader(kind: type[M]) -> Callable[[bytes], M]:
    return msgspec.msgpack.Decoder(kind, dec_hook=read_array).decode


def encode(message: Message) -> bytes:
    """Encode a message. Raises MessageTooLarge if no reader would accept it."""
    name = _NAMES[type(message)]
    raw = _write({"v": (SCHEMA_MAJOR, SCHEMA_MINOR), "kind": name, "body": message})
    _check_size(name, raw)
    _check_values(raw, message)
    return raw


def decode(raw: bytes, *, max_bytes: int = MAX_BYTES) -> Message:
    """Decode a message. Raises only ProtocolError (MessageTooLarge, CorruptMessage, ...)."""
    if len(raw) > max_bytes:
        raise MessageTooLarge(f"{len(raw)} bytes exceed the limit of {max_bytes}")
    if len(raw) > COUNTED_BYTES:
        unpack(raw)
    return refusing(raw, _decode)


def refusing(raw: bytes, read: Callable[[bytes], M]) -> M:
    """Return `read(raw)`. Raises its ProtocolError, or that of `unpack` for bytes that it would refuse."""
    try:
        return read(raw)
    except ProtocolError:
        unpack(raw)
        raise


def _decode(raw: bytes) -> Message:
    try:
        envelope = _read_envelope(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptMessage(f"not an envelope with a schema version, kind and body: {str(error)[:200]}") from None
    (major, minor), name = envelope.v, unpack(bytes(envelope.kind))
    if major != SCHEMA_MAJOR:
        raise UnsupportedVersion(f"schema {major}.{minor}: this reader supports {SCHEMA_MAJOR}.x, upgrade it")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UnknownKind(f"unknown kind {str(name)[:64]!r}")
    _check_size(name, raw)
    message = read_body(kind, envelope.body, name)
    if len(raw) <= COUNTED_BYTES:
        _check_values(raw, message)
    return message


def write_body(message: Message) -> bytes:
    """Encode a message without an envelope (a stream header)."""
    return _write(message)


def read_body(kind: type[M], raw: bytes | msgspec.Raw, name: str) -> M:
    """Decode a message without an envelope. Raises InvalidBody, whatever is wrong."""
    try:
        message: M = _reader(kind)(raw)
        message.check()
        return message
    except (ValueError, RecursionError, OverflowError) as error:
        raise InvalidBody(f"{name}: {str(error)[:200]}") from None


def decode_as(kind: type[M], raw: bytes) -> M:
    """Decode a message of `kind`. Raises ProtocolError."""
    message = decode(raw, max_bytes=LIMITS[_NAMES[kind]])
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


def pack(value: Any) -> bytes:
    """Encode plain values."""
    raw: bytes = msgpack.packb(value, use_bin_type=True)
    return raw


def unpack(raw: bytes) -> Any:
    """Decode plain values. Raises CorruptMessage, or MessageTooLarge for more than MAX_VALUES."""
    left = MAX_VALUES

    def counted(value: C) -> C:
        nonlocal left
        left -= 1 + len(value)
        if left < 0:
            raise MessageTooLarge(f"more than {MAX_VALUES} values in a message of {len(raw)} bytes")
        return value

    # a byte is at most two of them, an element that is an empty container: short messages need no counting
    hook = counted if 2 * len(raw) > MAX_VALUES else None
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            object_hook=hook,
            list_hook=hook,
            # msgpack allocates an array when it reads its length, and every element takes at least one byte
            max_array_len=min(65536, len(raw)),
            max_map_len=65536,
            max_bin_len=len(raw),
            max_str_len=len(raw),
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise CorruptMessage(f"not msgpack: {type(error).__name__}: {str(error)[:200]}") from None


def _check_size(name: str, raw: bytes) -> None:
    if len(raw) > LIMITS[name]:
        raise MessageTooLarge(f"a {name} of {len(raw)} bytes exceeds the limit of {LIMITS[name]}")


def _check_values(raw: bytes, message: Message) -> None:
    """Raise MessageTooLarge for more than MAX_VALUES values. They are counted only where the bytes allow as many."""
    left = len(raw)
    if 2 * left > MAX_VALUES and isinstance(message, messages.TrajectoryGroup):
        left -= sum(s.ids.nbytes + s.logprobs.nbytes for t in message.trajectories for s in t.segments)
    if 2 * left > MAX_VALUES:
        unpack(raw)


def number_of(raw: bytes) -> int:
    """Parse a decimal count from a Redis field. Return 0 for anything else, or if it has too many digits."""
    return int(raw) if raw.isdigit() and len(raw) <= 15 else 0


def checksum(raw: bytes) -> int:
    """Return the CRC-32 of a message, as stored in its stream header."""
    return isal_zlib.crc32(raw)
