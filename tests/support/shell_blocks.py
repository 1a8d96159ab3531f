"""Commands in Markdown pages: fenced shell blocks, the lines in them that call `foray`, and how a test runs them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
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


def shell_lines(page: Path) -> list[str]:
    """Return the commands of all blocks of a page in its order: continued lines joined, comments left out."""
    lines = "\n".join(block.text for block in shell_blocks(page)).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line and not line.startswith("#")]


def run_shell(text: str, folder: Path, *, allowed: tuple[int, ...] = (0,), timeout_s: float = 300, **env: str) -> str:
    """Run commands in `folder`, with `foray` of this interpreter; return what they print.

    Raises AssertionError if the exit code is not in `allowed`.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode in allowed, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr
