"""Finding a Redis and starting one, with the real program."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import redis

from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.process import ManagedProcess
from deploy.run.redis_server import (
    MAX_SOCKET_PATH,
    check_server,
    child_url,
    connect,
    find_server,
    ping,
    redis_argv,
)
from protocol.errors import UserError
from protocol.runtime.net import free_port


def fake_server(directory: Path, name: str, version: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    path.chmod(0o755)
    return path


def start(directory: Path, url: str, children: list[ManagedProcess]) -> ManagedProcess:
    argv = redis_argv(find_server().path, directory, url, maxmemory_mb=32)
    child = ManagedProcess(ProcessSpec("redis", "redis", argv, directory / "redis.log", Ready.PING, url))
    children.append(child)
    deadline = time.monotonic() + 10
    while ping(url):
        assert child.poll() is None, child.tail()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return child


def test_a_server_on_the_path_comes_first(tmp_path: Path) -> None:
    path = fake_server(tmp_path, "valkey-server", "8.0.1")
    server = find_server(search_path=str(tmp_path))
    assert server.path == path and server.version == "8.0.1" and server.origin == "on PATH"


def test_a_server_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old = fake_server(tmp_path, "redis-server", "6.2.14")
    assert find_server(search_path=str(tmp_path)).path != old


def test_without_any_server_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.run.redis_server._wheel_binary", lambda: None)
    fake_server(tmp_path, "redis-server", "6.2.14")
    with pytest.raises(UserError) as caught:
        find_server(search_path=str(tmp_path))
    assert "older than 7.0" in caught.value.why and "apt-get install redis-server" in caught.value.todo


def test_the_child_listens_on_a_socket_keeps_its_data_and_refuses_when_full(
    tmp_path: Path, children: list[ManagedProcess]
) -> None:
    url = child_url(tmp_path)
    assert url == f"unix://{tmp_path}/redis.sock"
    first = start(tmp_path, url, children)
    client = connect(url)
    client.set("kept", "1")
    settings = client.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction" and settings["maxmemory"] == str(32 << 20)
    assert settings["appendonly"] == "yes" and settings["save"] == ""
    with pytest.raises(redis.ResponseError, match="maxmemory"):
        for index in range(64):
            client.set(f"big-{index}", b"x" * (1 << 20))
    client.flushdb()
    client.set("kept", "2")
    client.close()
    first.terminate()
    assert first.wait(5) and first.poll() == 0
    start(tmp_path, url, children)
    client = connect(url)
    assert client.get("kept") == b"2"
    client.close()


def test_a_path_too_long_for_a_socket_gives_a_loopback_port(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * MAX_SOCKET_PATH)
    deep.mkdir()
    assert child_url(deep).startswith("redis://127.0.0.1:")


def test_a_loopback_server_can_serve_a_run(redis_url: str) -> None:
    assert check_server(redis_url).startswith(("Valkey", "Redis"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:1/0", "no Redis answers"),
        ("unix:///nowhere.sock", "no Redis answers"),
        ("http://x", "not a Redis URL"),
    ],
)
def test_a_redis_that_is_away_or_misspelt_is_a_users_error(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_server(url)


def test_a_password_is_never_shown() -> None:
    with pytest.raises(UserError) as caught:
        check_server("redis://me:geheim@127.0.0.1:1/0")
    assert "geheim" not in caught.value.render()


def test_the_redis_verb_becomes_the_server(tmp_path: Path, children: list[ManagedProcess]) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    argv = (sys.executable, "-m", "foray", "redis", "--port", url.split(":")[2].split("/")[0], "--dir", str(tmp_path))
    child = ManagedProcess(ProcessSpec("redis", "redis", argv, tmp_path / "log", Ready.PING, url))
    children.append(child)
    deadline = time.monotonic() + 15
    while ping(url):
        assert child.poll() is None and time.monotonic() < deadline, child.tail()
        time.sleep(0.05)
    assert f"export FORAY_REDIS_URL={url}" in child.tail(100)
    child.terminate()
    assert child.wait(5) and child.poll() == 0


@pytest.mark.parametrize("name", ["a%41b", "what?", "with #space"])
def test_a_run_directory_may_have_any_name(tmp_path: Path, children: list[ManagedProcess], name: str) -> None:
    (tmp_path / name).mkdir()
    url = child_url(tmp_path / name)
    assert url.startswith("unix://")
    start(tmp_path / name, url, children)
    assert (tmp_path / name / "redis.sock").is_socket()
