"""Free TCP ports of this machine, chosen before the processes start.

A restarted process must come back at the same address, so its port is fixed for the whole run. Ports are taken from
below the range that the kernel hands out to outgoing connections: one of those could take ours before it is bound.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from protocol.errors import UserError

LOWEST, DEFAULT_HIGHEST = 15000, 32767
_TAKEN: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that can be bound now and that this function has not given out before."""
    highest = _highest()
    for _ in range(200):
        port = random.randint(LOWEST, highest)
        if port not in _TAKEN and is_free(host, port):
            _TAKEN.add(port)
            return port
    raise UserError(f"no free port found on {host} between {LOWEST} and {highest}", todo="stop what holds them")


def is_free(host: str, port: int) -> bool:
    """Whether `port` can be bound on `host` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True


def _highest() -> int:
    try:
        lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_HIGHEST
    # Where the kernel's range leaves us no room, the race is the lesser evil.
    return lowest_outgoing - 1 if lowest_outgoing > LOWEST + 1000 else DEFAULT_HIGHEST
