"""The line from rank 0 to the other ranks: what is to be done next, and whether it succeeded. No pickle.

Training itself talks through the group of `learner.engine.ranks` (NCCL on GPUs), which gives up after minutes.
Commands go through a gloo group of their own, because rank 0 may wait for data for hours. A rank that ends, in
whatever way, closes its connections: the others see that at once here, or in the collective that they are in.

What rank 0 sends are frozen dataclasses of arrays, numbers, text and tuples, as bytes. The receiver says which
dataclass it expects. Fields travel in their order, and every value must be what the field's annotation says: a rank
that runs other code than rank 0 is found out here, not in the middle of a collective.
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
"""How long a rank waits for the next command: as long as a queue may be empty."""
SCALARS = (bool, int, float, str)
T = TypeVar("T")


class RankLost(ForayError):
    """Another rank is gone; nothing can be computed any more, and the launcher must start all of them again."""


@contextmanager
def others_alive(doing: str) -> Iterator[None]:
    """Turns what torch says in a collective when a connection is gone into RankLost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistBackendError) or "gloo" in str(error):
            raise RankLost(f"another rank is gone, {doing} cannot be finished: {error}") from error
        raise


class RankChannel:
    """The line, on every rank; making one is collective, and so is every pair of methods (`send` and `receive`)."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)

    def send(self, command: str, payloads: Sequence[bytes] = ()) -> None:
        """On rank 0: `command` to all others, with payload r for rank r (number 0 stays here), or with none.

        Raises RankLost.
        """
        if payloads and len(payloads) != self.size:
            raise ValueError(f"{len(payloads)} payloads for {self.size} ranks")
        with others_alive(f"the order {command!r}"):
            sent = []
            for rank in range(1, self.size):
                word, payload = command.encode(), payloads[rank] if payloads else b""
                head = torch.tensor([len(word), len(payload)], dtype=torch.int64)
                body = torch.frombuffer(bytearray(word + payload), dtype=torch.uint8)
                for tensor in (head, body):
                    sent.append((distributed.isend(tensor, rank, group=self._group), tensor))
            for work, _ in sent:
                assert work is not None
                work.wait()

    def receive(self) -> tuple[str, bytes]:
        """On the others: the next (command, payload); waits as long as it takes. Raises RankLost."""
        with others_alive("waiting for rank 0"):
            head = torch.zeros(2, dtype=torch.int64)
            distributed.recv(head, 0, group=self._group)
            word, payload = head.tolist()
            body = torch.empty(word + payload, dtype=torch.uint8)
            distributed.recv(body, 0, group=self._group)
        raw = body.numpy().tobytes()
        return raw[:word].decode(), raw[word:]

    def gather_errors(self, ok: bool, text: str = "") -> list[str]:
        """Return what went wrong, "rank n: its text" for each rank that was not ok; the same list on all. Raises
        RankLost."""
        mine = b"" if ok else (text or "failed").encode()
        with others_alive("comparing notes"):
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
    """Return the dataclass `value` as bytes. Raises TypeError where a field is not what it is declared to be."""
    raw: bytes = msgpack.packb(_plain(value, type(value), type(value).__name__), use_bin_type=True)
    return raw


def decode(raw: bytes, kind: type[T]) -> T:
    """Return the `kind` in `raw`. Raises TypeError or ValueError when it holds something else. Arrays can be written
    to."""
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
