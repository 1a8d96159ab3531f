"""Listening addresses: a service without tokens cannot be reached from another machine."""

from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from learner.observability.metrics_server import metrics_page, serve_prometheus
from learner.weights.process_group import BroadcastGroup, Rendezvous
from protocol.errors import UserError
from protocol.messages import MetricsSnapshot
from protocol.runtime.net import free_port, interface_to, local_address
from protocol.runtime.torch_safety import gloo_at, interface_variables

TOKEN = "v1ewer-0123456789-abcdefghijklmnop"


def _listeners(port: int) -> set[str]:
    """Local addresses, as the kernel writes them, of sockets of ours that listen on `port`."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, at = local.partition(":")
            if state == "0A" and int(at, 16) == port:
                found.add(address)
    return found


def test_the_update_group_meets_at_its_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    port = free_port("127.0.0.1")
    group = BroadcastGroup(Rendezvous("g", "127.0.0.1", port, 1, "gloo", 20.0, 20.0))
    try:
        assert _listeners(port) == {"0100007F"}, "torch's own store would listen on every interface"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        assert "GLOO_SOCKET_IFNAME" not in os.environ, "other groups of this process choose for themselves"
    finally:
        group.close()


@pytest.fixture
def outside() -> str:
    """The address of this machine on the way to another one. TEST-NET-1 of RFC 5737: nothing is sent there."""
    try:
        return local_address("192.0.2.1")
    except OSError:
        pytest.skip("this machine has no route")


def test_the_interface_is_that_of_the_route(outside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_to("127.0.0.1") == interface_to("localhost") == "lo"
    name = interface_to("192.0.2.1")
    assert name in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert interface_to(outside) == name
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert interface_variables(outside) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    assert interface_variables(outside) == {"GLOO_SOCKET_IFNAME": name}
    assert interface_variables("127.0.0.1") == {} == interface_variables("no.such.host.invalid")


def test_gloo_listens_on_the_interface_of_the_address(outside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for address, wanted in (("127.0.0.1", "lo"), (outside, interface_to(outside))):
        with gloo_at(address):
            assert os.environ["GLOO_SOCKET_IFNAME"] == wanted
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    group = BroadcastGroup(Rendezvous("g", outside, free_port(outside), 1, "gloo", 20.0, 20.0))
    group.close()


def test_a_taken_meeting_port_is_an_error_and_no_second_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError, match="cannot listen on"):
        port = taken.getsockname()[1]
        BroadcastGroup(Rendezvous("g", "127.0.0.1", port, 1, "gloo", 5.0, 5.0))


def _text() -> bytes:
    now = MetricsSnapshot(process="learner", id="l", uptime_s=1.0, values={"step": 3.0}, waits={"groups": 2.0})
    return metrics_page("r", lambda: now).text()


@pytest.fixture
def serve() -> Iterator[Callable[[str], int]]:
    """Answers at a host; the port."""
    with ExitStack() as stack:

        def begin(host: str) -> int:
            return stack.enter_context(closing(serve_prometheus(host, 0, _text))).port

        yield begin


def _get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_learners_metrics_are_on_loopback_and_open_there(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[[str], int]
) -> None:
    _no_tokens(monkeypatch)
    port = serve("127.0.0.1")
    assert _listeners(port) == {"0100007F"}
    status, text = _get(port)
    assert status == 200 and 'foray_learner_step{run="r"} 3.0' in text
    assert 'foray_learner_seconds_total{cause="groups",run="r"} 2.0' in text
    assert _get(port, "/other")[0] == 404 and _get(port, "/health") == (200, "ok")
    assert _get(port, Host="evil.example")[0] == 403, "a page whose name was pointed here"
    with pytest.raises(UserError, match="cannot listen on"):
        serve_prometheus("127.0.0.1", port, _text)


def test_the_learners_metrics_beyond_loopback_need_a_token(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[[str], int]
) -> None:
    _no_tokens(monkeypatch)
    with pytest.raises(UserError, match=r"learner\.metrics_host") as caught:
        serve_prometheus("0.0.0.0", 0, _text)
    assert "foray init" in caught.value.todo and "learner.metrics_port=null" in caught.value.todo
    monkeypatch.setenv("FORAY_VIEWER_TOKEN", TOKEN)
    port = serve("0.0.0.0")
    assert _get(port)[0] == 401 and _get(port, Authorization=f"Bearer {TOKEN}x")[0] == 401
    assert _get(port, Authorization=f"Bearer {TOKEN}")[0] == 200
    with socket.create_connection(("127.0.0.1", port)):  # a silent client does not delay others
        assert _get(port, "/health")[0] == 200
    assert any(thread.name == "metrics" and thread.daemon for thread in threading.enumerate())


def _no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("VIEWER", "NODE", "OPERATOR"):
        monkeypatch.delenv(f"FORAY_{role}_TOKEN", raising=False)
