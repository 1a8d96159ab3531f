"""Build, inspect, verify, search or size a search index.

    foray index build --corpus FILE --out DIR [--index bm25] [k1=1.2 ...]   build an index or resume its build
    foray index build --config run.yaml                     build the index that the retrievers of a run need
    foray index estimate --corpus FILE [--index faiss_hnsw] estimate disk, memory and time; --passages N needs no corpus
    foray index info DIR                                    show the corpus and settings of an index
    foray index verify DIR [--full | --quick]               check its files, and that it finds its own passages
    foray index search DIR "QUERY" ["QUERY" ...] [-k 3]     print hits, best first

Instead of DIR, --config FILE uses the index of that run. `--corpus synthetic:1000000` generates text from a seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.terminal import at_least
from protocol.errors import UserError

if TYPE_CHECKING:
    from retriever.config import RetrieverSettings


def subcommands() -> dict[str, str]:
    """Return name -> help."""
    return {
        "build": "Build the index of a corpus, or resume an interrupted build.",
        "estimate": "Estimate disk, memory and time of a build.",
        "info": "Show the corpus and the settings of an index.",
        "verify": "Check the files of an index, and that it finds its own passages.",
        "search": "Search an index and print hits, best first.",
    }


def configure(parser: argparse.ArgumentParser, action: str) -> None:
    """Add the arguments of `foray index ACTION`."""
    from retriever.indexing.cli import add_build_arguments, add_corpus_arguments

    parser.set_defaults(out=None, index=None)
    parser.add_argument("--config", type=Path, help="use the section `retriever` of this configuration")
    if action == "build":
        add_build_arguments(parser)
    elif action == "estimate":
        add_corpus_arguments(parser)
    else:
        parser.add_argument("--corpus", help="the corpus, if it has moved since the index was built")
    if action != "build":
        parser.add_argument("--json", action="store_true", help="print JSON")
    if action == "estimate":
        parser.add_argument("--passages", type=at_least(1), help="number of passages, instead of a corpus")
        parser.add_argument("--dim", type=at_least(1), help="dimension of the vectors, if only the model defines it")
        parser.add_argument("--encode-rate", type=float, help="passages/s of the encoder (default: measured)")
    if action == "search":
        parser.add_argument("-k", type=at_least(1), default=3, help="hits per query (default: 3)")
    if action == "verify":
        parser.add_argument("--full", action="store_true", help="check every vector")
        parser.add_argument("--quick", action="store_true", help="check sizes only, no checksums")
    if action in ("search", "verify"):
        # not positional: a query may contain `=`
        parser.add_argument("--set", action="append", default=[], metavar="key=value",
                            help="another setting of the index, e.g. nprobe=64")  # fmt: skip
    words = {"build": "key=value", "estimate": "key=value", "search": "DIR QUERY"}.get(action, "DIR")
    text = "settings of the index, e.g. k1=1.2; with --config overrides, e.g. retriever.corpus=..."
    parser.add_argument("rest", nargs="*", metavar=words, help=text if words == "key=value" else "index directory")


def run(args: argparse.Namespace) -> int:
    """Return 0 on success. Raises UserError for what the user must correct."""
    return _ACTIONS[args.action](args)


def _of_config(args: argparse.Namespace, overrides: list[str]) -> RetrieverSettings:
    from deploy.config import load_config

    if args.corpus or args.out or args.index:
        raise UserError("--config already sets corpus, directory and type", todo="override them: retriever.corpus=...")
    return load_config(args.config, overrides).retriever


def _build(args: argparse.Namespace) -> int:
    from retriever.indexing.cli import build, index_settings

    if args.config is not None:
        settings = _of_config(args, args.rest)
        corpus, out, index = str(settings.corpus), settings.index_path, settings.index
    elif args.corpus is None or args.out is None:
        raise UserError(
            "no corpus or no output directory is given", todo="give --corpus FILE and --out DIR, or --config FILE"
        )
    else:
        corpus, out, index = args.corpus, args.out, index_settings(args.index, args.rest)
    build(args, corpus, out, index)
    print(out)
    return 0


def _estimate(args: argparse.Namespace) -> int:
    from retriever.indexing.cli import index_settings
    from retriever.indexing.estimate import CorpusStats
    from retriever.indexing.input import read_input
    from retriever.indexing.plan import constants, dim_of, make_plan, plan_build

    if args.config is not None:
        settings = _of_config(args, args.rest)
        corpus, index = str(settings.corpus), settings.index
    else:
        corpus, index = args.corpus, index_settings(args.index, args.rest)
    if args.passages is not None:
        dim = args.dim if args.dim is not None else dim_of(index)
        if dim is None:
            raise UserError(
                "the dimension of the vectors is unknown without the model", todo="give --dim, e.g. --dim 768"
            )
        plan = make_plan(index, CorpusStats(args.passages, exact=True, converted=False), dim, args.encode_rate)
    elif corpus is None:
        raise UserError("no corpus is given", todo="give --corpus FILE, --passages N or --config FILE")
    else:
        plan = plan_build(read_input(corpus, args.format, args.words), index, args.encode_rate)
    if args.json:
        print(json.dumps(plan.as_dict() | {"constants": constants()}, indent=2))
        return 0
    for line in [*plan.lines(), "  rates used    " + ", ".join(f"{k} {v:g}/s" for k, v in constants().items())]:
        print(line)
    return 0


def _place(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Return (directory of the index, configured corpus); remove the directory from the remaining arguments."""
    if args.config is not None:
        settings = _of_config(args, [])
        return settings.index_path, settings.given_corpus
    if not args.rest:
        raise UserError("no index directory is given", todo=f"foray index {args.action} DIR")
    return Path(args.rest.pop(0)), None if args.corpus is None else Path(args.corpus)


def _nothing_else(args: argparse.Namespace) -> None:
    if args.rest:
        raise UserError(
            f"foray index {args.action} takes one directory", why="further arguments: " + " ".join(args.rest)
        )


def _info(args: argparse.Namespace) -> int:
    from retriever.corpus.manifest import read_manifest

    directory, _ = _place(args)
    _nothing_else(args)
    manifest = read_manifest(directory)
    if args.json:
        print(json.dumps({"directory": str(directory), **manifest.model_dump(), "bytes": manifest.index_bytes}))
        return 0
    from protocol.runtime.progress import amount

    print(f"{directory}: {manifest.type} over {manifest.passages:,} passages, {amount(manifest.index_bytes)}")
    print(f"  fingerprint  {manifest.fingerprint} (format {manifest.format})")
    print(f"  corpus       {manifest.corpus}, {amount(manifest.corpus_bytes)}, sha256 {manifest.corpus_sha256[:16]}..")
    print("  made from    " + ", ".join(f"{key} {value}" for key, value in manifest.source.items() if value))
    for key, value in manifest.index.items():
        print(f"  {key:<11}  {json.dumps(value) if isinstance(value, dict | list) else value}")
    for name, size in manifest.files.items():
        print(f"  {amount(size):>11}  {name}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from protocol.runtime.progress import Progress
    from retriever.indexing.verify import verify_index

    directory, corpus = _place(args)
    _nothing_else(args)
    found = verify_index(
        *(directory, Progress.on(sys.stderr)), corpus=corpus, full=args.full, quick=args.quick, changes=_changes(args)
    )
    print(json.dumps({"directory": str(directory), "ok": True, "found": found}) if args.json else "\n".join(found))
    return 0


def _changes(args: argparse.Namespace) -> dict[str, object]:
    from protocol.runtime.config import read_tree

    tree = read_tree(None, [f"retriever.index.{item}" for item in args.set])
    changes: dict[str, object] = tree.get("retriever", {}).get("index", {})
    return changes


def _search(args: argparse.Namespace) -> int:
    from retriever.corpus.corpus import Corpus
    from retriever.corpus.manifest import check_manifest, corpus_of, read_manifest, settings_of
    from retriever.index import index_identity, open_index

    directory, configured = _place(args)
    if not args.rest:
        raise UserError("no query is given", todo='foray index search DIR "QUERY" -k 3')
    path, settings = corpus_of(directory, configured), settings_of(directory, _changes(args))
    check_manifest(read_manifest(directory), directory, index_identity(settings), path, verify_corpus=False)
    corpus = Corpus(path, directory)
    hits = open_index(settings, directory, threads=0).search(args.rest, args.k)
    for query, rows, scores in zip(args.rest, hits.rows.tolist(), hits.scores.tolist(), strict=True):
        found = [(corpus.passage(row), score) for row, score in zip(rows, scores, strict=True) if row >= 0]
        if args.json:
            listed = [{"id": p.id, "title": p.title, "score": score, "contents": p.contents} for p, score in found]
            print(json.dumps({"query": query, "hits": listed}, ensure_ascii=False))
            continue
        print(query)
        for place, (passage, score) in enumerate(found, start=1):
            print(f"  {place}. {score:.4f}  {passage.title}  (id {passage.id})")
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "build": _build,
    "estimate": _estimate,
    "info": _info,
    "verify": _verify,
    "search": _search,
}
