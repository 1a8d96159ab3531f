"""Untrusted text and bytes, escaped for a terminal. Pure.

A dead letter may come from anyone. Control characters could move the cursor, change
the title or, in some terminals, type commands; marks that turn the direction of writing make a line say another thing
than it holds. So nothing but printable characters goes out, and what is replaced can be told from what was there.
"""

from __future__ import annotations

from collections.abc import Iterator


def escape_untrusted(text: str, most: int = 200) -> str:
    r"""`text` on one line, cut at `most`: what is not printable as \xNN, \uNNNN or \UNNNNNNNN, a backslash doubled."""
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
    """`raw` as a hex dump: offset, 16 bytes, and the same as ASCII where that is printable."""
    for start in range(0, min(len(raw), most), 16):
        row = raw[start : min(start + 16, most)]
        text = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in row)
        yield f"{start:06x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  |{text}|"
    if len(raw) > most:
        yield f"... {len(raw) - most} bytes more"
