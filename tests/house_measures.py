"""The size of the house in figures: `python tests/house_measures.py [--write]` prints them.

`--write` makes the figures of this checkout the ceilings (house.json), which tests/test_house.py compares with. A
ceiling goes down with the commit that takes lines away. It goes up in a commit of its own, at most by the budget that
an issue states, and names the issue: `house: 400 code lines for issue 41`. Docstrings, comments and blank lines are not
counted: they never pay.

code_lines      lines of a top folder that are neither blank, comment nor docstring, and of each package of the wheel
                in it, its subfolders included: a new package has no ceiling until a commit writes one. `benchmarks` is
                not in the wheel, and what is may import neither it nor tests
other_lines     lines of a top folder in other languages, neither blank nor a whole-line comment
unformatted     `# fmt:` comments: what ruff may not reformat holds more on a line
knobs           settings that a user can choose (`house.own_knobs`)
arrows_up       imports from a layer to one above it, by the contracts of import-linter in pyproject.toml
mutual_folders  pairs of folders within a package that import each other
circles         circles of imports, lazy and typing imports counted
widest_folder, longest_file, longest_function   in modules and lines
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import house  # noqa: E402  # run as a script from anywhere

FILE = Path(__file__).parent / "house.json"
PACKAGES = ("protocol", "rollout_server", "learner", "retriever", "deploy", "foray")
APART = ("benchmarks", "examples", "requirements")
SLACK = 60
"""Lines that a folder may exceed its ceiling by, so that a repair needs no commit for it; ten times that below it."""
COMMENTS = {".js": ("//", "/*", "*"), ".css": ("/*", "*"), ".html": ("<!--",), ".lua": ("--",), ".sh": ("#",)}


def measures(modules: house.Modules) -> dict[str, Any]:
    """Return every measure of the checkout. modules: of PACKAGES and APART"""
    product = {name: m for name, m in modules.items() if m.path.parts[0] in PACKAGES}
    graph = house.import_graph(modules)
    return {
        "code_lines": code_lines(modules),
        "other_lines": {folder: other_lines(ROOT / folder) for folder in (*PACKAGES, *APART)},
        "unformatted": sum(m.text.count("# fmt:") for m in modules.values()),
        "knobs": house.own_knobs(product),
        "arrows_up": len(arrows_up(modules)),
        "mutual_folders": sum(len(house.mutual_folders(product, package)) for package in PACKAGES),
        "circles": len(house.circles(graph)),
        "widest_folder": max(Counter(m.folder for m in product.values()).values()),
        "longest_file": max(m.lines for m in product.values()),
        "longest_function": house.longest_function(product),
    }


def code_lines(modules: house.Modules) -> dict[str, int]:
    """Return the code lines of each top folder, and of each package of the wheel in one."""
    code = dict.fromkeys((*PACKAGES, *APART), 0)
    for _, m in sorted(modules.items()):
        top, *rest = m.path.parent.parts
        lines = house.code_lines(m)
        for folder in (top, *(f"{top}/{package}" for package in rest[:1] if top in PACKAGES)):
            code[folder] = code.get(folder, 0) + lines
    return code


def beyond(ceilings: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the measures that are above their ceiling, far below it, or without one."""
    most, now, wrong = _flat(ceilings), _flat(found), []
    for name in sorted(most.keys() | now.keys()):
        ceiling, value = most.get(name), now.get(name)
        slack = SLACK if " " in name else 0
        if ceiling is None or value is None or not ceiling - 10 * SLACK <= value <= ceiling + slack:
            wrong.append(f"{name}: {value}, ceiling {ceiling}")
    return wrong


def _flat(figures: dict[str, Any]) -> dict[str, int]:
    """Return measures by their name, and by `name folder` those of folders."""
    rows = ((name, value if isinstance(value, dict) else {"": value}) for name, value in figures.items())
    return {f"{name} {folder}".rstrip(): value for name, folders in rows for folder, value in folders.items()}


def arrows_up(modules: house.Modules) -> list[str]:
    """Return the imports that go up, by every contract of layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = [
        contract for contract in contracts if contract["type"] == "layers" and ":" not in str(contract["layers"])
    ]
    pairs = [(contract, package) for contract in layered for package in contract.get("containers", [""])]
    return [arrow for contract, package in pairs for arrow in house.arrows_up(modules, contract["layers"], package)]


def other_lines(folder: Path) -> int:
    """Return the lines of `folder` in the languages of COMMENTS."""
    files = (path for path in folder.rglob("*") if path.suffix in COMMENTS)
    rows = ((path.suffix, line.strip()) for path in files for line in path.read_text(encoding="utf-8").splitlines())
    return sum(bool(line) and not line.startswith(COMMENTS[suffix]) for suffix, line in rows)


def main() -> None:
    """Print the measures as JSON, and make them the ceilings with `--write`."""
    found = measures(house.read_modules(ROOT, (*PACKAGES, *APART)))
    text = json.dumps(found, indent=1)
    if "--write" in sys.argv[1:]:
        FILE.write_text(text + "\n", encoding="utf-8")
    print(text)
    print("code lines of the wheel:", sum(found["code_lines"][folder] for folder in PACKAGES))


if __name__ == "__main__":
    main()
