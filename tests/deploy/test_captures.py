"""Pictures of a run: made of what the run recorded, small, without anything from another host."""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path

import pytest

from benchmarks.pages import captures
from tests.support.dashboard_run import EVIL, write_run

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
PICTURE = re.compile(r"!\[([^\]]+)\]\(([\w./-]+\.(?:svg|png))\)")
LARGEST = 150_000


def texts(path: Path) -> str:
    return unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)<", path.read_text()))).replace("\xa0", " ")


def test_the_pictures_of_a_run_show_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "BETWEEN_S", 0.0)
    run = write_run(tmp_path / "run", redis_url="redis://127.0.0.1:1/0")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(sys, "argv", ["captures", str(run), "--out", str(tmp_path / "out")])
    captures.main()
    made = {path.stem: path for path in (tmp_path / "out").iterdir()}
    assert set(made) == {"top", "trajectory", "lag"}
    for path in made.values():
        raw = path.read_text()
        assert len(raw) < LARGEST and not re.findall(r"(?:src|href|url\()[=\"']*\s*[\"']?https?://", raw)
        assert EVIL not in raw
    assert "run test: done" in texts(made["top"])
    shown = texts(made["trajectory"])
    assert "who wrote emma ?" in shown and "searched for 'emma'" in shown and "austen" in shown
    assert re.findall(r"sampled with lag (\d): (\d+)%", texts(made["lag"])) == [("0", "75"), ("1", "25")]


def test_every_picture_of_a_page_is_small_and_says_what_it_shows_and_how_it_is_made() -> None:
    seen = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        for found in PICTURE.finditer(text):
            target = (page.parent / found[2]).resolve()
            seen.add(target)
            assert target.stat().st_size < LARGEST and len(found[1]) > 20, f"{page.name}: {found[0]}"
            if target.parent == FIGURES:
                below = text[found.end() : found.end() + 600]
                assert re.search(r"`[^`]*(make test-ui|python -m benchmarks)[^`]*`", below), f"{page.name}: {found[0]}"
    assert not {*FIGURES.glob("*.svg"), *FIGURES.glob("*.png")} - seen
