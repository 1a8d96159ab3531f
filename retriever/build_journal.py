"""`journal.json` in the building directory: what of an unfinished build is on disk for certain.

A line in the journal is a promise, so data are flushed before it is written, and it is replaced by a rename.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from retriever.build_site import fsync
from retriever.corpus import Scan

JOURNAL = "journal.json"


class Journal:
    """Content of the journal, read at the start; every setter writes it durably.

    input    what `CorpusInput.stamp` said when the corpus was scanned
    scan     fields of `corpus.Scan`
    index    identity of the index whose files are all there, None while they are not
    vectors  name of a vector file -> {"identity": of corpus and encoder, "rows": on disk for certain}
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL
        self._content: dict[str, Any] = {}
        if self._path.exists():
            self._content = _read(self._path)

    @property
    def input(self) -> dict[str, Any] | None:
        """None: nothing has been scanned."""
        found: dict[str, Any] | None = self._content.get("input")
        return found

    @property
    def scan(self) -> dict[str, Any]:
        """Only where `input` is not None."""
        found: dict[str, Any] = self._content["scan"]
        return found

    @property
    def vector_files(self) -> set[str]:
        """Those that have rows."""
        return set(self._content.get("vectors", {}))

    @property
    def index(self) -> dict[str, Any] | None:
        """See the class."""
        found: dict[str, Any] | None = self._content.get("index")
        return found

    def scanned(self, stamp: dict[str, Any], scan: dict[str, Any]) -> None:
        """The corpus and the arrays beside it are on disk. Whatever was known before is forgotten."""
        self._content = {"input": stamp, "scan": scan, "vectors": {}}
        self._write()

    def restamped(self, stamp: dict[str, Any]) -> None:
        """The same corpus under another date."""
        self._content["input"] = stamp
        self._write()

    def rows(self, name: str) -> tuple[dict[str, Any], int]:
        """(identity, rows on disk) of a vector file; ({}, 0) when it is new."""
        entry = self._content["vectors"].get(name)
        return ({}, 0) if entry is None else (entry["identity"], entry["rows"])

    def wrote(self, name: str, identity: dict[str, Any], rows: int) -> None:
        """The first `rows` rows of the file are on disk."""
        self._content["vectors"][name] = {"identity": identity, "rows": rows}
        self._content.pop("index", None)
        self._write()

    def built(self, identity: dict[str, Any]) -> None:
        """Everything that the index needs is on disk."""
        self._content["index"] = identity
        self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(self._content, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)
        fsync(self._path.parent)


def _read(path: Path) -> dict[str, Any]:
    """The content of a journal. UserError where it is none: what it promises must not be guessed."""
    try:
        content = json.loads(path.read_text())
        vectors = content.get("vectors", {})
        if content.get("input") is not None:
            Scan(**content["scan"])
        if not all(isinstance(entry["identity"], dict) and type(entry["rows"]) is int for entry in vectors.values()):
            raise ValueError("an entry of a vector file that is none")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged",
            why=f"{type(error).__name__}: {str(error)[:200]}",
            todo=f"remove {path.parent} and build again: nothing in it can be trusted",
        ) from None
    found: dict[str, Any] = content
    return found
