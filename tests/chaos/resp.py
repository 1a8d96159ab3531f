"""Parse Redis commands from a byte stream, so that the proxy can lose the reply to a certain command."""

from __future__ import annotations


class Commands:
    """Feed it bytes from a client; it returns complete commands as bytes."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Commands that are complete now, in order."""
        self._held += data
        found = []
        while (size := command_size(self._held)) > 0:
            found.append(bytes(self._held[:size]))
            del self._held[:size]
        return found


def command_size(held: bytes | bytearray) -> int:
    """Return the length of the first command in `held`, 0 while incomplete. Raises ValueError if it is not an array."""
    if not held:
        return 0
    if held[:1] != b"*":
        raise ValueError(f"{bytes(held[:20])!r} is no command")
    end = held.find(b"\r\n")
    if end < 0:
        return 0
    at = end + 2
    for _ in range(int(held[1:end])):
        end = held.find(b"\r\n", at)
        if end < 0:
            return 0
        at = end + 2 + int(held[at + 1 : end]) + 2
        if at > len(held):
            return 0
    return at


def words(command: bytes, most: int = 16) -> list[bytes]:
    """The first arguments of a whole command."""
    found: list[bytes] = []
    at = command.find(b"\r\n") + 2
    while at < len(command) and len(found) < most:
        end = command.find(b"\r\n", at)
        size = int(command[at + 1 : end])
        found.append(command[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return found
