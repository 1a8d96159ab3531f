"""The base of wire messages and the types of their fields. Arrays are raw little-endian bytes of a fixed dtype.

A list of ints takes 17 times as long to encode, and five bytes of input may become hundreds of bytes of memory.
Raw bytes cannot grow that way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

MAX_NAME, MAX_TEXT, MAX_ITEMS = 256, 1 << 20, 65536
"""Maximum characters of a name and of a text, and maximum elements of a list whose field sets no other limit."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
LARGEST = float(np.finfo(np.float64).max)
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]

Int32Array = npt.NDArray[np.int32]
"""[n] int32, little-endian on the wire."""

Float32Array = npt.NDArray[np.float32]
"""[n] float32, little-endian on the wire."""

_DTYPES = {Int32Array: np.dtype("<i4"), Float32Array: np.dtype("<f4")}
_WRITTEN = tuple(_DTYPES.values())


def read_array(kind: Any, value: Any) -> npt.NDArray[Any]:
    """Return `value`, bytes of the wire, an array or numbers, as a read-only array of the field type `kind`.

    Raises ValueError. An array is copied, unless it is read-only already.
    """
    dtype = _DTYPES[kind]
    if type(value) is bytes:
        return np.frombuffer(value, dtype)
    if not isinstance(value, np.ndarray | list | tuple):
        raise ValueError(f"expected bytes of {dtype.name}, not {type(value).__name__}")
    given: npt.NDArray[Any] = np.asarray(value)
    if given.ndim != 1:
        raise ValueError(f"expected one dimension, not {given.ndim}")
    if given.dtype == dtype and given.flags.c_contiguous and not given.flags.writeable:
        return given
    if given.size and not np.can_cast(given.dtype, dtype, "same_kind"):
        raise ValueError(f"expected {dtype.name}, not {given.dtype.name}")
    array = given.astype(dtype)
    if dtype.kind == "i" and not np.array_equal(array, given):
        raise ValueError(f"contains a number outside the range of {dtype.name}")
    array.flags.writeable = False
    return array


def write_array(value: Any) -> memoryview:
    """Return the bytes of an array, which msgspec cannot write itself. Raises TypeError for anything else."""
    if not isinstance(value, np.ndarray) or value.dtype not in _WRITTEN:
        raise TypeError(f"a message cannot hold a {getattr(value, 'dtype', type(value).__name__)}")
    return value.data


class _Checked(msgspec.StructMeta):
    """Makes a call of the class check the fields like the decoder: msgspec leaves that to the type checker."""

    if not TYPE_CHECKING:

        def __call__(cls, **fields: Any) -> Any:
            made = msgspec.convert(fields, cls, dec_hook=read_array)
            made.check()
            return made


class Message(msgspec.Struct, metaclass=_Checked, frozen=True, kw_only=True):
    """Base of all wire messages: frozen, and checked when it is made or decoded. Raises ValueError (types and limits:
    msgspec.ValidationError). Unknown fields are ignored: a newer minor version may have added them.

    `model_copy` and `model_dump` have the names that settings have.
    """

    def check(self) -> None:
        """Raise ValueError if the fields, each of which is valid, do not agree."""

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """Return a copy with the fields in `update`, which are not checked."""
        return msgspec.structs.replace(self, **update)

    def model_dump(self, *, include: Collection[str] = ()) -> dict[str, Any]:
        """Return the fields, or those in `include`, as plain values: tuples as lists, arrays as bytes."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if not include or name in include}
        plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(fields, enc_hook=write_array))
        return plain
