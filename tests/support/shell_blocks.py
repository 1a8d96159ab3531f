"""Commands in Markdown pages: fenced shell blocks, and the lines in them that call `foray`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NEEDS = "# needs: "


@dataclass(frozen=True)
class ShellBlock:
    """One ```sh block. `needs`: what it cannot be run without, "" for a block that a test runs."""

    text: str

    @property
    def needs(self) -> str:
        first = self.text.partition("\n")[0]
        return first.removeprefix(NEEDS).strip() if first.startswith(NEEDS) else ""


def shell_blocks(page: Path) -> list[ShellBlock]:
    """Return the blocks of a page in its order."""
    return [ShellBlock(text) for kind, text in _FENCE.findall(page.read_text()) if kind in ("sh", "bash", "shell")]


def other_blocks(page: Path) -> str:
    """Return what else is in code blocks: fenced ones of other kinds, and indented lines."""
    text = page.read_text()
    fenced = [block for kind, block in _FENCE.findall(text) if kind not in ("sh", "bash", "shell")]
    return "\n".join([*fenced, *re.findall(r"^    (.+)$", _FENCE.sub("", text), re.M)])


def foray_commands(text: str) -> Iterator[list[str]]:
    """Yield the words behind `foray` of each line that calls it, continued lines joined, comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        found = re.match(r"\s*(?:\w+=\S+ )*(?:\S*/)?foray (?=[a-z])(.+)", line)
        if found:
            yield shlex.split(found[1], comments=True)
