"""`python -m retriever.build`: arguments, then `build.build_index`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import UserError
from protocol.settings import read_tree, section
from retriever.build import build_index
from retriever.config import RetrieverSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 built, 2 when something needs a person."""
    parser = argparse.ArgumentParser(prog="python -m retriever.build", description="Build the index of a corpus.")
    parser.add_argument("--corpus", required=True, help="file or directory of passages, or synthetic:N:SEED")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--index", default="bm25", help="type of the index, e.g. bm25 or faiss_flat")
    parser.add_argument("--format", help="of the corpus; told by its first record otherwise")
    parser.add_argument("--words", type=int, help="cut documents into passages of so many words")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    parser.add_argument("--fresh", action="store_true", help="do not go on with an interrupted build")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the index, e.g. k1=1.2")
    args = parser.parse_intermixed_args(argv)
    overrides = [f"retriever.index.{item}" for item in (f"type={args.index}", *args.overrides)]
    try:
        settings = section(read_tree(None, overrides), "retriever", RetrieverSettings)
        build_index(
            args.corpus,
            args.out,
            settings.index,
            form=args.format,
            words=args.words,
            overwrite=args.overwrite,
            fresh=args.fresh,
            bar=sys.stderr.isatty(),
        )
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0
