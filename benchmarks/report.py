"""Facts of every figure: machine, date, code version, and whether its targets were met."""

from __future__ import annotations

import re
import time
from ast import AST, Constant, Expr, If, Import, ImportFrom, Name, parse
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.base import Target, machine_facts

ROOT = Path(__file__).parents[1]
CODE = frozenset({".py", ".lua", ".yaml"})
"""Suffixes of files that affect behaviour; all others in a package are documentation."""
STRING_OR_COMMENT = re.compile(
    r'''("""|\'\'\')(?:\\.|[^\\])*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''', re.DOTALL
)
"""Strings are matched so that no "#" within them begins a comment."""


class Circumstances:
    """Circumstances of one measurement: create it before, call `facts` after."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules, self._facts, self._begun = list(modules), machine_facts(), time.monotonic()
        self._hash = digest(modules)

    def facts(self, report: Mapping[str, Any], targets: Sequence[Target]) -> dict[str, Any]:
        """Return `machine` (load before and after), `modules` (measured code and hash) and `targets` of `report`."""
        after = {"load_1m_end": machine_facts()["load_1m"], "run_s": time.monotonic() - self._begun}
        return {
            "targets": [judged(target, report) for target in targets],
            "machine": self._facts | after,
            "modules": {"hash": self._hash, "paths": self._modules},
        }


def judged(target: Target, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target with its figure and `met`: None if the report has no such figure."""
    value: Any = report
    for name in target.path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    known = isinstance(value, int | float)
    return {
        "what": target.text,
        "figure": target.path,
        "at_least": target.at_least,
        "value": value if known else None,
        "met": value >= target.at_least if known else None,
    }


def digest(modules: Sequence[str], root: Path = ROOT) -> str:
    """Return 16 hexadecimal digits over the code of the files and folders that `modules` match.

    Python comments, docstrings, imports (also those for types alone) and the places of the files are ignored: they do
    not affect figures.
    Raises FileNotFoundError for a module that matches nothing.
    """
    paths = {path for module in modules for path in _files(module, root)}
    texts = ((path.suffix, path.read_text("utf-8")) for path in paths)
    contents = sorted(sha256((_code(text) if kind == ".py" else text).encode()).hexdigest() for kind, text in texts)
    return sha256("\n".join(contents).encode()).hexdigest()[:16]


@lru_cache(maxsize=1024)
def _code(text: str) -> str:
    """Return the lines of a Python file without comments, docstrings, imports and blank lines."""
    lines = text.splitlines()
    for node in _statements(parse(text)):
        match node:
            case Import() | ImportFrom() | Expr(Constant(str())) | If(Name("TYPE_CHECKING"), orelse=[]):
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
            case _:
                pass
    lines = STRING_OR_COMMENT.sub(lambda found: "" if found[0][0] == "#" else found[0], "\n".join(lines)).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _statements(node: AST) -> Iterator[AST]:
    """Yield every statement, also those within others: a tenth of the nodes that `ast.walk` visits."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, block, ()):
            yield child
            yield from _statements(child)


def _files(module: str, root: Path) -> Iterator[Path]:
    found = list(root.glob(module))
    if not found:
        raise FileNotFoundError(f"a benchmark measures {module}, and {root} has no such file")
    for path in found:
        if path.is_file():
            yield path
        else:
            yield from (each for each in path.rglob("*") if each.suffix in CODE and each.is_file())
