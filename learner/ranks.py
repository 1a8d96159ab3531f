"""The line from rank 0 to the other ranks: what is to be done next, and whether it succeeded. No pickle.

Training itself talks through the group of `learner.engine.ranks` (NCCL on GPUs), which gives up after minutes.
Commands go through a gloo group of their own, because rank 0 may wait for data for hours. A rank that ends, in
whatever way, closes its connections: the others see that at once here, or in the collective that they are in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from protocol.errors import ForayError

PATIENCE = timedelta(days=30)
"""How long a rank waits for the next command: as long as a queue may be empty."""


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


class Ranks:
    """The line, on every rank; making one is collective, and so is every pair of methods (`tell` and `listen`)."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)

    def tell(self, command: str, payloads: Sequence[bytes] = ()) -> None:
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

    def listen(self) -> tuple[str, bytes]:
        """On the others: the next (command, payload); waits as long as it takes. Raises RankLost."""
        with others_alive("waiting for rank 0"):
            head = torch.zeros(2, dtype=torch.int64)
            distributed.recv(head, 0, group=self._group)
            word, payload = head.tolist()
            body = torch.empty(word + payload, dtype=torch.uint8)
            distributed.recv(body, 0, group=self._group)
        raw = body.numpy().tobytes()
        return raw[:word].decode(), raw[word:]

    def agree(self, ok: bool, text: str = "") -> list[str]:
        """What went wrong, "rank n: its text" for each rank that was not ok; the same list on all. Raises RankLost."""
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
