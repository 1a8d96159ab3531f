"""Dead letters: entries that could not be used, kept for inspection, and the state of their seqs.

Both writers use one format (`learner/delivery/consumer.py`, `rollout_server/dispatch/publisher.py`):

    id      id of the entry, in the stream of trajectory groups or of tasks (reasons that begin with `task_`)
    seq     seq of the entry, 0 if it could not be read
    reason  one word, as in `protocol/errors.py`; detail: the exact error
    from    process that found it: "learner", or the id of a rollout server
    h, b    header and body as received, truncated

The stream in Redis holds the newest of both writers. `dead_letters.jsonl` in the run directory holds the learner's,
with `h` and `b` in base64, and `dead_letters.jsonl.1` older ones (`learner/delivery/dead_letters.py` bounds both).
The state of a seq is in the ledger, not here.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deploy.run.snapshot import RunSnapshot
from deploy.terminal import escape_untrusted
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.ledger import Ledger, Outcome
from protocol.runtime.files import atomic_write

if TYPE_CHECKING:
    import redis

FILES = ("dead_letters.jsonl.1", "dead_letters.jsonl")
PAGE = 20
"""Dead letters per read from Redis: each may take 2 MiB."""
SHOWN = 20
"""Maximum number of seqs named in a message."""
LONGEST_LINE = 8 << 20


@dataclass(frozen=True)
class DeadLetter:
    """One dead letter. `kept`: where it is stored ("redis", "file"); `stream_id`: its id in the dead-letter stream."""

    id: str
    seq: int
    reason: str
    detail: str
    source: str
    header: bytes
    body: bytes
    kept: tuple[str, ...] = ()
    stream_id: str = ""

    @property
    def at(self) -> float:
        """Return when the entry was added, in seconds since 1970 on the Redis clock (from its id); 0 if unknown."""
        milliseconds = self.id.partition("-")[0]
        return int(milliseconds) / 1000 if milliseconds.isdecimal() and len(milliseconds) < 16 else 0.0


@dataclass(frozen=True)
class Fates:
    """Outcomes of seqs in the ledger of the last checkpoint, and the seqs that a user has requeued."""

    ledger: Ledger | None
    requeued: frozenset[int] = frozenset()

    @cached_property
    def dead(self) -> dict[int, str]:
        """Return seq -> reason, of dead seqs."""
        return {seq: reason for seq, (outcome, reason) in self._noted.items() if outcome is Outcome.DEAD}

    @cached_property
    def reopenable(self) -> dict[int, str]:
        """Return seq -> reason, of seqs that may be requeued: they were not trained on."""
        return {seq: reason for seq, (_, reason) in self._noted.items()}

    @property
    def _noted(self) -> dict[int, tuple[Outcome, str]]:
        return self.ledger.notes if self.ledger is not None else {}

    def of(self, seq: int) -> str:
        """Return the state: as `Ledger.state_of`, requeued, open (in flight or to be reissued) or unknown."""
        if not seq or self.ledger is None:
            return "unknown"
        if seq in self.requeued:
            return "requeued"
        return self.ledger.state_of(seq) if seq in self.ledger else "open"


def read_letters(client: redis.Redis | None, run: str, run_dir: Path, *, bodies: bool = True) -> list[DeadLetter]:
    """Return each dead letter once, the oldest first; without a client, those in the file.

    `bodies` False leaves `header` and `body` empty: they may take gigabytes.
    """
    filed = {_key(letter): letter for name in FILES for letter in _of_file(run_dir / name, bodies)}
    found = []
    for letter in _of_stream(client, Keys(run).dlq, bodies) if client is not None else ():
        twin = filed.pop(_key(letter), None)
        # the file keeps more bytes of each
        found.append(replace(twin, kept=("redis", "file"), stream_id=letter.stream_id) if twin else letter)
    return sorted([*found, *filed.values()], key=lambda letter: (letter.at, letter.id))


def purge_stream(client: redis.Redis, run: str, letters: Iterable[DeadLetter]) -> int:
    """Delete these dead letters from the stream and return their number."""
    ids = [letter.stream_id for letter in letters if letter.stream_id]
    return sum(int(client.xdel(Keys(run).dlq, *ids[i : i + 500])) for i in range(0, len(ids), 500))


def purge_file(run_dir: Path, letters: Iterable[DeadLetter]) -> int:
    """Delete these dead letters from the files and return the number of lines. The learner must not be running."""
    gone = {_key(letter) for letter in letters}
    return sum(_purge(run_dir / name, gone) for name in FILES if (run_dir / name).exists())


def _purge(path: Path, gone: set[tuple[str, str, str]]) -> int:
    removed = 0

    def kept(file: TextIO) -> Iterator[bytes]:
        nonlocal removed
        for line in file:
            letter = _parsed(line, bodies=False)
            if letter is not None and _key(letter) in gone:
                removed += 1
            else:
                yield line.encode()

    with path.open(encoding="utf-8", errors="replace") as file:
        atomic_write(path, kept(file), durable=False)
    return removed


def _key(letter: DeadLetter) -> tuple[str, str, str]:
    return letter.id, letter.reason, letter.source


def _of_stream(client: redis.Redis, key: str, bodies: bool) -> Iterator[DeadLetter]:
    start = "-"
    while True:
        page: list[tuple[bytes, dict[bytes, bytes]]] = client.xrange(key, start, "+", count=PAGE)  # type: ignore[assignment]
        for stream_id, raw in page:
            yield _letter(raw, stream_id.decode(), bodies)
        if len(page) < PAGE:
            return
        start = f"({page[-1][0].decode()}"


def _letter(raw: dict[bytes, bytes], stream_id: str, bodies: bool) -> DeadLetter:
    def text(name: bytes) -> str:
        return raw.get(name, b"").decode("utf-8", "replace")

    # an older rollout server wrote `raw`, and no id
    header, body = raw.get(b"h", b""), raw.get(b"b", raw.get(b"raw", b""))
    return DeadLetter(
        id=text(b"id") or stream_id,
        seq=_seq(text(b"seq")),
        reason=text(b"reason"),
        detail=text(b"detail"),
        source=text(b"from") or "learner",
        header=header if bodies else b"",
        body=body if bodies else b"",
        kept=("redis",),
        stream_id=stream_id,
    )


def _of_file(path: Path, bodies: bool) -> Iterator[DeadLetter]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(LONGEST_LINE):
            letter = _parsed(line, bodies)
            if letter is not None:
                yield letter


def _parsed(line: str, bodies: bool) -> DeadLetter | None:
    """Return None for an invalid line, such as one truncated by a crash."""
    try:
        facts: Any = json.loads(line)
        if not isinstance(facts, dict):
            return None
        header, body = (base64.b64decode(str(facts.get(name, ""))) if bodies else b"" for name in ("h", "b"))
    except (ValueError, RecursionError, binascii.Error):
        return None
    reason, detail, source = (str(facts.get(name, "")) for name in ("reason", "detail", "from"))
    given = DeadLetter(str(facts.get("id", "")), _seq(str(facts.get("seq", ""))), reason, detail, source, header, body)
    return replace(given, source=source or "learner", kept=("file",))


def _seq(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 18 else 0


def choose(snapshot: RunSnapshot, fates: Fates, seqs: Sequence[int], *, reason: str = "") -> list[int]:
    """Return the seqs to requeue, ascending: `seqs`, or all dead or stale ones with `reason`, or all dead ones.

    Changes nothing: the learner requeues them (`Keys.requeue`).
    Raises UserError if the run is done, if there is no checkpoint, or if one of `seqs` is neither dead nor stale.
    """
    if snapshot.is_done:
        raise UserError(
            "the run is done, so no seq can be retried",
            todo="extend the run first (raise run.steps and start the learner again), then requeue",
        )
    if fates.ledger is None:
        raise UserError(
            "there is no checkpoint yet, so no seq is recorded as dead", todo="wait for one (learner.checkpoint_every)"
        )
    lost = fates.reopenable
    if not seqs:
        chosen = [seq for seq, why in lost.items() if why == reason] if reason else list(fates.dead)
        if reason and not chosen:
            known = ", ".join(sorted({escape_untrusted(why) for why in lost.values()})) or "none at all"
            raise UserError(f"no dead or stale seq has the reason {reason!r}", why=f"recorded reasons: {known}")
    else:
        chosen = list(seqs)
        if wrong := [seq for seq in chosen if seq not in lost]:
            states = ", ".join(f"{seq} is {fates.of(seq)}" for seq in wrong[:SHOWN])
            raise UserError(
                f"only seqs that are dead or stale in the last checkpoint can be requeued: {states}",
                why="an open seq is in progress, and a trained one must not be trained twice",
                todo="`foray dlq list` shows the dead ones; the next checkpoint records seqs that have just failed",
            )
    return sorted({seq for seq in chosen if seq not in fates.requeued})


def outlook(snapshot: RunSnapshot, seqs: Sequence[int]) -> str:
    """Return a message about what happens next."""
    if not seqs:
        return "nothing to requeue: all dead seqs are requeued already"
    some = ", ".join(map(str, seqs[:SHOWN])) + (", ..." if len(seqs) > SHOWN else "")
    then = "reopens them in its ledger and reissues their tasks; until they end they count as in flight"
    if snapshot.learner is None:
        return f"{len(seqs)} seqs requeued: {some}\nNo learner is running. When one starts, it {then}."
    return f"{len(seqs)} seqs requeued: {some}\nThe learner {then}."
