"""Selection of trajectories: the filters of the table, its order and its pages, as SQL over the index."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learner.checkpoint.journal import FrameLocation, rolled_back
from protocol.errors import UserError
from protocol.messages import Status
from protocol.versions import PolicyVersion

ORDERS: Mapping[str, tuple[str, ...]] = {
    "newest": ("id DESC",),
    "oldest": ("id",),
    "best": ("reward DESC", "id DESC"),
    "worst": ("reward", "id"),
    "longest": ("sampled DESC", "id DESC"),
    "stalest": ("lag DESC", "id DESC"),
}
"""Name -> ORDER BY over an index, so that a page is read without sorting all rows."""
SIGNALS: Mapping[str, int] = {"none": 1, "some": 0}
"""Whether all valid rewards of the group are equal, so that a group-relative advantage is 0."""
PAGE, LARGEST_PAGE = 50, 500
_WORD = re.compile(r"\w+")
_NAMES = {"status", "source", "reward_min", "reward_max", "step_min", "step_max", "version", "text", "signal", "seq"}


@dataclass(frozen=True)
class TrajectoryFilter:
    """WHERE clause and parameters, and the page."""

    where: str
    values: tuple[Any, ...]
    order: tuple[str, ...]
    limit: int
    offset: int


def parse_filter(query: Mapping[str, str]) -> TrajectoryFilter:
    """Return the filter of a query string; empty values do not filter. Raises UserError for invalid ones."""
    given = {name: value.strip() for name, value in query.items() if value.strip()}
    if unknown := given.keys() - _NAMES - {"order", "limit", "offset"}:
        raise UserError(f"unknown filter {sorted(unknown)[0]!r}", todo=f"use {', '.join(sorted(_NAMES))}")
    parts: list[tuple[str, tuple[Any, ...]]] = []
    if "status" in given:
        parts.append(("status = ?", (_one_of(given, "status", list(Status)),)))
    if "source" in given:
        parts.append(("source = ?", (given["source"],)))
    for name, column, sign in (
        ("min", "reward", ">="),
        ("max", "reward", "<="),
        ("min", "step", ">="),
        ("max", "step", "<="),
    ):
        if (key := f"{column}_{name}") in given:
            parts.append((f"{column} {sign} ?", (_number(given, key),)))
    if "seq" in given:
        parts.append(("group_id IN (SELECT id FROM groups WHERE seq = ?)", (int(_number(given, "seq")),)))
    if "signal" in given:
        parts.append(("same = ?", (SIGNALS[_one_of(given, "signal", list(SIGNALS))],)))
    if "version" in given:
        version = PolicyVersion.parse(given["version"])
        if version is None:
            raise UserError(f"version {given['version']!r} is not valid", todo="write EPOCH.STEP, for example 1.20")
        parts.append(
            ("(first_epoch, first_step) <= (?, ?) AND (last_epoch, last_step) >= (?, ?)", (*version, *version))
        )
    if "text" in given:
        words = _WORD.findall(given["text"])[:20]
        # each word in quotes: the syntax of FTS5 is not part of the search
        parts.append(
            ("id IN (SELECT rowid FROM words WHERE words MATCH ?)", (" ".join(f'"{word}"*' for word in words),))
            if words
            else ("0", ())
        )
    return TrajectoryFilter(
        where=" AND ".join(sql for sql, _ in parts) or "1",
        values=tuple(value for _, values in parts for value in values),
        order=ORDERS[_one_of(given, "order", list(ORDERS))] if "order" in given else ORDERS["newest"],
        limit=min(LARGEST_PAGE, max(1, int(_number(given, "limit")) if "limit" in given else PAGE)),
        offset=max(0, int(_number(given, "offset")) if "offset" in given else 0),
    )


def _one_of(given: Mapping[str, str], name: str, known: Sequence[str]) -> str:
    if given[name] not in known:
        raise UserError(f"{name} {given[name]!r} is not valid", todo=f"use one of {', '.join(known)}")
    return given[name]


def _number(given: Mapping[str, str], name: str) -> float:
    try:
        value = float(given[name])
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e15:
        raise UserError(f"{name} {given[name]!r} is not a number")
    return value


def page_sql(wanted: TrajectoryFilter) -> tuple[str, tuple[Any, ...]]:
    """Return the query of one page, and its parameters. Texts are joined after the page is cut:
    CROSS JOIN makes SQLite look them up row by row."""
    order = ", ".join(wanted.order)
    rows = f"SELECT * FROM trajectories WHERE {wanted.where} ORDER BY {order} LIMIT ? OFFSET ?"
    return (
        "SELECT page.*, question, answer, groups.size, groups.reward AS group_reward, question_id, file "
        f"FROM ({rows}) AS page CROSS JOIN words ON words.rowid = page.id "
        "CROSS JOIN groups ON groups.id = page.group_id "
        f"ORDER BY {', '.join(f'page.{column}' for column in wanted.order)}",
        (*wanted.values, wanted.limit, wanted.offset),
    )


def read_page(db: sqlite3.Connection, wanted: TrajectoryFilter, lineage: Sequence[PolicyVersion]) -> dict[str, Any]:
    """Return one page of the table and the number of rows that the filter selects."""
    (total,) = db.execute(f"SELECT count(*) FROM trajectories WHERE {wanted.where}", wanted.values).fetchone()
    rows = [plain_row(row, lineage) for row in db.execute(*page_sql(wanted))]
    return {"total": total, "offset": wanted.offset, "limit": wanted.limit, "rows": rows}


def plain_row(row: sqlite3.Row, lineage: Sequence[PolicyVersion]) -> dict[str, Any]:
    """Return a row of the table as JSON values."""
    plain = dict(row)
    hidden = ("first_epoch", "first_step", "last_epoch", "last_step", "file")
    first, last = (
        PolicyVersion(row[f"{end}_epoch"], row[f"{end}_step"]).label if row[f"{end}_epoch"] is not None else None
        for end in ("first", "last")
    )
    where = FrameLocation(row["file"], 0, 0, 0, row["epoch"], row["step"], row["seq"])
    kept = {name: value for name, value in plain.items() if name not in hidden}
    return kept | {"first_version": first, "last_version": last, "rolled_back": rolled_back(where, lineage)}


def read_facets(db: sqlite3.Connection) -> dict[str, Any]:
    """Return what can be filtered: statuses and sources with their numbers, and the ranges of step and reward."""
    counted = {
        name: dict(db.execute(f"SELECT {name}, count(*) FROM trajectories GROUP BY {name}").fetchall())
        for name in ("status", "source")
    }
    ranges = {
        name: [db.execute(f"SELECT {end}({name}) FROM trajectories").fetchone()[0] for end in ("min", "max")]
        for name in ("step", "reward")
    }
    return counted | ranges


def read_ages(db: sqlite3.Connection, bins: int = 400) -> dict[str, Any]:
    """Return the lag of sampled tokens: totals by lag, totals of trajectories by lag of their oldest token, and tokens
    by lag over the steps, with neighbouring steps added up so that there are at most `bins`.
    """
    (last,) = db.execute("SELECT coalesce(max(step), 0) FROM ages").fetchone()
    width = max(1, -(-last // bins))
    rows = db.execute(
        "SELECT (step - 1) / ? AS bin, lag, sum(tokens) FROM ages GROUP BY bin, lag ORDER BY bin, lag", (width,)
    ).fetchall()
    tokens = db.execute("SELECT lag, sum(tokens) FROM ages GROUP BY lag ORDER BY lag").fetchall()
    groups = db.execute(
        "SELECT lag, count(*) FROM (SELECT max(lag) AS lag FROM trajectories GROUP BY group_id) "
        "GROUP BY lag ORDER BY lag"
    ).fetchall()
    return {
        "tokens": [list(row) for row in tokens],
        "groups": [list(row) for row in groups],
        "steps": [[row[0] * width + 1, row[1], row[2]] for row in rows],
        "width": width,
    }
