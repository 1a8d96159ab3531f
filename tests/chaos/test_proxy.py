"""Each kind of bad weather has its effect, and counts it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from proxy import FAIR, Links, Weather
from resp import Commands, words

PING = b"*1\r\n$4\r\nPING\r\n"
PUBLISH = b"*3\r\n$5\r\nFCALL\r\n$13\r\nforay_publish\r\n$4\r\n1\r\n2\r\n"


class Echo:
    """A server that says +OK to every command, and remembers what it was sent."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                end, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(end,), daemon=True).start()

    def _answer(self, end: socket.socket) -> None:
        parser = Commands()
        with end:
            while True:
                try:
                    data = end.recv(65536)
                except OSError:
                    return
                if not data:
                    return
                self.heard += data
                for _ in parser.feed(data):
                    end.sendall(b"+OK\r\n")


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.close()


@pytest.fixture
def links(echo: Echo) -> Iterator[Links]:
    with Links() as links:
        links.add("x", echo.port)
        yield links


def talk(links: Links, data: bytes = PING, timeout_s: float = 3.0) -> bytes:
    """The answer; b"" when the connection was closed, "reset" or "silence" where that is what came."""
    try:
        with socket.create_connection(("127.0.0.1", links.links["x"].port), timeout=timeout_s) as end:
            end.sendall(data)
            return end.recv(100)
    except ConnectionError:
        return b"reset"
    except TimeoutError:
        return b"silence"


def test_fair_weather_passes_everything(links: Links) -> None:
    assert talk(links) == b"+OK\r\n"


def test_a_link_that_is_down_resets_and_comes_back(links: Links) -> None:
    links.set("x", Weather(down=True))
    assert talk(links) in (b"reset", b"") and links.counts("x")["refused"] == 1
    links.set("x", FAIR)
    assert talk(links) == b"+OK\r\n"


def test_open_connections_are_cut_when_the_link_goes_down(links: Links) -> None:
    with socket.create_connection(("127.0.0.1", links.links["x"].port), timeout=3) as end:
        end.sendall(PING)
        assert end.recv(100) == b"+OK\r\n"
        links.set("x", Weather(down=True))
        with pytest.raises(ConnectionResetError):
            end.recv(100)
    assert links.counts("x")["reset"] >= 1


def test_a_partition_is_silent_and_what_it_held_arrives_afterwards(links: Links, echo: Echo) -> None:
    with socket.create_connection(("127.0.0.1", links.links["x"].port), timeout=0.2) as end:
        end.sendall(PING)
        assert end.recv(100) == b"+OK\r\n"
        links.set("x", Weather(hole=True))
        end.sendall(PING)
        with pytest.raises(TimeoutError):
            end.recv(100)
        assert links.counts("x")["held"] == len(PING) and len(echo.heard) == len(PING)
        links.set("x", FAIR)
        end.settimeout(3)
        assert end.recv(100) == b"+OK\r\n"


def test_a_cut_reply_means_that_the_command_went_through(links: Links, echo: Echo) -> None:
    links.set("x", Weather(cut_reply=b"foray_publish"))
    assert talk(links) == b"+OK\r\n", "other commands are answered"
    assert talk(links, PUBLISH) in (b"reset", b"")
    assert bytes(echo.heard).endswith(PUBLISH) and links.counts("x")["reply_cut"] == 1
    assert talk(links, PUBLISH) == b"+OK\r\n", "only once"
    assert links.last_publish("x") == PUBLISH


def test_a_limit_breaks_a_command_in_the_middle(links: Links, echo: Echo) -> None:
    links.set("x", Weather(limit=20))
    assert talk(links, PUBLISH) in (b"reset", b"") and links.counts("x")["cut_in_the_middle"] == 1
    assert len(echo.heard) <= 20


def test_latency_is_late(links: Links) -> None:
    links.set("x", Weather(latency_s=0.1))
    began = time.monotonic()
    assert talk(links) == b"+OK\r\n" and time.monotonic() - began > 0.19 and links.counts("x")["late"] == 2


def test_commands_are_cut_out_of_pieces() -> None:
    parser, stream, found = Commands(), PING + PUBLISH + PING, []
    for at in range(0, len(stream), 3):
        found += parser.feed(stream[at : at + 3])
    assert found == [PING, PUBLISH, PING]
    assert words(PUBLISH, 2) == [b"FCALL", b"foray_publish"]
