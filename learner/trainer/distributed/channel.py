"""Channel from rank 0 to the other ranks: the next command, and whether it succeeded. No pickle.

Training communicates through the group of `learner.engine.ranks` (NCCL on GPUs), which times out after minutes.
Commands use their own gloo group, because rank 0 may wait for data for hours. If a rank ends for any reason, its
connections close: the others notice at once, here or in the current collective.

Rank 0 sends frozen dataclasses of arrays, numbers, text and tuples as bytes; integers in the narrowest dtype that holds
an array's values: a share is 3 times smaller than in memory. The receiver names the expected dataclass.
Fields are sent in order, and every value must match the field's annotation: a rank that runs other code than rank 0 is
detected here, not in the middle of a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from protocol.errors import ForayError

PATIENCE = timedelta(days=30)
"""Timeout for the next command: a queue may be empty for long."""
SCALARS = (bool, int, float, str)
NARROW = tuple(np.dtype(kind).str for kind in (np.int8, np.int16, np.int32))
T = TypeVar("T")


class RankLost(ForayError):
    """Another rank is gone: training cannot continue, and the launcher must restart all ranks."""


@contextmanager
def others_alive(doing: str) -> Iterator[None]:
    """Convert torch's error for a closed connection in a collective to RankLost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistBackendError) or "gloo" in str(error):
            raise RankLost(f"another rank is gone during {doing}: {error}") from error
        raise


class RankChannel:
    """The channel, on every rank. Construction is collective, and so is each pair of `send` and `receive`."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)

    def send(self, command: str, payloads: Sequence[bytes] = ()) -> None:
        """Send `command` to all other ranks (rank 0 only), with payload r for rank r (0 stays here), or with none.

        Raises RankLost.
        """
        if payloads and len(payloads) != self.size:
            raise ValueError(f"{len(payloads)} payloads for {self.size} ranks")
        with others_alive(f"command {command!r}"):
            sent = []
            for rank in range(1, self.size):
                word, payload = command.encode(), payloads[rank] if payloads else b""
                head = torch.tensor([len(word), len(payload)], dtype=torch.int64)
                body = torch.frombuffer(bytearray().join((word, payload)), dtype=torch.uint8)
                for tensor in (head, body):
                    sent.append((distributed.isend(tensor, rank, group=self._group), tensor))
            for work, _ in sent:
                assert work is not None
                work.wait()

    def receive(self) -> tuple[str, bytes]:
        """Return the next (command, payload) on the other ranks; wait as long as needed. Raises RankLost."""
        with others_alive("waiting for rank 0"):
            head = torch.zeros(2, dtype=torch.int64)
            distributed.recv(head, 0, group=self._group)
            word, payload = head.tolist()
            body = torch.empty(word + payload, dtype=torch.uint8)
            distributed.recv(body, 0, group=self._group)
        raw = body.numpy().tobytes()
        return raw[:word].decode(), raw[word:]

    def gather_errors(self, ok: bool, text: str = "") -> list[str]:
        """Return "rank n: text" for each rank that was not ok; the same list on all ranks. Raises
        RankLost."""
        mine = b"" if ok else (text or "failed").encode()
        with others_alive("comparing results"):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            distributed.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
            widest = max(int(size) for size in sizes)
            if not widest:
                return []
            texts = [torch.zeros(widest, dtype=torch.uint8) for _ in range(self.size)]
            padded = torch.frombuffer(bytearray(mine.ljust(widest, b"\0")), dtype=torch.uint8)
            distributed.all_gather(texts, padded, group=self._group)
        said = [text.numpy().tobytes()[: int(size)].decode() for text, size in zip(texts, sizes, strict=True)]
        return [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]


def encode(value: Any) -> bytes:
    """Return the dataclass `value` as bytes. Raises TypeError if a field does not match its annotation."""
    raw: bytes = msgpack.packb(_plain(value, type(value), type(value).__name__), use_bin_type=True)
    return raw


def decode(raw: bytes, kind: type[T]) -> T:
    """Return the `kind` in `raw`. Raises TypeError or ValueError for other content. Arrays are
    writable."""
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
        narrow = _narrow(value)
        return [list(value.shape), narrow.dtype.str, narrow.tobytes()]
    if origin is tuple:
        _expect(isinstance(value, tuple), where, kind, value)
        return [_plain(v, of[0], f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, Mapping), where, kind, value)
        return {_plain(k, of[0], where): _plain(v, of[1], f"{where}[{k!r}]") for k, v in value.items()}
    raise TypeError(f"{where}: cannot send a {kind}")


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
        allowed = {_dtype(kind).str, *(NARROW if _dtype(kind) == np.int64 else ())}
        _expect(isinstance(raw, list) and len(raw) == 3 and raw[1] in allowed, where, kind, raw)
        array: npt.NDArray[Any] = np.frombuffer(raw[2], raw[1]).reshape(raw[0]).astype(_dtype(kind))
        return array
    if origin is tuple:
        _expect(isinstance(raw, list), where, kind, raw)
        return tuple(_built(part, of[0], f"{where}[{i}]") for i, part in enumerate(raw))
    if origin is dict:
        _expect(isinstance(raw, dict), where, kind, raw)
        return {_built(k, of[0], where): _built(v, of[1], f"{where}[{k!r}]") for k, v in raw.items()}
    raise TypeError(f"{where}: cannot receive a {kind}")


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return int64 values in the narrowest dtype of NARROW that holds them all; other arrays as they are."""
    if array.dtype == np.int64 and array.size:
        low, high = int(array.min()), int(array.max())
        for name in NARROW:
            if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
                return array.astype(name)
    return array


def _dtype(kind: Any) -> np.dtype[Any]:
    """Return the dtype of an annotation like NDArray[np.float32]."""
    found: np.dtype[Any] = np.dtype(get_args(get_args(kind)[1])[0])
    return found


def _expect(holds: bool, where: str, kind: Any, value: Any) -> None:
    if not holds:
        raise TypeError(f"{where} should be {getattr(kind, '__name__', kind)}, not {type(value).__name__}")
