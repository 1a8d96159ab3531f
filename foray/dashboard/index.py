"""Index of the trained trajectories: an SQLite file that follows the journal, with full-text search (FTS5).

The file is made from the journal alone and may be deleted at any time. It stores where each group is, the columns
of the table of trajectories, and the words of question, answer and queries; tokens stay in the journal. `update` reads
only frames that are new. It is `dashboard.sqlite` in the run directory, or in a temporary folder if that is read-only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from learner.checkpoint.journal import FrameLocation, data_files, frames, locations
from protocol.codec import decode_as
from protocol.errors import ProtocolError
from protocol.messages import Trajectory, TrajectoryGroup
from protocol.staleness import lag

log = logging.getLogger(__name__)

FILE = "dashboard.sqlite"
VERSION = 1
"""`user_version` of the file. A file of another version is made again."""
CHUNK = 100
"""Groups per transaction: the others read between two."""
BUSY_S = 30.0

_SCHEMA = """
CREATE TABLE files (name TEXT PRIMARY KEY, size INTEGER NOT NULL, groups INTEGER NOT NULL, first INTEGER NOT NULL);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, file TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL,
    epoch INTEGER NOT NULL, step INTEGER NOT NULL, seq INTEGER NOT NULL, question_id TEXT NOT NULL,
    size INTEGER NOT NULL, reward REAL NOT NULL);
CREATE INDEX groups_seq ON groups (seq);
CREATE INDEX groups_question ON groups (question_id);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, epoch INTEGER NOT NULL, step INTEGER NOT NULL,
    seq INTEGER NOT NULL, place INTEGER NOT NULL, source TEXT NOT NULL, status TEXT NOT NULL, cause TEXT NOT NULL,
    reward REAL NOT NULL, em REAL, turns INTEGER NOT NULL, searches INTEGER NOT NULL, errors INTEGER NOT NULL,
    tokens INTEGER NOT NULL, sampled INTEGER NOT NULL, seconds REAL NOT NULL, first_epoch INTEGER, first_step INTEGER,
    last_epoch INTEGER, last_step INTEGER, lag INTEGER NOT NULL, same INTEGER NOT NULL);
CREATE INDEX trajectories_group ON trajectories (group_id);
CREATE INDEX trajectories_reward ON trajectories (reward);
CREATE INDEX trajectories_sampled ON trajectories (sampled);
CREATE INDEX trajectories_lag ON trajectories (lag);
CREATE INDEX trajectories_status ON trajectories (status);
CREATE INDEX trajectories_source ON trajectories (source);
CREATE INDEX trajectories_step ON trajectories (step);
CREATE VIRTUAL TABLE words USING fts5 (question, answer, queries, tokenize = 'unicode61 remove_diacritics 2');
CREATE TABLE ages (step INTEGER NOT NULL, lag INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY (step, lag));
"""
_COLUMNS = 23


class TrajectoryIndex:
    """The index of one run. Threads may read while one calls `update`; so may other processes."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "journal"
        self.path = _place(run_dir)
        self._open()

    def update(self) -> bool:
        """Read at most CHUNK new groups. Return whether there may be more."""
        with self._writing() as db:
            known = {name: (size, groups, first) for name, size, groups, first in db.execute("SELECT * FROM files")}
            paths = data_files(self._journal)
            gone = known.keys() - {path.name for path in paths}
            for name in gone:
                _forget(db, name)
            for path in paths:
                size, groups, first = known.get(path.name, (-1, 0, 0))
                if path.stat().st_size == size:
                    continue
                found = locations(path)
                if groups and (len(found) < groups or found[0].crc != first):
                    _clear(db)  # another journal has taken its place
                    return True
                new = found[groups : groups + CHUNK]
                _add(db, new)
                done = groups + len(new)
                # a size that is too small makes the next call look again
                seen = found[-1].end if found and done == len(found) else -1
                first = found[0].crc if found else 0
                db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (path.name, seen, done, first))
                if new:
                    return True
        return False

    @property
    def progress(self) -> dict[str, int]:
        """Return the number of groups and trajectories in the index, and of groups in the journal."""
        with self.reading() as db:
            groups, trajectories = db.execute(
                "SELECT (SELECT coalesce(sum(groups), 0) FROM files), (SELECT count(*) FROM trajectories)"
            ).fetchone()
            kept = {name: (size, count) for name, size, count in db.execute("SELECT name, size, groups FROM files")}
        there = 0
        for path in data_files(self._journal):
            size, count = kept.get(path.name, (-1, 0))
            there += count if path.stat().st_size == size else len(locations(path))
        return {"groups": groups, "trajectories": trajectories, "journal": there}

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a connection that cannot write; rows have names."""
        with closing(sqlite3.connect(self.path, timeout=BUSY_S)) as db:
            db.execute("PRAGMA query_only = 1")
            db.row_factory = sqlite3.Row
            yield db

    def group(self, group_id: int) -> tuple[FrameLocation, TrajectoryGroup] | None:
        """Read a group from the journal; None if it is no longer there or damaged."""
        with self.reading() as db:
            row = db.execute("SELECT * FROM groups WHERE id = ?", (group_id,)).fetchone()
        if row is None or not (path := self._journal / row["file"]).is_file():
            return None
        place = FrameLocation(path, *(row[name] for name in ("offset", "length", "crc", "epoch", "step", "seq")))
        return next(_decoded([place]), None)

    def _open(self) -> None:
        """Create the tables; make a file again that is damaged or of another version."""
        try:
            with self._writing() as db:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == VERSION:
                    return
                if not version and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {VERSION}")
                    return
        except sqlite3.DatabaseError as error:
            log.warning("making %s again: %s", self.path, error)
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self._open()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")  # readers do not wait
            db.execute("PRAGMA synchronous = OFF")  # a file that a power cut damages is made again
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                raise


def _place(run_dir: Path) -> Path:
    if os.access(run_dir, os.W_OK):
        return run_dir / FILE
    name = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"foray-dashboard-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # made by someone else
        folder = Path(tempfile.mkdtemp(prefix="foray-dashboard-"))
    return folder / f"{name}.sqlite"


def _decoded(wanted: list[FrameLocation]) -> Iterator[tuple[FrameLocation, TrajectoryGroup]]:
    for location, frame in frames(wanted):
        try:
            yield location, decode_as(TrajectoryGroup, frame["b"])
        except (ProtocolError, KeyError, TypeError) as error:
            log.warning("leaving out the group of seq %d: %s", location.seq, error)


def _add(db: sqlite3.Connection, new: list[FrameLocation]) -> None:
    group_id = db.execute("SELECT coalesce(max(id), 0) FROM groups").fetchone()[0]
    row_id = db.execute("SELECT coalesce(max(id), 0) FROM trajectories").fetchone()[0]
    ages: Counter[tuple[int, int]] = Counter()
    for location, group in _decoded(new):
        group_id += 1
        valid = [t.reward for t in group.trajectories if t.status.is_valid]
        mean = sum(valid) / len(valid) if valid else 0.0
        same = int(len(set(valid)) <= 1)
        where = (location.path.name, location.offset, location.length, location.crc)
        which = (location.epoch, location.step, location.seq, group.question.id, len(group.trajectories), mean)
        db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (group_id, *where, *which))
        rows = [
            (row_id + i, group_id, *_row(location, group, i - 1, same)) for i in range(1, len(group.trajectories) + 1)
        ]
        db.executemany(f"INSERT INTO trajectories VALUES ({', '.join('?' * _COLUMNS)})", rows)
        words = [(row_id + i, group.question.text, t.answer, _queries(t)) for i, t in enumerate(group.trajectories, 1)]
        db.executemany("INSERT INTO words (rowid, question, answer, queries) VALUES (?, ?, ?, ?)", words)
        row_id += len(rows)
        for span in (span for t in group.trajectories for s in t.segments for span in s.spans):
            ages[location.step, lag(location.step - 1, span.version)] += span.end - span.start
    db.executemany(
        "INSERT INTO ages VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
        [(step, age, tokens) for (step, age), tokens in ages.items()],
    )


def _row(location: FrameLocation, group: TrajectoryGroup, place: int, same: int) -> tuple[Any, ...]:
    t = group.trajectories[place]
    first, last = t.first_version(), t.last_version()
    return (
        *(location.epoch, location.step, location.seq, place, group.question.source, str(t.status), t.cause),
        *(t.reward, t.rewards.get("em"), t.turns, t.searches, sum(1 for s in t.segments if s.error)),
        *(sum(len(s.ids) for s in t.segments), t.num_sampled, t.seconds),
        *(first or (None, None)),
        *(last or (None, None)),
        *(lag(location.step - 1, first) if first is not None else 0, same),
    )


def _queries(trajectory: Trajectory) -> str:
    return "\n".join(segment.query for segment in trajectory.segments if segment.query)


def _forget(db: sqlite3.Connection, name: str) -> None:
    """Remove the rows of a file that the journal has dropped. `ages` keeps its tokens: they were trained."""
    gone = "SELECT id FROM groups WHERE file = ?"
    db.execute(f"DELETE FROM words WHERE rowid IN (SELECT id FROM trajectories WHERE group_id IN ({gone}))", (name,))
    db.execute(f"DELETE FROM trajectories WHERE group_id IN ({gone})", (name,))
    db.execute("DELETE FROM groups WHERE file = ?", (name,))
    db.execute("DELETE FROM files WHERE name = ?", (name,))


def _clear(db: sqlite3.Connection) -> None:
    for name in ("words", "trajectories", "groups", "files", "ages"):
        db.execute(f"DELETE FROM {name}")
