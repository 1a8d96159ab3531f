"""`foray.serve`: what `foray serve` starts, as an object of this process."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from foray.api.callables import CallableServer, SearchEngine
from foray.api.inputs import search_overrides, server_of
from foray.api.searcher import Searcher
from protocol.errors import ForayError

LOG, TAIL = "serve.log", 4000


@dataclass
class PolicyServer(AbstractContextManager["PolicyServer"]):
    """A policy that answers OpenAI's clients until `close`, the end of a `with` block, or that of this process.

    url        base URL for clients, ends with /v1
    token      their API key
    models     names: the first searches and answers, the second is the policy alone
    directory  its files and its log
    process, search  what `close` ends: the server, and a search engine of this process
    """

    url: str
    token: str = field(repr=False)
    models: tuple[str, ...]
    directory: Path
    process: subprocess.Popen[str] = field(repr=False)
    search: CallableServer | None = field(repr=False)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, and what was started for it. Idempotent."""
        _stop(self.process, self.search)


def serve(
    policy: str | Path,
    *,
    name: str = "",
    search_engine: str | Path | Searcher | SearchEngine | None = None,
    port: int = 0,
    config: str | Path | None = None,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> PolicyServer:
    """Serve a policy to OpenAI's clients. Return when it answers.

    policy         run directory, checkpoint, or folder in Hugging Face layout (`foray serve` says more)
    name           of the model; the default is that of the directory
    search_engine  as of `foray.train_grpo`; None: the run's own
    port           0: a free one of 127.0.0.1
    config         settings for what is started; None: those of the run
    out            directory of its files; None: a temporary one
    overrides      settings, e.g. ["rollout.episode.max_turns=3"]

    Raises ForayError with the end of its log.
    """
    directory = Path(out) if out is not None else Path(mkdtemp(prefix="foray-serve-"))
    directory.mkdir(parents=True, exist_ok=True)
    search, token = server_of(search_engine, "em"), f"sk-{secrets.token_urlsafe(32)}"
    given = [*(search_overrides(search_engine, search) if search_engine is not None else ()), *overrides]
    words = [sys.executable, "-m", "foray", "serve", str(policy), *given, "--json", "--until-stdin-ends"]
    words += ["--port", str(port), "--dir", str(directory), *(["--name", name] if name else [])]
    words += ["--config", str(config)] if config is not None else []
    with (directory / LOG).open("ab") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"FORAY_SERVE_TOKEN": token},
            start_new_session=True,  # Ctrl-C in the notebook interrupts a call, not the server
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    except BaseException:
        _stop(process, search)
        raise
    if not line:
        _stop(process, search)
        said = (directory / LOG).read_text(errors="replace").strip()
        raise ForayError(f"foray serve failed:\n{said[-TAIL:]}")
    told = json.loads(line)
    return PolicyServer(told["url"], token, tuple(told["models"]), directory, process, search)


def _stop(process: subprocess.Popen[str], search: CallableServer | None) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()
    if search is not None:
        search.close()
