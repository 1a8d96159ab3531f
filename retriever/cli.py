"""`python -m retriever --config FILE [retriever.port=8001 ...]`: parse, then serve.

Heavy imports follow after the settings are read, so that `--help` and errors in keys appear immediately.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence

from protocol.runtime.config import SettingsTree, section
from protocol.runtime.service_cli import add_config_arguments, add_port_file_argument, run_service
from protocol.settings import REDIS_URL_VARIABLE, RunSettings
from retriever.config import RetrieverSettings


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m retriever") -> int:
    """Return the exit status: 0 after SIGTERM or SIGINT, 2 for an error in the settings, the corpus or the index."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve a corpus and its index, or a web search engine, over HTTP: Search-R1's POST /retrieve, "
        "ReSearch's POST /search and /batch_search, POST /v1/embeddings, GET /health, /ready, /metrics, /info.",
    )
    add_config_arguments(parser, "YAML file; the sections `retriever` and `run` are read", "retriever.port=8001")
    add_port_file_argument(parser)
    return run_service(parser, argv, _serve)


def _serve(args: argparse.Namespace, tree: SettingsTree) -> None:
    # FAISS's and torch's threads wait for each other by spinning unless configured otherwise before their libraries are
    # loaded: with other load on the cores, a search by two threads took 8 times the CPU time of one (measured)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = section(tree, "retriever", RetrieverSettings)
    run = section(tree, "run", RunSettings)
    from retriever.server import serve

    known = run.redis_url or os.environ.get(REDIS_URL_VARIABLE)
    asyncio.run(serve(settings, run.with_redis(os.environ) if known else None, port_file=args.port_file))
