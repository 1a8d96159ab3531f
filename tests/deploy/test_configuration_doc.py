"""docs/configuration.md and docs/settings say what the settings classes say, and have every setting."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.pages.configuration import documents
from foray.settings_file import MATTER
from tests.support.settings_keys import every_key

DOCS = Path(__file__).parents[2] / "docs"
INDEX = "configuration.md"
TEXTS = {
    name: (DOCS / name).read_text() for name in (INDEX, *(f"settings/{p.name}" for p in (DOCS / "settings").iterdir()))
}


def test_the_pages_are_made_from_the_settings() -> None:
    assert documents() == TEXTS, "make reference"


def test_the_pages_have_every_setting_and_the_first_one_those_that_matter() -> None:
    text = "".join(text for name, text in TEXTS.items() if name != INDEX)
    named = set(re.findall(r"^\| `([\w.]+)` \|", text, re.M))
    # fields that types share, and groups that occur again, are listed once
    lists = re.findall(r"^As in `\w+`: (.*)\.$", text, re.M)
    short = {name.rpartition(".")[2] for name in named} | {name for names in lists for name in names.split("`")}
    missing = {key for key in every_key() if "." in key and key not in named and key.rpartition(".")[2] not in short}
    assert len(named) > 400 and not missing
    assert set(re.findall(r"^\| `([\w.]+)` \|", TEXTS[INDEX], re.M)) == {key.removesuffix(".type") for key in MATTER}


def test_every_group_that_is_linked_has_its_heading() -> None:
    found = {name: re.findall(r"^#+ (.+)$", text, re.M) for name, text in TEXTS.items()}
    anchors = {n: {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in titles} for n, titles in found.items()}
    assert all(len(anchors[name]) == len(titles) for name, titles in found.items()), "two headings of one name"
    links = [
        (name if not page else str(Path(name).parent / page), anchor)
        for name, text in TEXTS.items()
        for page, anchor in re.findall(r"\]\(([\w/.]*)#([\w-]+)\)", text)
    ]
    assert len(links) > 25 and not [(name, anchor) for name, anchor in links if anchor not in anchors[name]]
