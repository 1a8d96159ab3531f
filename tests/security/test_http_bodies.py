"""Request bodies cost a service no more time or memory than their bytes: none is decompressed, none may be slow."""

from __future__ import annotations

import ast
import asyncio
import http.client
import os
import threading
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fuzz_watch import Service

from rollout_server.cpu_engine.server.admin import ABSENT

ROOT = Path(__file__).resolve().parents[2]
INFLATED = 1 << 30
TOKEN = "n0de-0123456789-abcdefghijklmnopqrs"
POSTS = {"retriever": "/retrieve", "rollout": "/v1/episodes", "engine": "/generate"}
CPU_S, MEMORY_MB = 1.0, 100.0
"""What three bombs and the probes beside them may cost. To inflate one takes more than a second."""


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A gigabyte of "a" as a megabyte of gzip, made of one compressed block many times."""
    piece, checksum = b"a" * (1 << 20), 0
    maker = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = maker.compress(piece) + maker.flush(zlib.Z_FULL_FLUSH)
    for _ in range(INFLATED // len(piece)):
        checksum = zlib.crc32(piece, checksum)
    trailer = b"\x03\0" + checksum.to_bytes(4, "little") + INFLATED.to_bytes(4, "little")
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + block * (INFLATED // len(piece)) + trailer


@pytest.mark.slow
def test_a_gzip_bomb_costs_nothing_and_stops_nothing(service: Service, bomb: bytes) -> None:
    post = POSTS[service.kind]
    cpu, grown, statuses = _cost(service, [post, "/no/such/path", post], bomb)
    assert cpu < CPU_S and grown < MEMORY_MB, (cpu, grown)
    assert statuses == [415] * 3


@pytest.mark.slow
def test_a_gzip_bomb_without_the_token_costs_nothing(bomb: bytes) -> None:
    with Service("retriever", env={"FORAY_NODE_TOKEN": TOKEN}) as locked:
        cpu, grown, statuses = _cost(locked, ["/retrieve"] * 3, bomb)
        assert cpu < CPU_S and grown < MEMORY_MB, (cpu, grown)
        assert statuses == [401] * 3
        assert _send(locked, "/retrieve", bomb, Authorization=f"Bearer {TOKEN}") == 415


def _cost(service: Service, paths: list[str], body: bytes) -> tuple[float, float, list[int]]:
    """(CPU seconds of the process, MiB by which its memory grew at its peak, statuses) of one body to each path."""
    peak, cpu = _peak_mb(service.pid, reset=True), _cpu_s(service.pid)
    with _probing(service) as answered:
        statuses = [_send(service, path, body) for path in paths]
    assert set(answered) == {200}, "/health beside it"
    return _cpu_s(service.pid) - cpu, _peak_mb(service.pid) - peak, statuses


def _send(service: Service, path: str, body: bytes, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    try:
        kinds = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        connection.request("POST", path, body, kinds | headers)
        return connection.getresponse().status
    finally:
        connection.close()


@contextmanager
def _probing(service: Service) -> Iterator[list[int]]:
    """Asks for /health again and again while the block runs, and at least once; the statuses."""
    statuses: list[int] = []
    over = threading.Event()

    def probe() -> None:
        while not statuses or not over.wait(0.05):
            with urllib.request.urlopen(f"{service.url}/health", timeout=60) as answer:
                statuses.append(answer.status)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield statuses
    finally:
        over.set()
        thread.join()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int, *, reset: bool = False) -> float:
    """Highest resident memory since the last reset."""
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def test_what_is_not_compressed_says_so_or_nothing(service: Service) -> None:
    for encoding, accepted in (("identity", True), ("Identity", True), ("br", False), ("gzip, identity", False)):
        status = _send(service, POSTS[service.kind], b"{}", **{"Content-Encoding": encoding})
        assert (status == 400) == accepted and status in (400, 415), encoding


@pytest.mark.slow
async def test_a_body_that_drips_is_ended(service: Service) -> None:
    """One byte at a time to every route that takes a body, all at once: 408, or an answer without the body."""
    paths = [path for path, methods in service.document()["paths"].items() if "post" in methods]
    statuses = dict(zip(paths, await asyncio.gather(*(_drip(service.port, path) for path in paths)), strict=True))
    bodiless = {"/flush_cache", *ABSENT}
    assert {path for path, status in statuses.items() if status != 408} <= bodiless, statuses
    assert statuses[POSTS[service.kind]] == 408


async def _drip(port: int, path: str) -> int:
    """Status of a request that is sent byte by byte until the server ends the connection; 0: it waits for more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 5000")
    writer.write("\r\n".join((*head, "", "{")).encode())

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.2)

    dripping = asyncio.create_task(drip())
    try:
        async with asyncio.timeout(20):
            status = int((await reader.readline()).split()[1])
            try:
                await reader.read()
            except ConnectionError:
                pass
            return status
    except TimeoutError:
        return 0
    finally:
        dripping.cancel()
        writer.close()


TEST_SERVERS = ("fake_server.py", "fake_service.py", "testing.py")


def test_no_application_of_ours_inflates_bodies() -> None:
    """Each is made with SERVER_OPTIONS, but for the scripted servers of tests and benchmarks."""
    applications = []
    for package in ("protocol", "retriever", "rollout_server", "learner", "deploy", "foray"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if path.name in TEST_SERVERS or "bench" in path.parts or "Application(" not in text:
                continue
            for call in ast.walk(ast.parse(text)):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("web.Application", "Application"):
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                    applications.append(path.name)
                    assert given.get("handler_args") == "SERVER_OPTIONS", path
    assert len(applications) >= len(POSTS)
