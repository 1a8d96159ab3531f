"""The input of `--corpus`, and its conversion to the file of `{"id", "contents"}` lines that is indexed and served.

A file of such lines is used in place. Everything else (another format, gzip, parquet, several files, long
documents to be split, synthetic text) is streamed into `corpus.jsonl` in the index directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from protocol.runtime.records import RecordReader, RowCount, record_files
from retriever.config import RetrieverSettings
from retriever.corpus.corpus import open_corpus, read_texts
from retriever.corpus.formats import FORMATS, detect
from retriever.corpus.formats.base import COLUMNS, PASSAGES, Document, content_id
from retriever.corpus.formats.synthetic import MEAN_BYTES, PREFIX, Synthetic, corpus_spec

CORPUS = "corpus.jsonl"
"""Name of a converted corpus in the index directory."""
_PROGRESS_EVERY = 256


@dataclass(frozen=True)
class CorpusInput:
    """A corpus as specified.

    spec    specification: an absolute path, or `synthetic:N:SEED`
    paths   the files, in order; none for synthetic text
    format  name in `formats.table`, or "synthetic"
    words   split longer documents into passages of this many words; 0: no splitting
    """

    spec: str
    paths: tuple[Path, ...]
    format: str
    words: int
    in_place: bool

    @property
    def size(self) -> int:
        """Return the size of the files in bytes, of synthetic text roughly."""
        if not self.paths:
            return Synthetic.parse(self.spec).passages * MEAN_BYTES
        return sum(path.stat().st_size for path in self.paths)

    def describe(self) -> dict[str, Any]:
        """Return how the corpus was specified."""
        return {"spec": self.spec, "format": self.format, "words": self.words}

    def stamp(self) -> dict[str, Any]:
        """Return a stamp that changes if a file is written, replaced or touched; a resumed build need not read the
        files."""
        stats = [path.stat() for path in self.paths]
        return self.describe() | {"files": [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s in stats]}


def read_input(corpus: Path | str, form: str | None = None, words: int | None = None) -> CorpusInput:
    """Return the input that `corpus` specifies. Raises UserError if it cannot be read or its format is unknown."""
    if words is not None and words < 0:
        raise UserError(f"--words is {words}", todo="give the number of words of a passage, e.g. 100")
    if str(corpus).startswith(PREFIX):
        if form not in (None, "synthetic"):
            raise UserError(f"{corpus} is synthetic text, not {form}", todo="remove --format")
        return CorpusInput(corpus_spec(corpus), (), "synthetic", words or 0, False)
    if form is not None and form not in FORMATS:
        raise UserError(f"unknown format {form!r}", todo="use one of: " + ", ".join(FORMATS))
    path = Path(corpus).absolute()
    paths = tuple(map(open_corpus, record_files(path, PASSAGES)))
    with closing(iter(RecordReader(paths[0], PASSAGES, COLUMNS, RowCount(skip_invalid=True)))) as records:
        first = next(records, None)
    chosen = form or (detect(first[1], paths[0]) if first is not None else "contents")
    in_place = chosen == "contents" and not words and len(paths) == 1 and _is_lines(paths[0])
    return CorpusInput(corpus_spec(path), paths, chosen, words or 0, in_place)


def _is_lines(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return not head or (head.startswith(b"{") and path.suffix != ".tsv")


Tick = Callable[[float, int], None]
"""Called with (share of the input read, passages so far)."""


def documents(given: CorpusInput, tick: Tick, rows: RowCount | None = None) -> Generator[Document, None, None]:
    """Yield every passage of the input, with an id.

    rows  counts the documents, and those left out. Raises UserError for the first record of another format, unless
          `rows.skip_invalid`
    """
    split = _split(given.words) if given.words else iter_one
    seen: set[str] = set()
    count = 0
    for fraction, document in _named(given, seen, rows or RowCount()):
        for passage in split(document):
            count += 1
            if count % _PROGRESS_EVERY == 0:
                tick(fraction(), count)
            yield passage
    tick(1.0, count)


def first_passages(corpus: Path, count: int) -> int:
    """Read the first `count` passages as a build would, and return their number.

    Raises the errors of a build for these passages, and UserError for a corpus without any.
    """
    given = read_input(corpus)
    passages = read_texts(given.paths[0]) if given.in_place else documents(given, lambda share, passages: None)
    with closing(passages):
        found = sum(1 for _ in islice(passages, count))
    if not found:
        raise UserError(f"the corpus {corpus} has no passages", todo='use a file of {"id", "contents"} lines')
    return found


def refuse_large(settings: RetrieverSettings) -> None:
    """Raise UserError if the index is missing and the corpus is too large to build one at start."""
    directory = settings.index_path
    size = read_input(settings.corpus).size
    if not directory.exists() and size > settings.build_limit_mb * 2**20:
        raise UserError(
            f"no index found at {directory}",
            why=f"{settings.corpus} has {size / 2**20:.0f} MiB, but the service builds an index itself only up to "
            f"retriever.build_limit_mb = {settings.build_limit_mb:g}",
            todo=f"foray index build --corpus {settings.corpus} --out {directory} --index {settings.index.type}",
        )


def iter_one(document: Document) -> Iterator[Document]:
    """Yield the document as one passage."""
    yield document


def _named(given: CorpusInput, seen: set[str], rows: RowCount) -> Iterator[tuple[Callable[[], float], Document]]:
    """Yield the documents with an id: without one they get a hash of their content, and duplicates are dropped.

    `seen` takes about 100 bytes for each of the latter.
    """
    for fraction, document in _raw(given, rows):
        if document.id:
            yield fraction, document
        elif not document.title and not document.text:
            rows.drop("no id and no text", f"passage {rows.read}")
        elif (name := content_id(document)) in seen:
            rows.drop("no id and the text of another passage", f"passage {rows.read}")
        else:
            seen.add(name)
            yield fraction, document._replace(id=name)


def _raw(given: CorpusInput, rows: RowCount) -> Iterator[tuple[Callable[[], float], Document]]:
    if given.format == "synthetic":
        synthetic = Synthetic.parse(given.spec)
        for row, document in enumerate(synthetic.documents(), start=1):
            rows.read += 1
            yield (lambda row=row: row / synthetic.passages), document  # type: ignore[misc]
        return
    total, before = max(given.size, 1), 0
    for path in given.paths:
        records, size = RecordReader(path, PASSAGES, COLUMNS, rows), path.stat().st_size

        def fraction(records: RecordReader = records, before: int = before, size: int = size) -> float:
            return (before + records.fraction * size) / total

        with closing(iter(records)) as numbered:
            for number, record in numbered:
                try:
                    found = list(FORMATS[given.format].documents(record))
                except (KeyError, TypeError, ValueError) as error:
                    rows.refuse(_mismatch(error, number, path, given.format))
                    continue
                rows.read -= 1  # a record may have several documents
                for document in found:
                    rows.read += 1
                    yield fraction, document
        before += size


def _mismatch(error: Exception, number: int, path: Path, name: str) -> UserError:
    return UserError(
        f"record {number} of {path} does not match the format {name!r}",
        why=f"no {error}" if isinstance(error, KeyError) else str(error),
        todo="fix it, or drop such rows: foray data convert --corpus --skip-invalid; the format is "
        f"{FORMATS[name].help}",
    )


def _split(words: int) -> Callable[[Document], Iterator[Document]]:
    """Yield passages of `words` words, the last one of a document shorter; white space becomes one space."""

    def split(document: Document) -> Iterator[Document]:
        parts = document.text.split()
        for k, start in enumerate(range(0, max(len(parts), 1), words)):
            text = " ".join(parts[start : start + words])
            yield document._replace(id=f"{document.id}#{k}", text=text)

    return split


def as_line(document: Document) -> bytes:
    """Return a passage as a line of the corpus. Lone surrogates become `?`."""
    record = {"id": document.id, "contents": document.contents, **document.fields}
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def write_corpus(given: CorpusInput, path: Path, tick: Tick) -> None:
    """Stream the input into `path`."""
    with path.open("wb", buffering=1 << 20) as file:
        for document in documents(given, tick):
            file.write(as_line(document))
