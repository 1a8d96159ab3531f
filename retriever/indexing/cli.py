"""Arguments of a build, for `python -m retriever.indexing` and `foray index build`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.config import read_tree, section
from protocol.runtime.progress import Progress
from protocol.runtime.service_cli import exit_code
from retriever.config import RetrieverSettings
from retriever.corpus.formats import FORMATS
from retriever.index.config import IndexSettings


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the corpus and the index type."""
    parser.add_argument("--corpus", help="file or directory of passages (JSON lines, JSON, parquet, TSV; also gzip) "
                        "or of HotpotQA, 2Wiki, MuSiQue questions; or synthetic:N:SEED")  # fmt: skip
    parser.add_argument("--index", metavar="TYPE", help="bm25 (default), memory, faiss_flat, faiss_hnsw, faiss_ivf, "
                        "faiss_ivfpq, faiss_gpu, torch_flat or hybrid")  # fmt: skip
    parser.add_argument("--format", help=f"corpus format: {', '.join(FORMATS)} (default: detect)")
    parser.add_argument("--words", type=int, help="split documents into passages of this many words")


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a build, except `key=value`."""
    add_corpus_arguments(parser)
    parser.add_argument("--out", type=Path, help="output directory")
    parser.add_argument("--overwrite", action="store_true", help="replace the directory if it exists")
    parser.add_argument("--fresh", action="store_true", help="discard an interrupted build instead of resuming it")
    parser.add_argument("--force", action="store_true", help="build even if disk or memory seem too small")


def index_settings(kind: str | None, overrides: Sequence[str]) -> IndexSettings:
    """Return the settings from `--index` and `key=value`. Raises UserError for invalid ones."""
    items = [f"type={kind or 'bm25'}", *overrides]
    keys = {item.partition("=")[0] for item in overrides}
    if any(key.startswith("encoder.") for key in keys) and "encoder.type" not in keys:
        items.append("encoder.type=hashed")  # the default, which is lost if one of its fields is overridden
    tree = read_tree(None, [f"retriever.index.{item}" for item in items])
    return section(tree, "retriever", RetrieverSettings).index


def build(args: argparse.Namespace, corpus: str, out: Path, index: IndexSettings) -> None:
    """Estimate, check disk and memory, and build. Raises UserError."""
    from retriever.indexing.build import build_index
    from retriever.indexing.input import read_input
    from retriever.indexing.plan import plan_build, refuse_if_too_large

    if args.words is not None and args.words < 1:
        raise UserError(f"--words {args.words}: must be at least 1")
    if out.exists() and not args.overwrite:
        raise UserError(f"{out} already exists", todo="add --overwrite to replace it, or set another --out")
    plan, progress = plan_build(read_input(corpus, args.format, args.words), index), Progress.on(sys.stderr)
    for line in plan.lines():
        progress(line)
    if not args.force:
        building = out.absolute().with_name(f".{out.name}.building")
        have = sum(path.stat().st_blocks * 512 for path in building.rglob("*") if path.is_file())
        refuse_if_too_large(plan, out, have=have)
    build_index(
        corpus,
        out,
        index,
        form=args.format,
        words=args.words,
        overwrite=args.overwrite,
        fresh=args.fresh,
        progress=progress,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if built, 2 for an error that you must fix."""
    parser = argparse.ArgumentParser(prog="python -m retriever.indexing", description="Build the index of a corpus.")
    add_build_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the index, e.g. k1=1.2")
    args = parser.parse_intermixed_args(argv)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if args.corpus is None or args.out is None:
        raise UserError("--corpus or --out is missing", todo="add --corpus FILE and --out DIR")
    build(args, args.corpus, args.out, index_settings(args.index, args.overrides))
