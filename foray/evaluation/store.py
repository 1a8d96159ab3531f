"""A directory of results: `protocol.json` and `episodes.jsonl`, which a later call may continue.

An episode is one line, written when it ends. The key of a line is (method, data set, question, index). A killed process
loses at most the line that it was writing: on reading, an incomplete last line is dropped, and a second line of one key
replaces the first, so nothing is counted twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foray.evaluation.recipe import FORMAT, EvalRecipe, differences
from protocol.errors import UserError
from protocol.runtime.files import atomic_write, sole_user

RECIPE, EPISODES = "protocol.json", "episodes.jsonl"
POLICY = ("run", "lineage_id", "model")
"""Fields of an episode that identify the policy, besides its version: a score must not mix policies."""
Row = dict[str, Any]
Key = tuple[str, str, str, int]


def key_of(row: Row) -> Key:
    """Return what identifies an episode."""
    return str(row["method"]), str(row["data_set"]), str(row["question_id"]), int(row["index"])


def is_result(directory: Path) -> bool:
    """Return whether `directory` holds results."""
    return (directory / RECIPE).is_file()


def has_episodes(directory: Path) -> bool:
    """Return whether `directory` holds an episode."""
    path = directory / EPISODES
    return path.is_file() and path.stat().st_size > 0


def read_recipe(directory: Path) -> EvalRecipe:
    """Return the recipe of a result. Raises UserError if it cannot be read."""
    try:
        recipe: EvalRecipe = json.loads((directory / RECIPE).read_text(encoding="utf-8"))
        readable = recipe["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{directory} holds no results of `foray eval`",
            why=str(error)[:200],
            todo="give the directory that --out named",
        ) from None
    if not readable:
        raise UserError(
            f"{directory} was written in format {recipe['format']}, not {FORMAT}",
            todo="use the version that wrote it",
        )
    return recipe


def read_rows(directory: Path) -> list[Row]:
    """Return the episodes of a result, each key once. Raises UserError if a line but the last is damaged."""
    path = directory / EPISODES
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows: dict[Key, Row] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[key_of(row)] = row
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # without a line break: the process was killed while it wrote
                break
            raise UserError(
                f"line {number} of {path} is not an episode", todo="remove the line, or evaluate into another --out"
            ) from None
    return list(rows.values())


class ResultStore:
    """An open directory of results. Threads may add episodes; after `close` none is added."""

    def __init__(self, directory: Path, recipe: EvalRecipe, rows: Iterable[Row] = ()) -> None:
        self.directory, self.recipe = directory, recipe
        self._rows = {key_of(row): row for row in rows}
        self._first = next((row for row in self._rows.values() if _policy(row)), None)
        self._lock, self._replaced = threading.Lock(), False
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(directory / RECIPE, json.dumps(recipe, indent=1) + "\n", durable=False)
        self._write_all()
        self._file = (directory / EPISODES).open("a", encoding="utf-8")

    @property
    def rows(self) -> list[Row]:
        """Return all episodes, each once."""
        with self._lock:
            return list(self._rows.values())

    def add(self, row: Row) -> None:
        """Store an episode, in place of one with its key. Raises UserError if it is of another policy."""
        with self._lock:
            if self._file.closed:
                return
            if _policy(row):
                self._first = self._first or row
                _refuse_another_policy(row, self._first)
            self._replaced |= key_of(row) in self._rows
            self._rows[key_of(row)] = row
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file, without lines that later ones replaced. Safe to call twice."""
        with self._lock:
            self._file.close()
            if self._replaced:
                self._write_all()
                self._replaced = False

    def _write_all(self) -> None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows.values())
        atomic_write(self.directory / EPISODES, "".join(lines), durable=False)


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory of results, created if necessary. Raises UserError while another process does."""
    refused = UserError(
        f"another process evaluates into {directory}",
        why="the episodes of one would be lost",
        todo="wait for it and continue with --resume, or give another --out",
    )
    with sole_user(directory, refused):
        yield


def already_there(directory: Path) -> UserError:
    """Return the error for a directory with results that are not to be continued."""
    return UserError(
        f"{directory} already holds results",
        why="they would be overwritten",
        todo="continue them with --resume, give another --out, or delete it",
    )


def open_store(directory: Path, recipe: EvalRecipe, *, resume: bool) -> ResultStore:
    """Open a directory for the results of `recipe`.

    Raises UserError if it holds results and `resume` is False, or results of another recipe or model.
    """
    if not has_episodes(directory):
        return ResultStore(directory, recipe)
    if not resume:
        raise already_there(directory)
    before = read_recipe(directory)
    changed = differences(before, recipe) + _subject_changed(before["subject"], recipe["subject"])
    for part in ("data", "methods"):
        if before[part].keys() != recipe[part].keys():
            changed.append(f"{part}: {', '.join(before[part])} and {', '.join(recipe[part])}")
    if changed:
        raise UserError(
            f"the results in {directory} were made under other conditions",
            why="; ".join(changed),
            todo="give the same options, or another --out",
        )
    return ResultStore(directory, recipe, read_rows(directory))


def _subject_changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {before.get(name)} and {now.get(name)}"
        for name in ("model", "checkpoint")
        if before.get(name) != now.get(name)
    ]


def _policy(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in POLICY if row.get(name) is not None)


def _refuse_another_policy(row: Row, first: Row) -> None:
    for name in POLICY:
        if row.get(name) != first.get(name):
            raise UserError(
                f"the earlier episodes are of another policy: {name} was {first.get(name)}, now {row.get(name)}",
                why="versions are numbers within one run, so a mean over both would be meaningless",
                todo="evaluate on the same server as before, or give another --out",
            )
