"""Text for a terminal: untrusted text and bytes escaped, lines wrapped, sparklines. Pure.

A dead letter may come from any client. So only printable characters are output (`protocol.redaction.printable`), and
escapes of untrusted text are unambiguous.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence

from protocol.redaction import printable

BLOCKS = "▁▂▃▄▅▆▇█"


def escape_untrusted(text: str, most: int = 200) -> str:
    r"""Return `text` on one line, cut at `most`, with non-printable characters as \xNN, \uNNNN or \UNNNNNNNN."""
    shown = printable(text[:most].replace("\\", "\\\\"), keep="")
    return shown if len(text) <= most else f"{shown}... ({len(text)} characters)"


def at_least(least: int) -> Callable[[str], int]:
    """Return the `type` of an argument of argparse: an integer that is not smaller than `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return read


def hexdump(raw: bytes, most: int = 256) -> Iterator[str]:
    """Yield a hex dump of `raw`: offset, 16 bytes, and their printable ASCII characters."""
    for start in range(0, min(len(raw), most), 16):
        row = raw[start : min(start + 16, most)]
        text = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in row)
        yield f"{start:06x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  |{text}|"
    if len(raw) > most:
        yield f"... {len(raw) - most} bytes more"


def wrapped(line: str, width: int, indent: int) -> list[str]:
    """Return `line` in printable pieces of at most `width` columns, all but the first with `indent`; 0: one piece."""
    line = printable(line, keep="")
    if not width or len(line) <= width:
        return [line]
    width = max(width, 20)
    margin = " " * min(indent, width // 3)
    return textwrap.wrap(line, width, subsequent_indent=margin, replace_whitespace=False)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last `width` values as blocks from the lowest to the highest of them; equal values are low."""
    shown = values[-width:] if width > 0 else ()
    low, span = min(shown, default=0.0), max(shown, default=0.0) - min(shown, default=0.0)
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] if span else BLOCKS[0] for value in shown)
