"""Encode and decode messages: a msgpack envelope {v, kind, body}.

`decode` checks in this order: size, msgpack and its number of values, envelope, kind, then the types of the body,
lengths and finiteness (pydantic). It raises `ProtocolError` with a `reason`, and no other exception.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from protocol import messages
from protocol.errors import CorruptMessage, InvalidBody, MessageTooLarge, ProtocolError, UnknownKind, UnsupportedVersion

SCHEMA_MAJOR, SCHEMA_MINOR = 1, 8
MAX_BYTES = 32 << 20
"""Largest message. 8 trajectories of 32k tokens take 8 * 32k * 8 B = 2 MiB."""
MAX_VALUES = 1_000_000
"""Maximum number of values in a message: array elements and map entries. One byte of msgpack may become a dict of 64
bytes in memory, or a string of 76; a turn with its observation takes about 40 values."""

KINDS: dict[str, type[messages.Message]] = {
    "task": messages.Task,
    "group": messages.TrajectoryGroup,
    "failed": messages.GroupFailed,
    "weights": messages.WeightUpdate,
    "view": messages.WeightView,
    "plan": messages.WeightPlan,
    "answer": messages.ViewAnswer,
    "engine": messages.EngineInfo,
    "metrics": messages.MetricsSnapshot,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
SMALL_BYTES = 1 << 20
LIMITS = dict.fromkeys(KINDS, SMALL_BYTES) | {"group": MAX_BYTES, "view": 8 << 20, "plan": 8 << 20}
"""Maximum size of each kind of message, in bytes. A plan names every tensor of the model."""

M = TypeVar("M", bound=messages.Message)
C = TypeVar("C", bound=Collection[Any])


def encode(message: messages.Message) -> bytes:
    """Encode a message. Raises MessageTooLarge if no reader would accept it."""
    name, body = _NAMES[type(message)], message.model_dump(mode="python")
    raw: bytes = msgpack.packb({"v": [SCHEMA_MAJOR, SCHEMA_MINOR], "kind": name, "body": body}, use_bin_type=True)
    _check_size(name, raw)
    if len(raw) > MAX_VALUES:  # every value takes at least one byte
        unpack(raw)
    return raw


def decode(raw: bytes, *, max_bytes: int = MAX_BYTES) -> messages.Message:
    """Decode a message. Raises only ProtocolError (MessageTooLarge, CorruptMessage, ...)."""
    if len(raw) > max_bytes:
        raise MessageTooLarge(f"{len(raw)} bytes exceed the limit of {max_bytes}")
    envelope = unpack(raw)
    if not isinstance(envelope, dict) or not {"v", "kind", "body"} <= envelope.keys():
        raise CorruptMessage("not an envelope with v, kind and body")
    version, name = envelope["v"], envelope["kind"]
    if not (isinstance(version, list) and len(version) == 2 and all(isinstance(n, int) for n in version)):
        raise CorruptMessage("the schema version is not a pair of integers")
    if version[0] != SCHEMA_MAJOR:
        raise UnsupportedVersion(f"schema {version[0]}.{version[1]}: this reader supports {SCHEMA_MAJOR}.x, upgrade it")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UnknownKind(f"unknown kind {str(name)[:64]!r}")
    _check_size(name, raw)
    try:
        return kind.model_validate(envelope["body"])
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidBody(f"{name}.{where}: {first['msg']} ({error.error_count()} errors)") from None
    except (RecursionError, OverflowError, ValueError) as error:
        raise InvalidBody(f"{name}: {type(error).__name__}: {str(error)[:200]}") from None


def decode_as(kind: type[M], raw: bytes) -> M:
    """Decode a message of `kind`. Raises ProtocolError."""
    message = decode(raw, max_bytes=LIMITS[_NAMES[kind]])
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


def pack(value: Any) -> bytes:
    """Encode plain values (a stream header)."""
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


def number_of(raw: bytes) -> int:
    """Parse a decimal count from a Redis field. Return 0 for anything else, or if it has too many digits."""
    return int(raw) if raw.isdigit() and len(raw) <= 15 else 0


def checksum(raw: bytes) -> int:
    """Return the CRC-32 of a message, as stored in its stream header."""
    return zlib.crc32(raw)
