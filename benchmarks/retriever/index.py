"""Input of the retriever benchmark: an existing or a new index, and distinct queries."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.base import Say
from benchmarks.retriever.settings import RetrieverBench
from protocol.errors import UserError
from retriever.config import RetrieverSettings
from retriever.index.config import FaissFlatSettings

QUERY_WORDS = 8
TRIES = 20
"""Maximum draws per query; then the corpus counts as too small."""


def index_of(bench: RetrieverBench, directory: Path, say: Say) -> RetrieverSettings:
    """Return settings to serve the index in `bench.index_dir`, or a new one in `directory`."""
    if not bench.index_dir:
        say(f"building faiss_flat over {bench.passages:,} synthetic passages")
        return synthetic_index(bench.passages, directory / "index", say)
    from retriever.index import store

    settings = served(Path(bench.index_dir))
    if settings.index.type != "faiss_flat" or not (settings.index_path / store.FILE).is_file():
        raise UserError(
            f"{bench.index_dir} is not a faiss_flat index with its own vectors",
            why="bare FAISS must search exactly the same vectors",
            todo="build one with `foray index build --index faiss_flat`, and give its directory",
        )
    return settings


def synthetic_index(passages: int, directory: Path, say: Say) -> RetrieverSettings:
    """Return settings to serve a new faiss_flat index over `passages` generated passages."""
    from retriever.indexing.build import build_index

    build_index(f"synthetic:{passages}", directory, FaissFlatSettings(), progress=say)
    return served(directory)


def served(directory: Path) -> RetrieverSettings:
    """Return settings to serve a built index as it was built."""
    from retriever.corpus.manifest import corpus_of, settings_of

    return RetrieverSettings(corpus=corpus_of(directory, None), index_dir=directory, index=settings_of(directory))


def distinct_queries(settings: RetrieverSettings, count: int, seed: int = 0) -> tuple[list[str], int]:
    """Return `count` distinct queries of eight consecutive words of a passage, and the number of passages.

    Raises UserError if the corpus is too small.
    """
    from retriever.corpus.corpus import Corpus

    corpus = Corpus(settings.corpus, settings.index_path)
    draw = random.Random(seed)
    queries: dict[str, None] = {}
    for _ in range(TRIES * count):
        if len(queries) == count:
            break
        words = corpus.passage(draw.randrange(len(corpus))).text.split()
        start = draw.randrange(max(1, len(words) - QUERY_WORDS + 1))
        if query := " ".join(words[start : start + QUERY_WORDS]):
            queries[query] = None
    if len(queries) < count:
        raise UserError(
            f"{settings.corpus} yields only {len(queries)} of {count} distinct queries",
            todo="use more passages, or fewer clients, turns and burst queries",
        )
    return list(queries), len(corpus)
