"""docs/configuration.md says what the settings classes say, and has every setting."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.pages.configuration import document
from tests.support.settings_keys import every_key

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_made_from_the_settings() -> None:
    assert PAGE.read_text() == document(), "make reference"


def test_the_page_has_every_setting() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"^\| `([\w.]+)` \|", text, re.M))
    # fields that types share, and groups that occur again, are listed once
    lists = re.findall(r"^As in `\w+`: (.*)\.$", text, re.M)
    short = {name.rpartition(".")[2] for name in named} | {name for names in lists for name in names.split("`")}
    missing = {key for key in every_key() if "." in key and key not in named and key.rpartition(".")[2] not in short}
    assert len(named) > 400 and not missing


def test_every_group_that_is_linked_has_its_heading() -> None:
    text = PAGE.read_text()
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)}
    links = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert len(links) > 25 and links <= headings
    assert len(re.findall(r"^#+ .+$", text, re.M)) == len(headings), "two headings of one name"
