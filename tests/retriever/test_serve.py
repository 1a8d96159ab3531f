"""The process: quick to start, says where it listens, ends on SIGTERM, explains what is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from retriever.cli import main


def launch(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "retriever", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_process_starts_quickly_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    corpus, config, port_file = tmp_path / "c.jsonl", tmp_path / "run.yaml", tmp_path / "port"
    corpus.write_text("".join(json.dumps({"id": i, "contents": f"T{i}\nword{i} of text"}) + "\n" for i in range(300)))
    config.write_text(f"retriever:\n  corpus: {corpus}\n  port: 8000\n  topk: 2\n")
    start = time.monotonic()
    process = launch("--config", config, "retriever.port=0", "--port-file", port_file)
    try:
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() - start < 15
            time.sleep(0.01)
        took = time.monotonic() - start
        port = int(port_file.read_text())
        body = json.dumps({"queries": ["word7"]}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/retrieve", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.load(response)["result"][0][0]["id"] == "7"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=15)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert f"listening on http://127.0.0.1:{port}" in log
    # 0.7 s on a quiet machine; the bound leaves room for a busy one
    assert took < 30


@pytest.mark.slow
def test_a_taken_port_is_explained(corpus: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = launch(f"retriever.port={port}", f"retriever.corpus={corpus}")
        _, log = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["retriever.prot=1"], "did you mean 'port'?"),
        (["retriever.index.type=bm52"], "bm25"),
        (["--config", "absent.yaml"], "cannot read the configuration file"),
        (["retriever.corpus=absent.jsonl", "retriever.port=0"], "/absent.jsonl\n  why: No such file"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("module", ["retriever.cli", "retriever.indexing.cli"])
def test_help_and_mistakes_import_nothing_heavy(module: str) -> None:
    code = (
        f"import sys; from {module} import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "try: main(['--corpus', 'a', '--out', 'b', 'x'] if 'indexing' in sys.argv[1] else ['retriever.prot=1'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'aiohttp', 'transformers', 'faiss', 'bm25s', 'pyarrow', 'prometheus_client'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_a_search_do_not_spin_by_default(given: dict[str, str], expected: str) -> None:
    code = "import os; from retriever.cli import main; main(['retriever.prot=1']); print(os.environ['OMP_WAIT_POLICY'])"
    env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=env)
    assert done.stdout.strip() == expected, done.stderr


def test_the_service_does_without_the_libraries_of_a_build() -> None:
    code = (
        "import sys, retriever.server; sys.exit(str({'pyarrow', 'torch', 'faiss', 'bm25s', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stderr.strip() == "set()"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "absent"), [("bm25", "faiss"), ("memory", "faiss"), ("faiss_flat", "bm25s")])
def test_an_index_imports_only_its_own_library(corpus: Path, kind: str, absent: str) -> None:
    code = (
        "import sys\nfrom retriever.config import RetrieverSettings as S\n"
        "from retriever.backends.index import open_searcher\n"
        f"open_searcher(S.model_validate(dict(corpus=sys.argv[1], index=dict(type='{kind}')))).search(['x'], 1)\n"
        f"assert '{absent}' not in sys.modules and 'torch' not in sys.modules and 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(corpus)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
