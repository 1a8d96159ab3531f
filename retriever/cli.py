"""`python -m retriever --config FILE [retriever.port=8001 ...]`: parse, then serve.

Nothing heavy is imported before the settings have been read: `--help` and a misspelt key answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.command_line import add_config_arguments, config_and_overrides
from protocol.runtime.config import read_tree, section
from protocol.runtime.log import start_logging
from retriever.config import RetrieverSettings


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m retriever") -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 when the settings, the corpus or the index need a person."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve a corpus and its index, or an online engine, over HTTP: Search-R1's POST /retrieve, "
        "ReSearch's POST /search and /batch_search, POST /v1/embeddings, GET /health, /ready, /metrics, /info.",
    )
    add_config_arguments(parser, "YAML file; the section `retriever` is read", "retriever.port=8001")
    parser.add_argument("--port-file", type=Path, help="write the port here, atomically, once requests are answered")
    args = parser.parse_intermixed_args(argv)
    # FAISS's and torch's threads wait for each other by spinning unless told otherwise when their libraries are loaded:
    # where anything else runs on the cores, a search by two threads took 8 times the processor time of one (measured)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    start_logging(os.environ, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = section(read_tree(*config_and_overrides(args)), "retriever", RetrieverSettings)
        from retriever.server import serve

        asyncio.run(serve(settings, port_file=args.port_file))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return 0
