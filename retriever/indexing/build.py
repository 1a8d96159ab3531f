"""Build an index directory from a corpus: `build_index`, and `python -m retriever.indexing`.

    corpus --(convert)--> corpus.jsonl --(scan)--> offsets, ids, SHA-256 --(encode)--> vectors --(index)--> rename

The directory appears by one rename when it is complete: readers see a complete index or none. Until then everything is
in `.NAME.building` beside it; after a kill the same command resumes there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.runtime.files import FREE_SPACE, is_full, sha256_file
from protocol.runtime.progress import Progress, TaskProgress
from retriever.corpus.corpus import SCAN_FILES, CorpusScan, open_offsets, read_texts, scan_corpus
from retriever.corpus.manifest import MANIFEST, Manifest, input_facts, make_manifest, read_manifest
from retriever.encoder import build_encoder, encoder_identity
from retriever.encoder.base import Encoder, Vectors
from retriever.encoder.config import EncoderSettings
from retriever.index import index_identity, store, write_index
from retriever.index.config import IndexSettings
from retriever.indexing.input import CORPUS, CorpusInput, read_input, write_corpus
from retriever.indexing.workdir import JOURNAL, BuildDirectory, BuildJournal, files_in

ENCODE_CHUNK = 1024
"""Passages encoded at a time."""
JOURNAL_ROWS, JOURNAL_S = 8192, 5.0
"""Rows, or seconds, after which encoded rows are made durable: the maximum loss by a kill."""


def build_index(
    corpus: Path | str,
    out: Path,
    index: IndexSettings,
    *,
    form: str | None = None,
    words: int | None = None,
    overwrite: bool = False,
    fresh: bool = False,
    progress: Callable[[str], None],
) -> Manifest:
    """Stream `corpus` into a new index directory `out` and return its manifest.

    corpus     a file or directory of passages (see `formats`), or `synthetic:N:SEED`
    form       its format; None: detected from the first record
    words      cut longer documents into passages of this many words
    overwrite  replace the existing index once the new one is complete
    fresh      discard an interrupted build of `out`; otherwise resume it as far as it matches
    progress   a Progress, or a function that prints a line

    Raises UserError for a corpus that cannot be read or has no passage, and for an existing `out` without `overwrite`.
    If several processes build the same `out`, one builds and the others wait; those with the same settings then
    succeed.
    """
    given, out = read_input(corpus, form, words), out.absolute()
    if out.exists() and not overwrite:
        raise _exists(out)
    if any(path.resolve().is_relative_to(out.resolve()) for path in given.paths):
        given = replace(given, in_place=False)  # the corpus is in the directory that will be replaced: copy it
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from None
    with BuildDirectory(out, progress) as workdir:
        if out.exists() and not overwrite:
            return _made_meanwhile(workdir, given, index)
        manifest = _Build(given, workdir, index, Progress.of(progress)).run(fresh=fresh)
    progress(f"built {manifest.type} over {manifest.passages:,} passages: {out} (fingerprint {manifest.fingerprint})")
    return manifest


def _unwritable(out: Path, error: OSError) -> UserError:
    todo = FREE_SPACE if is_full(error) else "make the directory writable"
    why = error.strerror or ("the disk is full" if is_full(error) else str(error))
    return UserError(f"cannot write the index {out}", why=why, todo=todo)


def _exists(out: Path) -> UserError:
    return UserError(f"{out} already exists", todo="add --overwrite to replace it, or set another --out")


def _made_meanwhile(workdir: BuildDirectory, given: CorpusInput, index: IndexSettings) -> Manifest:
    """Return the manifest of the `out` that another process built meanwhile. Raises UserError if it is another
    index."""
    workdir.discard()
    found = read_manifest(workdir.out)
    same = found.index == index_identity(index) and found.source == _source(given)
    if same and given.in_place:
        same = found.corpus_bytes == given.size and found.corpus_sha256 == sha256_file(given.paths[0])
    if not same:
        raise _exists(workdir.out)
    return found


def _source(given: CorpusInput) -> dict[str, Any]:
    """Return the origin for the manifest. A file that is indexed in place is described there itself."""
    return given.describe() | (input_facts(given.paths) if given.paths and not given.in_place else {})


class _Build:
    """One build in a locked directory."""

    def __init__(self, given: CorpusInput, workdir: BuildDirectory, index: IndexSettings, progress: Progress) -> None:
        self._given, self._workdir, self._index, self._progress = given, workdir, index, progress
        self._directory = workdir.directory
        self._corpus = given.paths[0] if given.in_place else workdir.directory / CORPUS

    def run(self, *, fresh: bool) -> Manifest:
        """Fill the directory and publish it. After an error, resumable work is kept."""
        journal = self._open_journal(fresh=fresh)
        try:
            scan = self._scanned(journal)
            if not self._is_built(journal):
                source = BuildSource(self._corpus, self._directory, scan, journal, self._progress)
                with showing_index_log(self._progress):
                    write_index(self._index, source, self._directory)
                self._workdir.sync()
                journal.built(index_identity(self._index))
            if self._given.stamp() != journal.input:
                raise UserError(f"{self._given.spec} changed while it was indexed", todo="run the build again")
            manifest = self._manifest(scan)
        except BaseException as error:
            if journal.vector_files:
                self._progress(f"progress is kept in {self._directory}: run the same command to resume")
            else:
                self._workdir.discard()
            if isinstance(error, OSError):
                raise _unwritable(self._workdir.out, error) from error
            raise
        self._workdir.publish(without=JOURNAL)
        return manifest

    def _is_built(self, journal: BuildJournal) -> bool:
        """Return whether only the checksums of an earlier build are missing."""
        return journal.index is not None and journal.index == index_identity(self._index)

    def _open_journal(self, *, fresh: bool) -> BuildJournal:
        """Return the journal of an interrupted build; delete everything that cannot be reused."""
        journal = BuildJournal(self._directory)
        if fresh or not self._fits(journal):
            self._workdir.clear(keep=set())
            return BuildJournal(self._directory)
        if not self._is_built(journal):
            self._workdir.clear(keep={JOURNAL, CORPUS, *SCAN_FILES} | journal.vector_files)
        return journal

    def _fits(self, journal: BuildJournal) -> bool:
        """Return whether the scan of an interrupted build matches the current corpus."""
        was, now = journal.input, self._given.stamp()
        if was is None:
            return False
        if was == now:
            return True
        same_name = {key: was.get(key) for key in self._given.describe()} == self._given.describe()
        if same_name and self._given.in_place and journal.scan["sha256"] == sha256_file(self._corpus):
            journal.restamped(now)  # copied or touched
            return True
        self._progress(f"the interrupted build of {self._workdir.out} used another corpus: starting from the beginning")
        return False

    def _scanned(self, journal: BuildJournal) -> CorpusScan:
        if journal.input is not None:
            self._progress(f"resuming an interrupted build of {self._workdir.out}")
            return CorpusScan(**journal.scan)
        stamp = self._given.stamp()
        if not self._given.in_place:
            with self._progress.task("convert", unit="passages") as task:
                write_corpus(self._given, self._corpus, lambda share, passages: task(passages, share))
        total = max(self._corpus.stat().st_size, 1)
        with self._progress.task("scan", unit="passages") as task:
            scan = scan_corpus(self._corpus, self._directory, lambda end, passages: task(passages, end / total))
        if not scan.passages:
            raise UserError(f"the corpus {self._given.spec} has no passages", todo='add {"id", "contents"} lines')
        journal.scanned(stamp, asdict(scan))
        return scan

    def _manifest(self, scan: CorpusScan) -> Manifest:
        manifest = make_manifest(
            self._directory,
            index=self._index,
            scan=scan,
            corpus=str(self._corpus) if self._given.in_place else CORPUS,
            source=_source(self._given),
            files=[name for name in files_in(self._directory) if name not in (JOURNAL, MANIFEST)],
        )
        (self._directory / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest


@contextmanager
def showing_index_log(progress: Progress) -> Iterator[None]:
    """Show the log messages of index builds: `"%d of %d ..."` of passages becomes a pass, others a line."""
    logger = logging.getLogger("retriever.index")
    before = logger.level, logger.propagate
    with ExitStack() as passes:
        handler = _IndexLog(progress, passes)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]


class _IndexLog(logging.Handler):
    _STEP = "%d of %d passages "

    def __init__(self, progress: Progress, passes: ExitStack) -> None:
        super().__init__()
        self._progress, self._passes = progress, passes
        self._name = ""
        self._pass: TaskProgress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith(self._STEP) or not isinstance(record.args, tuple):
            self._progress(record.getMessage())
            return
        name = str(record.msg).removeprefix(self._STEP)
        done, total = (int(str(value)) for value in record.args)
        if self._pass is None or self._name != name:
            self._passes.close()  # the previous step is over
            task = self._progress.task(f"index: {name.removeprefix('are ')}", total, "passages")
            self._name, self._pass = name, self._passes.enter_context(task)
            self._pass(0)
        self._pass(done)


class BuildSource:
    """The scanned corpus as `index.base.PassageSource`: texts by streaming, vectors by a resumable pass of the encoder.

    Rows are encoded in chunks that begin at multiples of ENCODE_CHUNK, also after an interruption, so that a resumed
    build writes the same bytes. Plain writes are used instead of a memory map, so that a full disk raises OSError
    instead of SIGBUS, and dirty pages do not count as the builder's memory.

    directory  the building directory, with the scan's files
    """

    def __init__(
        self, corpus: Path, directory: Path, scan: CorpusScan, journal: BuildJournal, progress: Progress
    ) -> None:
        self._corpus, self._directory, self._scan = corpus, directory, scan
        self._journal, self._progress = journal, progress

    @property
    def num_passages(self) -> int:
        """Return the number of rows of the index."""
        return self._scan.passages

    def texts(self) -> Iterator[str]:
        """Yield the contents of every passage in the order of its row, from the start."""
        with (
            self._progress.task("texts", self.num_passages, "passages") as task,
            closing(read_texts(self._corpus)) as texts,
        ):
            for row, text in enumerate(texts):
                if row % ENCODE_CHUNK == 0:
                    task(row)
                yield text
            task(self.num_passages)

    def vectors(self, settings: EncoderSettings, dtype: Literal["float32", "float16"], directory: Path) -> None:
        """See `index.base.PassageSource`."""
        path = directory / store.FILE
        name = path.relative_to(self._directory).as_posix()
        encoder = build_encoder(settings)
        identity: dict[str, object] = {
            "corpus": self._scan.sha256,
            "encoder": encoder_identity(settings),
            "shape": [self.num_passages, encoder.dim],
            "dtype": dtype,
        }
        done = self._rows_done(name, path, identity)
        matrix = store.create(directory, self.num_passages, encoder.dim, dtype)
        data_at = matrix.offset if isinstance(matrix, np.memmap) else 0
        del matrix
        task = self._progress.task("vectors", self.num_passages, "passages")
        with path.open("r+b", buffering=0) as file, task as report:
            file.seek(data_at + done * encoder.dim * np.dtype(dtype).itemsize)
            self._encode(
                encoder, np.dtype(dtype), done, file.fileno(), _DurableRows(self._journal, name, identity), report
            )

    def _rows_done(self, name: str, path: Path, identity: dict[str, object]) -> int:
        """Return the number of rows that an earlier build encoded from the same corpus with the same encoder."""
        was, rows = self._journal.rows(name)
        if not rows or not path.exists():
            return 0
        if was != identity:
            changed = ", ".join(key for key in identity if was.get(key) != identity[key])
            self._progress(f"discarding {rows:,} rows of {name} ({changed} changed): starting from the beginning")
            path.unlink()
            return 0
        self._progress(f"resuming at row {rows:,} of {self.num_passages:,} of {name}")
        return rows

    def _encode(
        self,
        encoder: Encoder,
        dtype: np.dtype[np.generic],
        row: int,
        fd: int,
        durable: _DurableRows,
        report: TaskProgress,
    ) -> None:
        report(row)
        if row == self.num_passages:
            return
        with closing(read_texts(self._corpus, int(open_offsets(self._directory)[row]))) as texts:
            while chunk := list(islice(texts, ENCODE_CHUNK)):
                block = encoder.encode_passages(chunk)
                _check(block, row, len(chunk), encoder.dim)
                _write(fd, np.ascontiguousarray(block, dtype=dtype))
                row += len(chunk)
                durable.written(row, fd, last=row == self.num_passages)
                report(row)
        if row != self.num_passages:
            raise UserError(f"{self._corpus} changed while it was indexed", todo="run the build again")


def _check(block: Vectors, row: int, count: int, dim: int) -> None:
    if block.shape != (count, dim) or not np.isfinite(block).all():
        raise UserError(
            f"the encoder's vectors of rows {row} to {row + count - 1} are invalid",
            why=f"shape {block.shape}, expected ({count}, {dim}), or non-finite values",
            todo="check the encoder's model and dtype",
        )


class _DurableRows:
    """Periodically makes rows durable and records them in the journal."""

    def __init__(self, journal: BuildJournal, name: str, identity: dict[str, object]) -> None:
        self._journal, self._name, self._identity = journal, name, identity
        self._rows, self._time = 0, time.monotonic()

    def written(self, row: int, fd: int, *, last: bool) -> None:
        """Record that the rows before `row` have been written to `fd`."""
        now = time.monotonic()
        if not last and row - self._rows < JOURNAL_ROWS and now - self._time < JOURNAL_S:
            return
        os.fdatasync(fd)
        self._journal.wrote(self._name, self._identity, row)
        self._rows, self._time = row, now


def _write(fd: int, block: npt.NDArray[Any]) -> None:
    left = block.data.cast("B")
    while left:
        left = left[os.write(fd, left) :]
