"""Find free TCP ports, the process that listens on a port, and the interface on the way to a host; file descriptors.

Ports are chosen below the kernel's range for outgoing connections, one of which could take the port before it is bound,
and above those of Ray's workers (10002 to 19999).
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import random
import resource
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UserError

MOST_FILES = 1 << 16
"""A process needs no more descriptors: it has about as many ports."""
LOWEST, DEFAULT_HIGHEST = 20000, 32767
_SIOCGIFADDR = 0x8915
"""Linux' request for the address of an interface, see netdevice(7)."""
_TAKEN: set[int] = set()
_DRAW = random.SystemRandom()
"""Not the shared generator: processes with the same seed would choose the same ports."""


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one, at most MOST_FILES: a burst can exceed 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def lacks_files(error: OSError) -> bool:
    """Return whether a connection failed because this process or host has no free descriptor: no fault of the peer."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` that can be bound now and that this function has not returned before."""
    highest = _highest()
    for _ in range(200):
        port = _DRAW.randint(LOWEST, highest)
        if port not in _TAKEN and is_free(host, port):
            _TAKEN.add(port)
            return port
    raise UserError(
        f"no free port found on {host} between {LOWEST} and {highest}", todo="stop processes that listen there"
    )


def is_free(host: str, port: int) -> bool:
    """Return whether `port` can be bound on `host` now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError:
        return False
    return True


def require_free(host: str, port: int, setting: str) -> None:
    """Raise UserError, naming the process that listens there if it is visible, if `port` cannot be bound."""
    if is_free(host, port):
        return
    found = port_owner(port)
    by = f" by process {found.pid} ({found.name})" if found else f" on {host}"
    stop = f"stop it (kill {found.pid})" if found else "stop what listens there"
    raise UserError(f"{setting} = {port} is taken{by}", todo=f"{stop}, or choose another port (0: a free one)")


def local_address(host: str) -> str:
    """Return this machine's address on the route to `host`, a name or an address. Sends nothing. Raises OSError."""
    family, kind, proto, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def interface_to(host: str) -> str:
    """Return the name of the interface with `local_address(host)`, "" if unknown or not on Linux."""
    try:
        address = ipaddress.ip_address(local_address(host).partition("%")[0])
    except (OSError, ValueError):
        return ""
    if address.is_loopback:
        return "lo" if sys.platform.startswith("linux") else ""
    if address.version == 6:
        rows = ([words[-1], words[0]] for words in map(str.split, _lines("/proc/net/if_inet6")) if words)
        return next((name for name, digits in rows if int(digits, 16) == int(address)), "")
    return next((name for _, name in socket.if_nameindex() if _ipv4(name) == str(address)), "")


def _ipv4(interface: str) -> str:
    """Return the first IPv4 address of an interface, "" without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def _highest() -> int:
    try:
        lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_HIGHEST
    # if the kernel's range leaves no ports below it, accept that race
    return lowest_outgoing - 1 if lowest_outgoing > LOWEST + 1000 else DEFAULT_HIGHEST


@dataclass(frozen=True)
class PortOwner:
    """A process that listens on a socket, read from /proc. `stopped`: by SIGSTOP or a debugger."""

    pid: int
    name: str
    stopped: bool


def port_owner(port: int) -> PortOwner | None:
    """Return the process that listens on TCP `port` of this machine, or None if /proc does not show it."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for words in _rows(table):
            # local address, state 0A (LISTEN), inode
            if len(words) > 9 and words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(words[9])
    return _owner(inodes)


def unix_socket_owner(path: str) -> PortOwner | None:
    """Return the process that listens on the unix socket at `path`, or None as in `port_owner`."""
    # flags 00010000: a listening socket; the others at this path are connections
    rows = (words for words in _rows("/proc/net/unix") if len(words) > 7 and words[7] == path)
    return _owner({words[6] for words in rows if words[3] == "00010000"})


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in _lines(table)[1:]]


def _lines(table: str) -> list[str]:
    try:
        return Path(table).read_text().splitlines()
    except OSError:
        return []


def _owner(inodes: set[str]) -> PortOwner | None:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        try:
            if any(os.readlink(descriptor) in wanted for descriptor in (process / "fd").iterdir()):
                name, _, rest = (process / "stat").read_text().rpartition(")")
                return PortOwner(int(process.name), name.partition("(")[2], rest.split()[0] in ("T", "t"))
        except OSError:
            continue  # it has ended, or belongs to another user
    return None
