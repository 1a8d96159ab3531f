"""Arguments of a build: `python -m retriever.indexing`, and the same of `foray index build`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.config import read_tree, section
from protocol.runtime.service_cli import exit_code
from retriever.config import RetrieverSettings
from retriever.index.config import IndexSettings
from retriever.indexing.progress import to_stderr


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """What is indexed, and by which index."""
    parser.add_argument("--corpus", help="file or directory of passages (JSON lines, JSON, parquet, TSV; gzip or not) "
                        "or of HotpotQA, 2Wiki, MuSiQue questions; or synthetic:N:SEED")  # fmt: skip
    parser.add_argument("--index", metavar="TYPE", help="bm25 (default), memory, faiss_flat, faiss_hnsw, faiss_ivf, "
                        "faiss_ivfpq, faiss_gpu or hybrid")  # fmt: skip
    parser.add_argument("--format", help="of the corpus: contents, title_text, hotpotqa or musique; detected otherwise")
    parser.add_argument("--words", type=int, help="cut documents into passages of this many words")


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of a build, except `key=value`."""
    add_corpus_arguments(parser)
    parser.add_argument("--out", type=Path, help="directory to make")
    parser.add_argument("--overwrite", action="store_true", help="replace the directory if it exists")
    parser.add_argument("--fresh", action="store_true", help="do not go on with an interrupted build")
    parser.add_argument("--force", action="store_true", help="build although disk or memory seem too small")


def index_settings(kind: str | None, overrides: Sequence[str]) -> IndexSettings:
    """Return the settings that `--index` and `key=value` say. UserError for what they cannot mean."""
    items = [f"type={kind or 'bm25'}", *overrides]
    keys = {item.partition("=")[0] for item in overrides}
    if any(key.startswith("encoder.") for key in keys) and "encoder.type" not in keys:
        items.append("encoder.type=hashed")  # the default, which an override of one of its fields would hide
    tree = read_tree(None, [f"retriever.index.{item}" for item in items])
    return section(tree, "retriever", RetrieverSettings).index


def build(args: argparse.Namespace, corpus: str, out: Path, index: IndexSettings) -> None:
    """Estimate, refuse what does not fit, build. Raises UserError."""
    from retriever.indexing.build import build_index
    from retriever.indexing.input import read_input
    from retriever.indexing.plan import plan_build, refuse_if_too_large

    if args.words is not None and args.words < 1:
        raise UserError(f"--words {args.words}: a passage has at least one word")
    if out.exists() and not args.overwrite:
        raise UserError(f"{out} exists already", todo="give --overwrite to replace it, or another --out")
    plan = plan_build(read_input(corpus, args.format, args.words), index)
    for line in plan.lines():
        to_stderr(line)
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
        bar=sys.stderr.isatty(),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 built, 2 when something needs a person."""
    parser = argparse.ArgumentParser(prog="python -m retriever.indexing", description="Build the index of a corpus.")
    add_build_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the index, e.g. k1=1.2")
    args = parser.parse_intermixed_args(argv)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if args.corpus is None or args.out is None:
        raise UserError("it is not said what to index", todo="give --corpus FILE and --out DIR")
    build(args, args.corpus, args.out, index_settings(args.index, args.overrides))
