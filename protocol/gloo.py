"""Where gloo listens. It asks nobody who he is, so on one machine both ends of an update group keep it on loopback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.access import is_loopback

INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_at(address: str) -> Iterator[None]:
    """Groups made in the block send over loopback where `address` is there, not by the address of the host's name."""
    if not is_loopback(address) or INTERFACE in os.environ or not sys.platform.startswith("linux"):
        yield
        return
    os.environ[INTERFACE] = "lo"
    try:
        yield
    finally:
        os.environ.pop(INTERFACE, None)
