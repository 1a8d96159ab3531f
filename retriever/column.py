"""One-dimensional arrays written to disk item by item, in numpy's format, without holding them in memory."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_CODES = {"int64": "q", "uint64": "Q"}
_BUFFER_ITEMS = 1 << 16


class ColumnWriter:
    """`with ColumnWriter(path, np.int64) as column: column.append(3)`. Until it is closed the file is not readable."""

    def __init__(self, path: Path, dtype: type[np.int64] | type[np.uint64]) -> None:
        self._dtype = np.dtype(dtype)
        self._buffer = array(_CODES[self._dtype.name])
        self._count = 0
        self._file = path.open("w+b")
        self._data_at = self._write_header()

    def _write_header(self) -> int:
        # numpy pads headers, so that a longer shape takes the same room: that is what `close` relies on
        header: dict[str, Any] = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._count,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def append(self, value: int) -> None:
        """One more item."""
        self._buffer.append(value)
        if len(self._buffer) >= _BUFFER_ITEMS:
            self._flush()

    def extend(self, values: npt.NDArray[Any]) -> None:
        """More items at once."""
        self._flush()
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self._count += len(values)

    def _flush(self) -> None:
        self._file.write(self._buffer.tobytes())
        self._count += len(self._buffer)
        del self._buffer[:]

    def close(self) -> None:
        """Write what is left, and how many items there are."""
        self._flush()
        self._file.seek(0)
        if self._write_header() != self._data_at:
            raise RuntimeError("this numpy does not pad headers of arrays")
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
