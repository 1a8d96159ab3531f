"""Published third-party programs against Foray's services: `make test-peers`.

The clients run in an environment apart (`requirements/peers.txt`); the tests and the services run in the
project's. FORAY_PEERS_PYTHON names the other interpreter. `make test` and `make test-all` leave this folder out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CLIENT_S, START_S = 60.0, 60.0
Client = Callable[..., Any]


@pytest.fixture(scope="session")
def peer() -> Client:
    """`peer("verl_search", url, ...)` runs tests/peers/clients/verl_search.py with these arguments in the peers'
    environment, and returns the last line that it prints, read as JSON. AssertionError with its output if it fails.
    Arguments that are not text are passed as JSON."""
    python = os.environ.get("FORAY_PEERS_PYTHON")
    assert python, "run `make test-peers`: FORAY_PEERS_PYTHON names the interpreter that has the clients"

    def run(client: str, *arguments: object, timeout_s: float = CLIENT_S) -> Any:
        words = [word if isinstance(word, str) else json.dumps(word) for word in arguments]
        argv = [python, "-u", str(HERE / "clients" / f"{client}.py"), *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{client} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def did(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """`did("skyrl-gym 0.4.0 SearchToolGroup", "2 searches")`: the row of the table that the test stands for."""

    def note(client: str, what: str) -> None:
        record_property("client", client)
        record_property("did", what)

    return note


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[str]]:
    """`with serving("queue_limit=1") as url:` a retriever process over 40 passages, each with a word `number<i>` and
    further fields; the arguments are settings of the section `retriever`."""
    return lambda *settings: _retriever(tmp_path_factory.mktemp("retriever"), settings)


@pytest.fixture(scope="session")
def retriever(serving: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """The address of one for all tests."""
    with serving() as url:
        yield url


@contextmanager
def _retriever(folder: Path, given: tuple[str, ...]) -> Iterator[str]:
    corpus, port_file, log = folder / "corpus.jsonl", folder / "port", folder / "log"
    lines = [
        {
            "id": f"d{i}",
            "contents": f'"Title {i}"\nOf number{i} and more.',
            "title": f"Title {i}",
            "text": f"Of number{i} and more.",
            "url": f"https://example.org/{i}",
        }
        for i in range(40)
    ]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [f"retriever.corpus={corpus}", "retriever.port=0", "retriever.window_ms=1"]
    settings += ["retriever.index.type=faiss_flat", "retriever.index.encoder.type=hashed"]
    settings += [f"retriever.{setting}" for setting in given]
    argv = [sys.executable, "-m", "retriever", *settings, "--port-file", str(port_file)]
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:
        try:
            yield f"http://127.0.0.1:{port_of(process, port_file, log)}"
        finally:
            process.terminate()


def port_of(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> int:
    """What a service wrote into its port file. AssertionError with its log when it ended, or after START_S."""
    end = time.monotonic() + START_S
    while not (port_file.exists() and port_file.read_text().strip()):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    return int(port_file.read_text())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Each client and what it did; a test that failed before it could name its client, by its own name."""
    rows = []
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(outcome):
            told = dict(report.user_properties)
            if "client" in told or outcome != "passed":
                name = str(told.get("client", report.nodeid.rpartition("::")[2]))
                rows.append((name, outcome, str(told.get("did", ""))))
    if not rows:
        return
    terminalreporter.section("clients and servers of others")
    width = max(len(name) for name, _, _ in rows)
    for name, outcome, what in rows:
        terminalreporter.write_line(f"{name:<{width}}  {outcome:<7}  {what}")
