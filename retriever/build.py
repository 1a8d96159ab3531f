"""Corpus to index directory: `build_index`, and `python -m retriever.build`.

The directory appears by one rename when it is whole: a reader sees a complete index or none. A killed build leaves a
hidden directory `.NAME.building-*` beside it, which may be deleted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from protocol.errors import UserError
from protocol.settings import read_tree, section
from retriever.config import RetrieverSettings
from retriever.config_encoder import EncoderSettings
from retriever.config_index import IndexSettings
from retriever.corpus import CorpusScan, open_corpus
from retriever.index import store
from retriever.manifest import MANIFEST, Manifest, make_manifest, read_manifest

PROGRESS_EVERY_S = 2.0
ENCODE_CHUNK = 1024
"""Passages encoded at a time."""


def to_stderr(line: str) -> None:
    """Where progress goes unless told otherwise."""
    print(line, file=sys.stderr, flush=True)


def build_index(
    corpus: Path,
    out: Path,
    index: IndexSettings,
    *,
    overwrite: bool = False,
    progress: Callable[[str], None] = to_stderr,
) -> Manifest:
    """Stream `corpus` (jsonl) into a new index directory `out` and return its manifest.

    Raises UserError for a corpus that cannot be read or holds no passage, and for an `out` that exists, unless
    `overwrite`. When two builders race for the same `out` with equal results, both succeed.
    """
    out = out.absolute()
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already", todo="give --overwrite to replace it, or another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
    try:
        manifest = _fill(corpus, building, index, progress)
        _publish(building, out, manifest, overwrite=overwrite)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"built {manifest.type} over {manifest.passages:,} passages: {out} (fingerprint {manifest.fingerprint})")
    return manifest


def _fill(corpus: Path, directory: Path, index: IndexSettings, progress: Callable[[str], None]) -> Manifest:
    directory.chmod(0o755)  # mkdtemp's 0700 would lock out a service that runs as another user
    scan = CorpusScan(corpus, _Reporter(open_corpus(corpus).stat().st_size, progress))
    for _ in scan.texts():
        pass
    if not scan.num_passages:
        raise UserError(f"the corpus {corpus} holds no passage", todo='write {"id", "contents"} lines into it')
    index.build(_CorpusSource(corpus, scan.num_passages), directory)
    scan.save(directory)
    manifest = make_manifest(index.identity(), scan.num_passages, scan.num_bytes, scan.sha256, directory)
    (directory / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
    for path in [*directory.iterdir(), directory]:
        _fsync(path)
    return manifest


class _CorpusSource:
    """See `index.base.Source`."""

    def __init__(self, corpus: Path, num_passages: int) -> None:
        self._corpus, self.num_passages = corpus, num_passages

    def texts(self) -> Iterator[str]:
        return CorpusScan(self._corpus).texts()

    def vectors(self, settings: EncoderSettings, dtype: Literal["float32", "float16"], directory: Path) -> None:
        encoder = settings.build()
        matrix = store.create(directory, self.num_passages, encoder.dim, dtype)
        row, texts = 0, self.texts()
        while chunk := list(islice(texts, ENCODE_CHUNK)):
            matrix[row : row + len(chunk)] = encoder.encode_passages(chunk)
            row += len(chunk)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(building: Path, out: Path, manifest: Manifest, *, overwrite: bool) -> None:
    """Rename into place. What was there before is moved aside first and deleted last; open readers keep their files."""
    aside = building.with_name(building.name + ".old")
    if overwrite and out.exists():
        out.rename(aside)
    try:
        building.rename(out)
    except OSError:
        # somebody else was faster: fine when the result is the same
        if not out.is_dir() or read_manifest(out).fingerprint != manifest.fingerprint:
            raise
    _fsync(out.parent)
    shutil.rmtree(aside, ignore_errors=True)


class _Reporter:
    """One progress line every PROGRESS_EVERY_S seconds."""

    def __init__(self, total_bytes: int, emit: Callable[[str], None]) -> None:
        self._total, self._emit = max(total_bytes, 1), emit
        self._start = self._last = time.monotonic()

    def __call__(self, passages: int, num_bytes: int) -> None:
        now = time.monotonic()
        if now - self._last < PROGRESS_EVERY_S:
            return
        self._last = now
        done = num_bytes / self._total
        left = (now - self._start) * (1 - done) / max(done, 1e-9)
        rate = passages / (now - self._start)
        self._emit(f"{passages:,} passages, {done:.0%} of the corpus, {rate:,.0f} passages/s, about {left:.0f} s left")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 built, 2 when something needs a person."""
    parser = argparse.ArgumentParser(prog="python -m retriever.build", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help='file of {"id", "contents"} lines')
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--index", default="bm25", help="type of the index: bm25, faiss_flat or memory")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the index, e.g. k1=1.2")
    args = parser.parse_intermixed_args(argv)
    overrides = [f"retriever.index.{item}" for item in (f"type={args.index}", *args.overrides)]
    try:
        settings = section(read_tree(None, overrides), "retriever", RetrieverSettings)
        build_index(args.corpus, args.out, settings.index, overwrite=args.overwrite)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
