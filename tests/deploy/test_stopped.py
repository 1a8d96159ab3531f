"""Ctrl-C and SIGTERM: what is said, the exit code, and that the command that is named continues."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foray.evaluation.store import read_rows
from tests.support.file_server import file_server
from tests.support.waiting import wait_until

NUMBERS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
SLOW_BUILD = """
import sys, time
import retriever.indexing.build as build
from foray.cli import main
from retriever.encoder.hashed import HashedEncoder

build.JOURNAL_ROWS, build.ENCODE_CHUNK = 1, 64
plain = HashedEncoder.encode_passages

def encode_passages(self, texts):
    time.sleep(0.05)
    return plain(self, texts)

HashedEncoder.encode_passages = encode_passages
sys.exit(main(sys.argv[1:]))
"""


def stop(process: subprocess.Popen[str], number: signal.Signals, code: int) -> str:
    """Send the signal and return what the process said on stderr."""
    try:
        process.send_signal(number)
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code and "Traceback" not in said, said
    return said


def go_on(said: str) -> subprocess.CompletedProcess[str]:
    """Run the command that was named."""
    words = shlex.split(said.partition("continue with: ")[2].splitlines()[0])
    assert words[0] == "foray"
    argv = [sys.executable, "-m", "foray", *words[1:]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@NUMBERS
def test_an_index_that_is_built(tmp_path: Path, number: signal.Signals, code: int) -> None:
    out, journal = tmp_path / "an index", tmp_path / ".an index.building" / "journal.json"
    words = ["index", "build", "--corpus", "synthetic:8000", "--index", "memory", "--out", str(out)]
    argv = [sys.executable, "-c", SLOW_BUILD, *words, "encoder.dim=16"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: journal.exists() and "vectors.npy" in journal.read_text(), "rows are encoded", 60)
    said = stop(process, number, code)
    assert "progress is kept in" in said and not out.exists()
    assert "resuming at row" in go_on(said).stderr and out.is_dir()


@NUMBERS
def test_a_download(tmp_path: Path, number: signal.Signals, code: int) -> None:
    content = os.urandom(3 << 20)
    with file_server() as server:
        server.files["big.bin"], server.halt = content, 2 << 20
        argv = [sys.executable, "-m", "foray", "data", "get", f"{server.url}/big.bin", "--to", str(tmp_path / "to")]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        part = tmp_path / "to" / "big.bin.part"
        wait_until(lambda: part.exists() and part.stat().st_size >= 1 << 20, "a part has arrived", 60)
        said = stop(process, number, code)
        assert "are kept in" in said and str(part) in said and part.stat().st_size >= 1 << 20
        server.going.set()
        done = go_on(said)
        assert [given for _, _, given in server.requests] == ["", f"bytes={part_size(said, server.requests)}-"]
    assert done.stdout.strip() == str(tmp_path / "to" / "big.bin")
    assert (tmp_path / "to" / "big.bin").read_bytes() == content


def part_size(said: str, requests: list[tuple[str, str, str]]) -> int:
    size = int(requests[-1][2].removeprefix("bytes=").removesuffix("-"))
    assert size >= 1 << 20
    return size


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_the_phases_of_a_demo(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The phase waits for a file; the second call finds it."""
    argv = [sys.executable, "-c", PHASES, str(tmp_path), "demo-lm", "--dir", str(tmp_path / "a demo"), "--seed", "7"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: (tmp_path / "begun").exists(), "the phase runs", 60)
        process.send_signal(number)
        printed, said = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code and "[1/1] a long phase" in printed
    assert f"long was stopped; what is finished is in {tmp_path / 'a demo'}; " in said
    again = shlex.split(said.partition("continue with: ")[2].splitlines()[0])
    assert again == ["foray", *argv[4:]]
    (tmp_path / "go").touch()
    done = subprocess.run([*argv[:4], *again[1:]], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "the table" in done.stdout, done.stderr


PHASES = """
import sys
from pathlib import Path
from foray.cli import main
from benchmarks.demo_lm import command, results
from benchmarks.demo_lm.phases import Phase

here = Path(sys.argv[1])
wait = (
    "import time; from pathlib import Path\\n"
    f"here = Path({str(here)!r}); (here / 'begun').touch()\\n"
    "while not (here / 'go').exists(): time.sleep(0.02)"
)
command.find_data = lambda given: {}
command.prepare = lambda args, directory, data: directory.mkdir(exist_ok=True) or {"sizes": {"expected": "in a minute"}}
command.phases = lambda args, directory, data: [Phase("long", "a long phase", ("-c", wait))]
results.summary, results.write, results.results_text = lambda *_: {}, lambda *_: here, lambda _: "the table"
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@NUMBERS
def test_an_evaluation_of_an_endpoint(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The endpoint answers three questions and then nothing until it may."""
    endpoint = subprocess.Popen([sys.executable, "-c", ENDPOINT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert endpoint.stdout is not None
    url = endpoint.stdout.readline().strip()
    questions = tmp_path / "asked.jsonl"
    questions.write_text("".join(f'{{"id": "q{n}", "question": "{n} ?", "answers": ["a"]}}\n' for n in range(6)))
    out, words = tmp_path / "an evaluation", ["eval", url, "--suite", str(questions), "--methods", "direct"]
    argv = [sys.executable, "-m", "foray", *words, "--model", "m", "--concurrency", "1", "--out", str(out)]
    try:
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: out.exists() and len(read_rows(out)) == 3, "three are answered", 60)
        said = stop(process, number, code)
        assert "3 episodes are in" in said
        (tmp_path / "go").touch()
        go_on(said)
    finally:
        endpoint.kill()
        endpoint.communicate()
    assert [row["question_id"] for row in read_rows(out)] == [f"q{n}" for n in range(6)]


ENDPOINT = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

answered = 0

class Chat(BaseHTTPRequestHandler):
    def do_POST(self):
        global answered
        self.rfile.read(int(self.headers["Content-Length"]))
        while answered >= 3 and not (Path(sys.argv[1]) / "go").exists():
            time.sleep(0.02)
        answered += 1
        message = {"role": "assistant", "content": "<answer> a </answer>"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = json.dumps({"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        try:
            self.wfile.write(body.encode())
        except OSError:
            answered -= 1  # nobody waits for it any more

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""
