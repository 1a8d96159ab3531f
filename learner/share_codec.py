"""What rank 0 hands to another rank, as bytes: frozen dataclasses of arrays, numbers, text and tuples, without pickle.

The receiver says which dataclass it expects. Fields travel in their order, and every value must be what the field's
annotation says: a rank that runs other code than rank 0 is found out here, not in the middle of a collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import numpy.typing as npt

T = TypeVar("T")
SCALARS = (bool, int, float, str)


def encode(value: Any) -> bytes:
    """The dataclass `value` as bytes. Raises TypeError where a field is not what it is declared to be."""
    raw: bytes = msgpack.packb(_plain(value, type(value), type(value).__name__), use_bin_type=True)
    return raw


def decode(raw: bytes, kind: type[T]) -> T:
    """The `kind` in `raw`. Raises TypeError or ValueError when it holds something else. Arrays can be written to."""
    value: T = _built(msgpack.unpackb(raw, use_list=True, strict_map_key=False), kind, kind.__name__)
    return value


@cache
def _declared(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in fields(kind)]


def _plain(value: Any, kind: Any, where: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        _expect(type(value) is kind, where, kind, value)
        return [_plain(getattr(value, name), of, f"{where}.{name}") for name, of in _declared(kind)]
    if kind in SCALARS:
        _expect(type(value) is kind, where, kind, value)
        return value
    origin, of = get_origin(kind), get_args(kind)
    if origin is np.ndarray:
        _expect(isinstance(value, np.ndarray) and value.dtype == _dtype(kind), where, kind, value)
        return [list(value.shape), np.ascontiguousarray(value).tobytes()]
    if origin is tuple:
        _expect(isinstance(value, tuple), where, kind, value)
        return [_plain(v, of[0], f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, Mapping), where, kind, value)
        return {_plain(k, of[0], where): _plain(v, of[1], f"{where}[{k!r}]") for k, v in value.items()}
    raise TypeError(f"{where}: no way to send a {kind}")


def _built(raw: Any, kind: Any, where: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        declared = _declared(kind)
        _expect(isinstance(raw, list) and len(raw) == len(declared), where, kind, raw)
        values = {name: _built(part, of, f"{where}.{name}") for part, (name, of) in zip(raw, declared, strict=True)}
        return kind(**values)
    if kind in SCALARS:
        _expect(type(raw) is kind, where, kind, raw)
        return raw
    origin, of = get_origin(kind), get_args(kind)
    if origin is np.ndarray:
        _expect(isinstance(raw, list) and len(raw) == 2 and isinstance(raw[1], bytes), where, kind, raw)
        array: npt.NDArray[Any] = np.frombuffer(bytearray(raw[1]), _dtype(kind)).reshape(raw[0])
        return array
    if origin is tuple:
        _expect(isinstance(raw, list), where, kind, raw)
        return tuple(_built(part, of[0], f"{where}[{i}]") for i, part in enumerate(raw))
    if origin is dict:
        _expect(isinstance(raw, dict), where, kind, raw)
        return {_built(k, of[0], where): _built(v, of[1], f"{where}[{k!r}]") for k, v in raw.items()}
    raise TypeError(f"{where}: no way to receive a {kind}")


def _dtype(kind: Any) -> np.dtype[Any]:
    """Of an annotation like NDArray[np.float32]."""
    found: np.dtype[Any] = np.dtype(get_args(get_args(kind)[1])[0])
    return found


def _expect(holds: bool, where: str, kind: Any, value: Any) -> None:
    if not holds:
        raise TypeError(f"{where} should be {getattr(kind, '__name__', kind)} and is {type(value).__name__}")
