"""Make the repository's pages one site: hooks of MkDocs, named in mkdocs.yml.

Pages outside of docs/ (README, CONTRIBUTING, the examples) become pages of the site, other files that pages link to are
copied, and links are rewritten to where a file is in the site. `docs/NAME.md` in code becomes a link.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".github/", "docs/figures/")
_LINK = re.compile(r"\]\((?!\w+:|[#/])([^)\s#]+)(#[^)\s]*)?\)")
_NAMED = re.compile(r"(?<!\[)`([\w./-]+\.md)`(?!\])")
_CODE = re.compile(r"(^```[\s\S]*?^```$|^    .*$|^#+ .*$)", re.M)


def in_site(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def in_repository(site: str) -> str:
    """Inverse of `in_site`."""
    if site == "index.md":
        return "README.md"
    return f"docs/{site}" if (ROOT / "docs" / site).exists() else site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, and every other file that a page links to."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [name for name in listed.stdout.split() if not name.startswith(LEFT_OUT)]
    linked = {target for page in pages for target in _targets(page) if (ROOT / target).is_file()}
    for name in sorted({*pages, *linked}):
        if files.get_file_from_path(in_site(name)) is None:
            files.append(File.generated(config, in_site(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrite links, outside of code and headings."""
    here = in_repository(page.file.src_uri)
    parts = re.split(_CODE, markdown)
    parts[::2] = [_rewritten(part, here) for part in parts[::2]]
    return "".join(parts)


def _targets(page: str) -> set[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return {posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1])) for link in _LINK.finditer(text)}


def _rewritten(text: str, here: str) -> str:
    folder = posixpath.dirname(in_site(here)) or "."

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), found[1]))
        return f"]({os.path.relpath(in_site(target), folder)}{found[2] or ''})"

    def named(found: re.Match[str]) -> str:
        is_page = found[1] != here and not found[1].startswith(LEFT_OUT) and (ROOT / found[1]).is_file()
        return f"[{found[0]}]({os.path.relpath(in_site(found[1]), folder)})" if is_page else found[0]

    return _NAMED.sub(named, _LINK.sub(link, text))
