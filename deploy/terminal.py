"""Text for a terminal: untrusted text and bytes escaped, lines wrapped, tables, sparklines. Pure.

A dead letter may come from any client. So only printable characters are output (`protocol.redaction.printable`), and
escapes of untrusted text are unambiguous.
"""

from __future__ import annotations

import argparse
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

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


def aligned(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers_from: int | None = None,
    width: int = 0,
    less: Sequence[str] = (),
) -> list[str]:
    """Return a table as printable lines: the header, then one line per row.

    numbers_from  the first of the columns that are aligned right; None: all are aligned left
    width         columns of the terminal: those of the table in `less` go, in this order, until it fits; 0: no limit
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    given, out = [tuple(row) for row in rows], io.StringIO()
    console = Console(file=out, width=1 << 16, color_system=None, legacy_windows=False)

    def made(names: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        kept = [header.index(name) for name in names] if len(names) < len(header) else range(len(header))
        for place in kept:
            side = "right" if numbers_from is not None and place >= numbers_from else "left"
            table.add_column(Text(printable(header[place], keep="")), justify=side, no_wrap=True)  # type: ignore[arg-type]
        for row in given:
            table.add_row(*(Text(printable(row[place], keep="")) for place in kept))
        return table

    names, going = list(header), [name for name in less if name in header]
    while width and going and console.measure(made(names)).maximum > width:
        names.remove(going.pop(0))
    console.print(made(names))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last `width` values as blocks from the lowest to the highest of them; equal values are low."""
    shown = values[-width:] if width > 0 else ()
    low, span = min(shown, default=0.0), max(shown, default=0.0) - min(shown, default=0.0)
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] if span else BLOCKS[0] for value in shown)
