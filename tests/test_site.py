"""The pages as a site: it builds with strict links, and every anchor of a link exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PAGES = sorted(name for name in TRACKED if name.endswith(".md") and not name.startswith((".github/", "docs/figures/")))
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")


def build(checkout: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=100)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    outside_of_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+?)\s*$", outside_of_code, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_anchor_of_a_link_exists(page: str) -> None:
    here = ROOT / page
    links = [(here.parent / path if path else here, anchor) for path, anchor in _LINK.findall(here.read_text())]
    assert not [(str(path), anchor) for path, anchor in links if anchor not in anchors(path)]


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    site = {name.removeprefix("docs/") for name in PAGES} - {"README.md"} | {"index.md"}
    assert listed == site


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    of_others = re.compile(r"(?:src|<link[^>]+href)=\"(https?://[^\"]+)")
    loaded = {url for page in pages for url in of_others.findall(page.read_text())}
    assert not loaded
    assert 'href="docs/' not in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.slow
def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    checkout, broken = tmp_path / "checkout", ("no_such_page.md", "glossary.md#no-such-heading")
    for name in [
        name
        for name in TRACKED
        if name.startswith(("docs/", "examples/", "deploy/docker/")) or name.endswith((".md", ".yml"))
    ]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    subprocess.run(["git", "init", "-q", "."], cwd=checkout, check=True)
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    with (checkout / "docs" / "tools.md").open("a") as page:
        page.writelines(f"\n[x]({link})\n" for link in broken)
    done = build(checkout, tmp_path / "site")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert done.returncode != 0 and "Aborted with 2 warnings in strict mode" in done.stdout + done.stderr
    assert len(warnings) == 2 and all("tools.md" in warning for warning in warnings)
    assert all(any(link in warning for warning in warnings) for link in broken)
