"""Whose a run directory is: its launcher's, a copy of another one, a run that shares its Redis."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from deploy.config import LaunchSettings
from deploy.launch import scale
from deploy.launch.scale import EngineScaler
from deploy.run.run_dir import (
    LOCK,
    RECORD,
    RESOLVED,
    Located,
    _vouched,
    hold,
    live_record,
    locate,
    read_configuration,
    read_record,
    write_record,
)
from deploy.run.snapshot import RunSnapshot
from foray.cli import main as foray
from foray.commands.watch.top import _looks
from foray.dashboard import source
from foray.dashboard.source import RunData
from protocol import events
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot
from protocol.run_meta import LINEAGE_FILE
from tests.support.registered import registered

HOLD = """
import signal, sys
from pathlib import Path
from deploy.run.run_dir import hold

class Stopped(BaseException): ...
def stop(*_): raise Stopped
signal.signal(signal.SIGTERM, stop)
try:
    with hold(Path(sys.argv[1])):
        print("held", flush=True)
        signal.pause()
except Stopped:
    sys.exit(7)
"""


def arguments(directory: Path) -> Namespace:
    return Namespace(given=[str(directory)], config=None)


@pytest.fixture
def run_dir(tmp_path: Path, redis_url: str) -> Path:
    """A run directory of run `test` in the session's Redis."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / RESOLVED).write_text(f"run: {{id: test, dir: {directory}, redis_url: '{redis_url}'}}\n")
    (directory / LINEAGE_FILE).write_text("a" * 32)
    write_record(directory, {"id": "test", "state": "running"})
    return directory


@pytest.fixture
def launcher(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher that has the lock, and has not written run.json."""
    argv = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_down_stops_the_launcher_that_has_the_lock_not_that_of_the_earlier_start(
    run_dir: Path, launcher: subprocess.Popen[str]
) -> None:
    with subprocess.Popen(["sleep", "300"]) as stranger:
        try:
            write_record(run_dir, {"id": "test", "pid": stranger.pid})
            assert foray(["down", str(run_dir)]) == 0
            assert launcher.wait(30) == 7 and stranger.poll() is None
        finally:
            stranger.kill()


@pytest.mark.parametrize("token", ["", "-1", "{host}:-1:1", "another-host:1:1", "{host}:{pid}:1"])
def test_down_signals_no_process_that_did_not_take_the_lock(
    run_dir: Path, launcher: subprocess.Popen[str], token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host = (run_dir / LOCK).read_text().split(":")[0]
    with subprocess.Popen(["sleep", "300"]) as stranger:
        try:
            (run_dir / LOCK).write_text(token.format(host=host, pid=stranger.pid))
            assert foray(["down", str(run_dir), "--timeout", "1"]) == 1
            assert "names no process of this machine" in capsys.readouterr().err
            assert launcher.poll() is None and stranger.poll() is None
        finally:
            stranger.kill()


def test_down_asks_a_launcher_on_another_host_through_redis(
    run_dir: Path, redis_socket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, keys = f"unix://{redis_socket}", Keys(f"down-{os.getpid()}")
    (run_dir / "resolved.yaml").write_text(f"run: {{id: {keys.run}, dir: {run_dir}, redis_url: '{url}'}}\n")
    record = {"id": keys.run, "state": "running"}
    write_record(run_dir, record)
    here = read_record(run_dir)["launcher"]
    (run_dir / RECORD).write_text(json.dumps(record | {"launcher": "another-host:1:1"}))
    scaler = EngineScaler(LaunchSettings(), SimpleNamespace(children={}), print, print, url, keys.run)  # type: ignore[arg-type]
    monkeypatch.setattr(scale, "LOOK_S", 0.0)
    monkeypatch.setattr(scale, "process_token", lambda: "another-host:1:1")
    with redis.Redis.from_url(url) as client:
        client.hset(keys.launcher, "stop", "another-host:1:0")
        client.xadd(keys.events, events.fields("node", "down", "stop-asked", "by a process that may add events"))
        client.expire(keys.events, 60)
        client.expire(keys.launcher, 60)
        assert scaler.tick() == [] and not scaler.stop_asked, "that was for an earlier start"
        assert foray(["down", str(run_dir), "--timeout", "0.2"]) == 1, "it is asked, and it does not end"
        assert "the launcher (on another host)" in capsys.readouterr().err
        assert scaler.tick() == [] and scaler.stop_asked
    (run_dir / RECORD).write_text(json.dumps(record | {"launcher": here, "state": "stopped"}))
    assert foray(["down", str(run_dir)]) == 0 and "nothing was running" in capsys.readouterr().out


def test_a_second_launcher_is_refused_with_the_pid_of_the_first(run_dir: Path, launcher: subprocess.Popen[str]) -> None:
    with pytest.raises(UserError, match=f"launcher process {launcher.pid}"), hold(run_dir):
        pass


def test_a_record_is_live_while_the_launcher_that_wrote_it_runs(run_dir: Path) -> None:
    assert not live_record(run_dir)
    with hold(run_dir):
        assert live_record(run_dir)["id"] == "test"
        shutil.copytree(run_dir, run_dir.with_name("copy"))
        assert not live_record(run_dir.with_name("copy"))
        record = json.loads((run_dir / RECORD).read_text())
        (run_dir / RECORD).write_text(json.dumps(record | {"launcher": "of an earlier start"}))
        assert not live_record(run_dir)


def test_a_copy_does_not_show_or_change_the_original(
    run_dir: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = run_dir.with_name("copy")
    shutil.copytree(run_dir, copy)
    for words in (["status"], ["dlq", "list"], ["top", "--once"]):
        assert foray([*words, str(copy)]) == 2
        assert f"{copy} is a copy of the run directory {run_dir}" in capsys.readouterr().err
    data = RunData(locate(arguments(copy), without_redis=True))
    assert data.snapshot()[0].error and not data.snapshot()[0].engines
    assert foray(["dlq", "list", str(run_dir)]) == 0
    shutil.rmtree(run_dir)
    assert foray(["dlq", "list", str(copy)]) == 0, "it was moved"


def test_the_socket_of_a_run_moves_with_its_directory(tmp_path: Path) -> None:
    was, now = tmp_path / "was", tmp_path / "now"
    now.mkdir()
    (now / RESOLVED).write_text(f"run: {{dir: {was}, redis_url: 'unix://{was}/redis/redis.sock'}}\n")
    assert read_configuration(now / RESOLVED, now)["run"]["redis_url"] == f"unix://{now}/redis/redis.sock"


def test_a_run_that_took_the_id_over_is_not_shown_or_changed_as_this_one(
    run_dir: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    client.hset(Keys("test").meta, mapping={"lineage_id": "b" * 32, "dir": "/theirs"})
    assert foray(["status", str(run_dir)]) == 1
    assert "another run named 'test' (lineage bbbbbbbb, run.dir /theirs)" in capsys.readouterr().out
    assert foray(["dlq", "list", str(run_dir)]) == 2
    assert "another run named 'test'" in capsys.readouterr().err


def test_a_restart_moves_what_dashboard_and_top_ask(
    run_dir: Path, client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FRESH_S", 0.0)
    found = locate(arguments(run_dir))
    record = json.loads((run_dir / RECORD).read_text())
    (run_dir / RECORD).write_text(json.dumps(record | {"launcher": "of an earlier start"}))
    (run_dir / RESOLVED).write_text((run_dir / RESOLVED).read_text().replace(redis_url, "redis://127.0.0.1:1/0"))
    data, looks = RunData(locate(arguments(run_dir))), _looks(locate(arguments(run_dir)), 0.01)
    assert data.snapshot()[0].error and next(looks)[0].error and not data.retrievers()
    (run_dir / RESOLVED).write_text((run_dir / RESOLVED).read_text().replace("redis://127.0.0.1:1/0", redis_url))
    with hold(run_dir):
        write_record(run_dir, {"id": "test"})
        with registered(redis_url, "test", "retriever", "http://127.0.0.1:2"):
            assert data.found.redis_url == found.redis_url and not next(looks)[0].error
            assert [one["url"] for one in data.retrievers()] == ["http://127.0.0.1:2"]


def forged(run_dir: Path, url: str) -> Located:
    """Return the run as located after somebody named another Redis in the files of the directory."""
    (run_dir / RESOLVED).write_text(f"run: {{id: test, dir: {run_dir}, redis_url: '{url}'}}\n")
    return locate(arguments(run_dir))


def test_tokens_go_nowhere_for_a_redis_that_only_files_of_the_directory_name(
    run_dir: Path, redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = RunSnapshot("test", "", processes=(MetricsSnapshot(process="rollout", id="r", text={"url": "http://x:1"}),))
    assert locate(arguments(run_dir)).urls(seen, "rollout") == ["http://x:1"], "this machine's Redis"
    away = "redis://evil.example:6379/0"
    assert forged(run_dir, away).urls(seen, "rollout") == ["http://x:1"], "no token to lose"
    monkeypatch.setenv("FORAY_OPERATOR_TOKEN", secrets.token_urlsafe(32))
    assert forged(run_dir, away).urls(seen, "rollout") == []
    named = locate(Namespace(given=[str(run_dir), f"run.redis_url={away}"], config=None))
    assert named.urls(seen, "rollout") == ["http://x:1"], "named by the user"


@pytest.mark.parametrize(
    ("recorded", "own", "sent_to"),
    [
        ("redis://evil:1/0", "redis://v:p@mine:2/0", "redis://mine:2/0"),
        ("redis://mine:1/0", "redis://v:p@mine:2/0", "redis://mine:1/0"),
        ("unix:///r/redis.sock", "redis://v:p@mine:2/0", "unix:///r/redis.sock"),
        # its certificate authority, not that of the record
        ("rediss://node7:1/0?ssl_ca_certs=/evil", "rediss://v:p@mine:2/0?ssl_ca_certs=/ca", "rediss://node7:1/0?ssl_ca_certs=/ca"),
        ("redis://evil:1/0", "rediss://v:p@mine:2/0?ssl_ca_certs=/ca", "rediss://evil:1/0?ssl_ca_certs=/ca"),
    ],
)  # fmt: skip
def test_a_password_goes_only_where_the_record_can_do_no_harm(recorded: str, own: str, sent_to: str) -> None:
    assert _vouched(recorded, own) == sent_to
