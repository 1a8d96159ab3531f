"""Which code a figure is about: a hash over the files that it measures, so that a changed one shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = frozenset({".py", ".lua", ".yaml"})
"""What decides how code behaves; anything else in a package is documentation."""


def digest(modules: Sequence[str], root: Path = ROOT) -> str:
    """16 hexadecimal digits over names and contents of what `modules` match: files, or folders with all below them.

    Raises FileNotFoundError for a module that matches nothing.
    """
    whole = sha256()
    for path in sorted({path for module in modules for path in _files(module, root)}):
        content = sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return whole.hexdigest()[:16]


def _files(module: str, root: Path) -> Iterator[Path]:
    found = list(root.glob(module))
    if not found:
        raise FileNotFoundError(f"a benchmark measures {module}, and {root} has no such file")
    for path in found:
        if path.is_file():
            yield path
        else:
            yield from (each for each in path.rglob("*") if each.suffix in KINDS and each.is_file())
