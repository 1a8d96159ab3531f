"""`python .github/release.py TAG`: print the changelog's section of a release, `vX.Y.Z`.

Exit status 1 if the tag is not the version in pyproject.toml, or if the changelog has no section of that version.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def notes(tag: str) -> str:
    """Return the text below the heading of the version. Raises ValueError if version or section differ from the tag."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, the version in pyproject.toml {version}")
    sections = re.split(r"^## \[(.+?)\].*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    text = dict(zip(sections[1::2], sections[2::2], strict=True)).get(version, "").strip()
    if not text:
        raise ValueError(f"CHANGELOG.md has no section [{version}]: rename [Unreleased], and begin a new one")
    return text


if __name__ == "__main__":
    try:
        print(notes(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
