"""Build a retriever's index: `foray index build --corpus FILE --out DIR [--index bm25] [k1=1.2 ...]`.

`foray index build --config FILE` takes corpus, directory and kind of index from a run's configuration, which is what
its retrievers will look for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from protocol.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray index`."""
    parser.add_argument("action", choices=["build"], help="what to do")
    parser.add_argument("--config", type=Path, help="take everything from this run's section `retriever`")
    parser.add_argument("--corpus", type=Path, help='JSON lines of {"id", "contents"}')
    parser.add_argument("--out", type=Path, help="directory to make")
    parser.add_argument("--index", help="bm25 (default), faiss_flat or memory")
    parser.add_argument("--overwrite", action="store_true", help="replace the directory if it exists")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --config: retriever.corpus=...; "
                        "otherwise settings of the index: k1=1.2")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """0 when the index was built; raises UserError for what a person must mend."""
    from deploy.config import load
    from protocol.settings import read_tree, section
    from retriever.config import RetrieverSettings

    if args.config is not None:
        if args.corpus or args.out or args.index:
            raise UserError("--config already says corpus, directory and kind", todo="override: retriever.corpus=...")
        settings = load(args.config, args.overrides).retriever
        out = settings.index_path
    elif args.corpus is None or args.out is None:
        raise UserError("it is not said what to index", todo="give --corpus FILE and --out DIR, or --config FILE")
    else:
        items = [f"type={args.index or 'bm25'}", *args.overrides]
        tree = read_tree(None, [f"retriever.index.{item}" for item in items])
        settings = section(tree, "retriever", RetrieverSettings).model_copy(update={"corpus": args.corpus})
        out = args.out
    from retriever.build import build_index

    build_index(settings.corpus, out, settings.index, overwrite=args.overwrite)
    print(out)
    return 0
