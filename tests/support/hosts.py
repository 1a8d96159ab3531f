"""Hosts on one machine: network namespaces joined by a wire, and mount namespaces that hide directories."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

import pytest

HIDE = 'mount -t tmpfs tmpfs "$0" && exec "$@"'


def hidden(directory: Path) -> list[str]:
    """The beginning of a command line whose process finds `directory` empty. The process keeps its pid."""
    return ["unshare", "--mount", "sh", "-c", HIDE, str(directory)]


def require_mounts(directory: Path) -> None:
    """Skip the test, with the reason, where a process cannot get mounts of its own."""
    _require([*hidden(directory), "true"])


class TwoHosts:
    """Two network namespaces `a` and `b` with a wire between them; nothing else is reachable from either."""

    address = {"a": "10.77.0.1", "b": "10.77.0.2"}  # noqa: RUF012  # a constant

    def __init__(self) -> None:
        self._names = {host: f"foray-{os.getpid()}-{host}" for host in self.address}

    def argv(self, host: str, *command: str, hide: Path | None = None) -> list[str]:
        """The command line that runs `command` on `host`."""
        return ["ip", "netns", "exec", self._names[host], *(hidden(hide) if hide else ()), *command]

    def __enter__(self) -> TwoHosts:
        wire = {host: f"foray{os.getpid() % 10**7}{host}" for host in self._names}  # at most 15 characters
        try:
            for name in self._names.values():
                _require(["ip", "netns", "add", name])
            _require(["ip", "link", "add", wire["a"], "type", "veth", "peer", "name", wire["b"]])
            for host, name in self._names.items():
                _require(["ip", "link", "set", wire[host], "netns", name])
                _require(self.argv(host, "ip", "address", "add", f"{self.address[host]}/24", "dev", wire[host]))
                _require(self.argv(host, "ip", "link", "set", wire[host], "up"))
                _require(self.argv(host, "ip", "link", "set", "lo", "up"))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        if shutil.which("ip") is not None:
            for name in self._names.values():  # and with it its end of the wire
                subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _require(argv: list[str]) -> None:
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(f"this machine does not permit it: {' '.join(argv[:4])}: {done.stderr.strip()}")
