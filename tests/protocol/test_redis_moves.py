"""A Redis that moves: the URL in a file, read at each connection, by clients with and without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from protocol.errors import UserError
from protocol.keys import Keys
from protocol.runtime.http.auth import Access
from protocol.runtime.http.server import service_host
from protocol.runtime.net import free_port, local_address
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.redis.client import connect
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.redis.url import parse_redis_url, place_of, redacted, with_login
from tests.support.private_redis import redis_at


class Moving:
    """Redis servers one after the other, each with a password of its own, and the file that names the current one."""

    def __init__(self, folder: Path, held: ExitStack) -> None:
        self.folder, self.held, self.path = folder, held, folder / "redis.url"
        self.url = f"file://{self.path}"
        self.at = 0

    def start(self) -> None:
        self.stop()
        self.at += 1
        port, home = free_port(), self.folder / str(self.at)
        home.mkdir()
        self.held.enter_context(redis_at(home, "--port", str(port), "--appendonly", "no"))
        with redis.Redis(port=port) as client:
            client.set("here", self.at)
            client.config_set("requirepass", f"password-{self.at}")
        self.path.write_text(f"redis://:password-{self.at}@127.0.0.1:{port}/0\n")

    def stop(self) -> None:
        self.held.close()


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    with ExitStack() as held:
        yield Moving(tmp_path, held)


async def test_clients_find_a_redis_that_moved_at_their_next_connection(moving: Moving) -> None:
    moving.start()
    client, other = RedisClient(moving.url, Keys("r")), connect(moving.url)
    try:
        assert await client.batch(("GET", "here")) == [b"1"] and other.get("here") == b"1"
        moving.stop()
        with pytest.raises(RedisUnavailable):
            await client.batch(("GET", "here"))
        moving.path.unlink()
        with pytest.raises(RedisUnavailable, match="cannot read"):
            await client.batch(("GET", "here"))
        with pytest.raises(redis.ConnectionError):
            other.get("here")
        moving.start()
        assert await client.batch(("GET", "here")) == [b"2"] and other.get("here") == b"2"
    finally:
        await client.aclose()
        other.close()


def test_a_login_in_the_url_goes_before_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "with space"
    url = f"file://{tmp_path}/with%20space"
    assert with_login(url, "node", "p/w") == f"file://node:p%2Fw@{tmp_path}/with%20space", "it need not exist yet"
    path.write_text("rediss://node7:7000/0?ssl_ca_certs=/ca.pem\n")
    found = parse_redis_url(with_login(url, "node", "p/w"))
    assert (found.hosts, found.username, found.password) == ((("node7", 7000),), "node", "p/w")
    assert found.moves and found.verifies and not found.is_loopback
    assert place_of(with_login(url, "node", "p/w")) == url and "p/w" not in redacted(with_login(url, "node", "p/w"))


@pytest.mark.parametrize("text", ["", "unix:///s", "file:///x", "redis+sentinel://a/b", "redis://a:b:c", "\xff"])
def test_a_file_without_the_url_of_a_server_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "url").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="is not a Redis URL"):
        parse_redis_url(f"file://{tmp_path}/url")
    with pytest.raises(UserError, match="is not a Redis URL"):
        parse_redis_url(f"file://{tmp_path}/none")


def test_a_service_listens_on_the_route_to_redis_if_it_has_a_token(caplog: pytest.LogCaptureFixture) -> None:
    away, token = "redis://192.0.2.1:6379/0", Access({"node": "t" * 40})  # TEST-NET-1: nothing is sent
    try:
        route = local_address("192.0.2.1")
    except OSError:
        pytest.skip("this machine has no route")
    assert service_host("", away, token, "x.host") == route
    for redis_url in ("", "unix:///s", "redis://127.0.0.1:1/0"):
        assert service_host("", redis_url, token, "x.host") == "127.0.0.1"
    assert service_host("10.1.2.3", away, Access(), "x.host") == "10.1.2.3", "as given; it is refused where it binds"
    assert not caplog.text
    assert service_host("", away, Access(), "x.host") == "127.0.0.1" and "or set x.host" in caplog.text
    with pytest.raises(UserError, match="address of this host"):
        service_host("", "redis://no.such.host.invalid/0", token, "x.host")


async def test_a_cancelled_call_leaves_a_client_that_connects_again(moving: Moving) -> None:
    moving.start()
    client = RedisClient(moving.url, Keys("r"))
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.batch(("BLPOP", "nothing", 5))
        moving.start()
        assert await client.batch(("GET", "here")) == [b"2"]
    finally:
        await client.aclose()
