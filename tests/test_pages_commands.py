"""Every command in a page is one that `foray` understands, and the first pages say what each block needs."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from benchmarks import BENCHMARKS
from foray import cli
from foray.data.catalogue import catalogue
from tests.support.settings_keys import every_key
from tests.support.shell_blocks import foray_commands, other_blocks, shell_blocks

ROOT = Path(__file__).parent.parent
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
COMMANDS = ROOT / "docs" / "design" / "commands.md"
FIRST_PAGES = (
    *("README.md", "docs/quickstart.md", "docs/own-data.md", "docs/extending.md", "docs/operate.md"),
    *("docs/install.md", "docs/reproduce-search-r1.md", "docs/plan.md"),
)
PAGES = [name for name in LISTED.stdout.split() if name != "CHANGELOG.md"]


@cache
def help_of(*verb: str) -> str:
    """Return what `foray VERB --help` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*verb, "--help"])
    return said.getvalue()


@cache
def subcommands(verb: str) -> frozenset[str]:
    known = re.search(r"NAME \(each has --help\):\n((?:  .+\n?)+)", help_of(verb))
    return frozenset(line.split()[0] for line in known[1].splitlines()) if known else frozenset()


def mistakes(words: list[str]) -> list[str]:
    """Return what of `foray WORDS` does not exist: command, subcommand, flags, settings."""
    verb, *rest = words
    if verb not in cli.VERBS:
        return [verb]
    names = [word for word in rest if word in subcommands(verb)]
    if subcommands(verb) and "NAME" in rest:
        return []
    if subcommands(verb) and not names:
        return [f"{verb} without a subcommand"]
    known = help_of(verb, *names[:1])
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
    wrong = [
        flag for flag in flags if not re.search(rf"{flag}(?![\w-])", known) and flag not in ("--log-level", "--verbose")
    ]
    keys = {word.partition("=")[0] for word in rest if re.match(r"[a-z]+\.[\w.]+=", word)}
    short = {key.partition(".")[2] for key in every_key()}
    index = {key.removeprefix("retriever.index.") for key in every_key()}
    return wrong + [key for key in keys if key not in every_key() | short | index]


@pytest.mark.parametrize("page", PAGES)
def test_every_foray_command_of_a_page_exists(page: str) -> None:
    text = "\n".join([*(block.text for block in shell_blocks(ROOT / page)), other_blocks(ROOT / page)])
    assert not {" ".join(words): wrong for words in foray_commands(text) if (wrong := mistakes(words))}


def test_whatever_a_page_downloads_is_in_the_catalogue() -> None:
    text = "\n".join(block.text for page in PAGES for block in shell_blocks(ROOT / page))
    wanted = {
        name
        for words in foray_commands(text)
        if words[:2] == ["data", "get"]
        for name in words[2 : next((i for i, word in enumerate(words) if word.startswith("--")), None)]
        if "://" not in name
    }
    assert len(wanted) > 10 and wanted <= set(catalogue())


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_commands_of_the_first_pages_are_in_shell_blocks(page: str) -> None:
    """What is in no block of this kind is neither run nor marked."""
    assert not re.findall(r"^(?:foray|make|python|pip|\.venv/bin/\w+) .+$", other_blocks(ROOT / page), re.M)
    assert shell_blocks(ROOT / page)


def first_column(title: str) -> list[str]:
    """Return the names in the first column of a table of docs/design/commands.md."""
    part = COMMANDS.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [name for cell in re.findall(r"^\| (`[^|]+) \|", part, re.M) for name in re.findall(r"`([\w-]+)`", cell)]


def test_the_tables_have_every_command_and_every_benchmark_once() -> None:
    assert sorted(first_column("The `foray` command")) == sorted(cli.VERBS)
    assert first_column("Benchmarks") == sorted(BENCHMARKS)


@pytest.mark.parametrize("line", ["foray upp x", "foray up --dry", "foray up x run.stepz=1", "foray index"])
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    (words,) = foray_commands(line)
    assert mistakes(words)
