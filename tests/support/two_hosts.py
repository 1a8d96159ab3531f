"""A backend with two hosts, which are two loopback addresses of this machine. A host can be lost and come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deploy.config import RunConfig
from deploy.hardware.assign import NO_GPUS, Placement
from deploy.launch.plan import ProcessSpec
from deploy.launch.process import Child, ManagedProcess, rendezvous
from protocol.runtime.net import free_port

FIRST, SECOND = "127.0.0.11", "127.0.0.12"


class TwoHosts:
    """Starts processes on the first host that is there; the ranks of a group on both in turn."""

    address = ""

    def __init__(self) -> None:
        self.alive = [FIRST, SECOND]
        self.started: list[ManagedProcess] = []
        self.closed = False

    def place(self, config: RunConfig) -> Placement:
        """No GPU is assigned."""
        return NO_GPUS

    def spawn(self, specs: Sequence[ProcessSpec]) -> Sequence[Child]:
        """Start the processes of a group."""
        there = [self.alive[number % len(self.alive)] for number in range(len(specs))]
        place = rendezvous(there[0], free_port()) if len(specs) > 1 else {}
        given = [replace(spec, env=spec.env | place) for spec in specs]
        children = [ManagedProcess(spec, host) for spec, host in zip(given, there, strict=True)]
        self.started += children
        return children

    def release(self, name: str) -> None:
        """Return: hosts have room for all."""

    def close(self) -> None:
        """Note it."""
        self.closed = True

    def lose(self, host: str) -> None:
        """End every process of a host at once, as when its power fails."""
        self.alive.remove(host)
        for child in self.started:
            if child.host == host and child.poll() is None:
                child.lost = True
                child.kill()
                assert child.wait(10)
