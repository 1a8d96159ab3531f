"""Untrusted text and bytes, escaped for a terminal. Pure.

A dead letter may come from any client. Control characters could move the cursor, change the title or, in some
terminals, type commands, and marks that reverse the direction of writing disguise text. So only printable characters
are output, and escapes are unambiguous.
"""

from __future__ import annotations

from collections.abc import Iterator


def escape_untrusted(text: str, most: int = 200) -> str:
    r"""Return `text` on one line, cut at `most`, with non-printable characters as \xNN, \uNNNN or \UNNNNNNNN."""
    shown = "".join(_escaped(c) for c in text[:most])
    return shown if len(text) <= most else f"{shown}... ({len(text)} characters)"


def _escaped(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def hexdump(raw: bytes, most: int = 256) -> Iterator[str]:
    """Yield a hex dump of `raw`: offset, 16 bytes, and their printable ASCII characters."""
    for start in range(0, min(len(raw), most), 16):
        row = raw[start : min(start + 16, most)]
        text = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in row)
        yield f"{start:06x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  |{text}|"
    if len(raw) > most:
        yield f"... {len(raw) - most} bytes more"
