"""Put canary secrets wherever a run may have some, then search all of its output and files for them.

A whole run as `foray init --secure` makes it: tokens, Redis users, a run key. Beside it a provider's key in the
environment. The search is known to see: it finds the canaries where they belong, in the environment of the processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import learner.cli
import retriever.cli
import rollout_server.cli
import rollout_server.node.cli
from protocol import redaction
from protocol.codec import decode_as
from protocol.keys import Keys
from protocol.messages import EngineInfo
from protocol.runtime.http.auth import Access, engine_key
from rollout_server.node.guard import descendants
from tests.support.registered import registered_urls
from tests.support.waiting import wait_until

PROVIDER_KEY = "pr0vider-canary-6f2a9b1c"
SMALL = ("run.steps=100000", "run.groups_per_step=2", "run.group_size=2", "learner.checkpoint_every=2")
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Run:
    """A run in progress: its directory, its launcher, and all of its secrets by name."""

    directory: Path
    launcher: subprocess.Popen[str]
    secrets: dict[str, str]
    said: Path

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.directory / "run.json").read_text())
        return record

    def found_in(self, raw: bytes) -> set[str]:
        """Names of the secrets that `raw` holds, as they are or as escaped in a URL."""
        forms = {name: (value.encode(), quote(value, safe="").encode()) for name, value in self.secrets.items()}
        return {name for name, found in forms.items() if any(form in raw for form in found)}


def _foray(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "foray", *argv)
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def _planted(directory: Path) -> dict[str, str]:
    found = {"provider": PROVIDER_KEY}
    for path in sorted(directory.glob("*.env")):
        for name, value in re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE):
            login = re.search(r"://\w+:([^@]+)@", value)
            found[f"{path.stem} {name}"] = login[1] if login else value
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    from foray.demo.warmstart import new_model, save_model

    home = tmp_path_factory.mktemp("canary")
    save_model(new_model(0), home / "model")
    prepared = _foray("demo", "--prepare-only", "--dir", "run", "--model", "model", "run.id=demo", *SMALL, cwd=home)
    assert prepared.returncode == 0, prepared.stderr
    made = _foray("init", "run/demo.yaml", "--secure", "--no-tls", "--secrets", str(home / "secrets"), cwd=home)
    assert made.returncode == 0, made.stderr
    said = home / "said.txt"
    env = os.environ | {"SERPER_API_KEY": PROVIDER_KEY, "OMP_NUM_THREADS": "1"}
    overrides = (f"launch.secrets={home / 'secrets'}", "launch.redis=own")
    argv = [sys.executable, "-m", "foray", "up", "run/demo.yaml", *overrides]
    with said.open("w") as output:
        launcher = subprocess.Popen(argv, cwd=home, env=env, stdout=output, stderr=output, text=True)
    try:
        steps = home / "run" / "metrics.jsonl"
        wait_until(
            lambda: steps.exists() and steps.read_text().count("\n") >= 3, "the first steps", DEADLINE_S, said.read_text
        )
        yield Run(home / "run", launcher, _planted(home / "secrets"), said)
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_engines_of_a_run_with_tokens_answer_only_to_their_own_keys(run: Run) -> None:
    engine = _engine(run)
    token = run.secrets["node FORAY_NODE_TOKEN"]
    key = engine_key(Access({"node": token}), engine.id, engine.incarnation)
    ask = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    statuses = {
        name: _ask(f"{engine.url}/generate", {"Authorization": f"Bearer {value}"} if value else {}, ask)[0]
        for name, value in {"no token": "", "the token itself": token, "another's": key[::-1], "its key": key}.items()
    }
    assert statuses == {"no token": 401, "the token itself": 401, "another's": 401, "its key": 200}
    control = _ask(f"{engine.url}/pause_generation", {"Authorization": f"Bearer {key}"}, {"mode": "retract"})
    assert control[0] == 401, "only the node that launched it may pause it or change its weights"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_secret_leaves_a_run(run: Run) -> None:
    assert len(run.secrets) >= 12
    pids = [run.launcher.pid, *descendants(run.launcher.pid)]
    environs = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in pids}
    everywhere = set().union(*(run.found_in(raw) for raw in environs.values()))
    assert {"learner FORAY_RUN_KEY", "node FORAY_NODE_TOKEN", "rollout FORAY_REDIS_URL", "provider"} <= everywhere

    shown = {f"command line of {pid}": Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    assert any(b"rollout_server.cpu_engine" in raw for raw in shown.values())
    shown |= _asked(run)
    secured = f"launch.secrets={run.directory.parent / 'secrets'}"
    for argv in (
        ("status", "run", "--json"),
        ("doctor", "run/demo.yaml", "--json", secured),
        ("up", "run/demo.yaml", "--dry-run", "--json", secured),
        ("dlq", "list", "run", "--json"),
    ):
        done = _foray(*argv, cwd=run.directory.parent)
        assert done.stdout and "Traceback" not in done.stderr, done.stderr
        shown[" ".join(argv)] = (done.stdout + done.stderr).encode()
    _stop(run)
    shown["what the launcher said"] = run.said.read_bytes()
    files = [path for path in run.directory.rglob("*") if path.is_file() and not path.is_symlink()]
    # Redis' own files are among them: every key that there was, as it was written
    assert any("appendonly" in path.name for path in files) and any(path.name == "resolved.yaml" for path in files)
    shown |= {str(path): path.read_bytes() for path in files}
    leaks = {where: names for where, raw in shown.items() if (names := run.found_in(raw))}
    assert not leaks


def _asked(run: Run) -> dict[str, bytes]:
    """What the services answer, with and without a token, and what the engine's processes were given."""
    found: dict[str, bytes] = {}
    viewer = {"Authorization": f"Bearer {run.secrets['viewer FORAY_VIEWER_TOKEN']}"}
    for url in (*registered_urls(run.directory, "rollout"), *registered_urls(run.directory, "retriever")):
        for path in ("/health", "/ready", "/status", "/metrics", "/info", "/v1/episodes", "/v1/live", "/retrieve"):
            for headers in ({}, viewer):
                status, body = _ask(url + path, headers)
                found[f"{url}{path} {bool(headers)}"] = body
                assert headers or path in ("/health", "/ready") or status == 401
    return found


def _ask(url: str, headers: dict[str, str], body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers | {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def _engine(run: Run) -> EngineInfo:
    from deploy.run.redis_server import connect
    from deploy.secrets.env import redis_url_for

    url = redis_url_for(run.directory.parent / "secrets", "viewer", run.record["redis_url"])
    with connect(url) as client:
        raw = client.hget(Keys("demo").engine("engine-1"), "b")
    assert isinstance(raw, bytes)
    return decode_as(EngineInfo, raw)


def _stop(run: Run) -> None:
    run.launcher.send_signal(signal.SIGTERM)
    run.launcher.wait(60)


WRONG = [
    "ftp://user:{}@127.0.0.1/0",
    "redis://user:{}@127.0.0.1:notaport/0",
    "redis://user:{}@127.0.0.1:6379/0?timeout=1",
    "redis://user:{}@127.0.0.1:6379/no-number",
    "redis://user:{}@[::1/0",
]


@pytest.mark.parametrize("url", WRONG)
@pytest.mark.parametrize("main", [learner.cli.main, rollout_server.cli.main, rollout_server.node.cli.main])
def test_a_wrong_redis_url_is_explained_without_its_password(
    main: Any, url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    canary = "c4nary-password"
    from foray.demo.world import save_tokenizer

    save_tokenizer(tmp_path / "model")
    (tmp_path / "questions.jsonl").write_text('{"question": "q", "answers": ["a"]}\n')
    code = main([f"run.redis_url={url.format(canary)}", "run.model=model", "rollout.search.type=none"])
    said = capsys.readouterr()
    assert code == 2 and "error:" in said.err and canary not in said.err + said.out


def test_a_weak_token_stops_a_start_and_is_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORAY_NODE_TOKEN", "weak-canary")
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "x"}\n')
    assert retriever.cli.main([f"retriever.corpus={tmp_path / 'c.jsonl'}", "retriever.port=0"]) == 2
    said = capsys.readouterr().err
    assert "FORAY_NODE_TOKEN is too weak" in said and "weak-canary" not in said


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What one test has made this process remember is not the next one's; its log handler neither."""
    before, hook = set(redaction._known), sys.excepthook
    yield
    redaction._known.clear()
    redaction._known.update(before)
    sys.excepthook = hook
