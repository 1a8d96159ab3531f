"""Checks of the repository's structure, over the syntax of its modules: nothing is imported or run.

Each check takes modules and returns what is wrong as lines of text, so that tests can show that it is able to fail.
Used by tests/test_house.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FILE_CAP, FUNCTION_CAP = 500, 60
FOLDER_MIN, FOLDER_MAX = 3, 17
SMALL = 60
"""A module with fewer lines and one importer beside it belongs into that importer."""

QUOTES = r"\w*(\"\"\"|''')"
"""Start of a text of several lines."""


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Everything in `tree`, kept because most checks read all of it."""
        return tuple(ast.walk(self.tree))

    @property
    def folder(self) -> str:
        return self.path.parent.as_posix()

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def imports(self) -> frozenset[str]:
        """Absolute names of everything imported anywhere in the file, under TYPE_CHECKING too; `a.b` and `a.b.c` for
        `from a.b import c`."""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: -(node.level - 1) or None] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                found.add(base)
                found.update(f"{base}.{alias.name}" for alias in node.names)
        return frozenset(found)

    @property
    def frameworks(self) -> frozenset[str]:
        """First parts of the names that it imports."""
        return frozenset(name.partition(".")[0] for name in self.imports)


Modules = Mapping[str, Module]


def read_modules(root: Path, packages: Iterable[str]) -> dict[str, Module]:
    """Read every Python file of `packages`, by dotted name."""
    found = {}
    for path in (path for package in packages for path in sorted((root / package).rglob("*.py"))):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(name, path.relative_to(root), path.read_text(encoding="utf-8"))
    return found


def import_graph(modules: Modules) -> dict[str, set[str]]:
    """Return which modules each module imports. A package that is only passed on the way to a member does not count."""
    return {name: {other for other in module.imports if other in modules} - {name} for name, module in modules.items()}


def circles(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Return the strongly connected components with more than one member (Tarjan, SIAM J. Comput. 1, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(" <-> ".join(sorted(stack[at:])))
            del stack[at:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10 * len(graph)))
    try:
        for name in graph:
            if name not in index:
                visit(name)
    finally:
        sys.setrecursionlimit(limit)
    return found


def folder_sizes(modules: Modules) -> list[str]:
    """Return the folders with too few or too many modules, `__init__` counted."""
    sizes = Counter(module.folder for module in modules.values())
    return [f"{folder}: {n} modules" for folder, n in sorted(sizes.items()) if not FOLDER_MIN <= n <= FOLDER_MAX]


def impurities(modules: Modules, package: str, *, apart: str, allowed: Collection[str]) -> list[str]:
    """Return what modules of `package` import beside `allowed`, and their calls that do I/O; not those of `apart`."""
    wrong = []
    for name, module in _under(modules, package):
        if not _is_under(name, apart):
            foreign = module.frameworks - {package, *allowed}
            wrong += [f"{name} imports {other}" for other in sorted(foreign)]
            wrong += [f"{name} imports {other}" for other in sorted(module.imports) if _is_under(other, apart)]
            wrong += [f"{name}:{line} calls {call}" for call, line in _io_calls(module)]
    return wrong


_IO = frozenset(
    {"open", "input", "print", "read_text", "read_bytes", "write_text", "write_bytes", "exists", "is_file", "is_dir"}
    | {"mkdir", "unlink", "iterdir", "glob", "rglob", "resolve", "getenv", "now", "utcnow", "today"}
)


def _io_calls(module: Module) -> Iterator[tuple[str, int]]:
    """Yield calls that reach files, the terminal, the clock or the environment, by what they are named."""
    for node in module.nodes:
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            name = node.func.attr if isinstance(node.func, ast.Attribute) and node.func.attr != "open" else name
            if name in _IO:
                yield name, node.lineno


def foreign_imports(modules: Modules, package: str, *, ours: Collection[str], allowed: Collection[str]) -> list[str]:
    """Return the imports of `package` that lead into a package of `ours` other than itself and `allowed`."""
    foreign = {*ours} - {package, *allowed}
    found = ((name, other) for name, module in _under(modules, package) for other in module.frameworks & foreign)
    return [f"{name} imports {other}" for name, other in sorted(found)]


def misplaced(modules: Modules, framework: str, places: Collection[str]) -> list[str]:
    """Return the files that import `framework` and whose path begins with none of `places`."""
    paths = (m.path.as_posix() for m in modules.values() if framework in m.frameworks)
    return [f"{path} imports {framework}" for path in paths if not path.startswith(tuple(places))]


def double_classes(modules: Modules) -> dict[str, list[str]]:
    """Return public classes' names that more than one module defines, with the modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: where for name, where in sorted(found.items()) if len(where) > 1}


def long_files(modules: Modules) -> list[str]:
    return [f"{m.path}: {m.lines} lines" for m in modules.values() if m.lines > FILE_CAP]


def raises_in_except_star(modules: Modules) -> list[str]:
    """Return each `raise X` within `except*`: until Python 3.11.3 it raises an ExceptionGroup in place of X."""
    return [
        f"{module.path}:{node.lineno}"
        for module in modules.values()
        for tried in module.nodes
        if isinstance(tried, ast.TryStar)
        for handler in tried.handlers
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise) and node.exc is not None
    ]


def long_functions(modules: Modules) -> list[str]:
    functions = ((m, node) for m in modules.values() for node in _functions(m))
    sizes = ((m, node, (node.end_lineno or 0) - node.lineno + 1) for m, node in functions)
    return [f"{m.path}:{node.name}: {lines} lines" for m, node, lines in sizes if lines > FUNCTION_CAP]


def code_lines(module: Module) -> int:
    """Return the number of lines that are neither blank, comment nor docstring; all lines of a longer text count."""
    lines = module.text.splitlines()
    code = {number for number, line in enumerate(lines, 1) if (rest := line.strip()) and rest[0] != "#"}
    docstrings: set[int] = set()
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and re.match(
            QUOTES, lines[node.lineno - 1][node.col_offset :]
        ):
            code.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code - docstrings)


def longest_function(modules: Modules) -> int:
    return max((node.end_lineno or 0) - node.lineno + 1 for m in modules.values() for node in _functions(m))


def own_knobs(modules: Modules) -> int:
    """Return the number of settings that a user can choose: fields of the subclasses of `Settings`, without `type`,
    groups of settings, and fields that repeat one of a parent."""
    classes: defaultdict[str, list[ast.ClassDef]] = defaultdict(list)
    for node in (node for m in modules.values() for node in m.tree.body if isinstance(node, ast.ClassDef)):
        classes[node.name].append(node)

    def above(node: ast.ClassDef) -> list[ast.ClassDef]:
        bases = [each for base in node.bases if isinstance(base, ast.Name) for each in classes.get(base.id, ())]
        return [*bases, *(far for base in bases for far in above(base))]

    def fields(node: ast.ClassDef) -> dict[str, str]:
        body = (each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name))
        named = {ast.unparse(each.target): ast.unparse(each.annotation) for each in body}
        return {name: kind for name, kind in named.items() if name[0] != "_" and not kind.startswith("ClassVar")}

    every = [node for nodes in list(classes.values()) for node in nodes]
    settings = [node for node in every if any(far.name == "Settings" for far in above(node))]
    groups = {node.name for node in settings}
    return sum(
        name != "type" and kind not in groups and not any(name in fields(far) for far in above(node))
        for node in settings
        for name, kind in fields(node).items()
    )


def arrows_up(modules: Modules, layers: Iterable[str], package: str = "") -> list[str]:
    """Return the imports from a layer to one above it. layers: the highest first; `a | b` and `a : b` are one layer."""
    inside = f"{package}." if package else ""
    rank = {f"{inside}{name.strip()}": place for place, row in enumerate(layers) for name in re.split(r"[|:]", row)}

    def place(name: str) -> int | None:
        return rank.get(".".join(name.split(".")[: inside.count(".") + 1]))

    pairs = ((a, b) for a, others in import_graph(modules).items() for b in others)
    return [f"{a} -> {b}" for a, b in pairs if (x := place(a)) is not None and (y := place(b)) is not None and y < x]


def mutual_folders(modules: Modules, package: str) -> list[str]:
    """Return the pairs of folders of `package` that import each other, its own modules left out."""
    graph = import_graph({name: m for name, m in modules.items() if name.startswith(f"{package}.")})
    rooms = {name: modules[name].path.parts[1] for name in graph if len(modules[name].path.parts) > 2}
    arrows = {(rooms[a], rooms[b]) for a in rooms for b in graph[a] if b in rooms and rooms[a] != rooms[b]}
    return sorted(f"{package}: {a} <-> {b}" for a, b in arrows if a < b and (b, a) in arrows)


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lonely_modules(modules: Modules) -> dict[str, str]:
    """Return modules under SMALL lines that only one module, of the same folder, imports: module -> its importer.

    The `__init__` that holds a folder's registry and the `__main__` that starts it are no such importers.
    """
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, others in import_graph(modules).items():
        for other in others:
            importers[other].add(name)
    found = {}
    for name, module in modules.items():
        if len(importers[name]) == 1 and module.lines < SMALL and not module.path.name.startswith("__"):
            (importer,) = importers[name]
            beside = modules[importer]
            if beside.folder == module.folder and not beside.path.name.startswith("__"):
                found[name] = importer
    return found


def unreferenced_modules(modules: Modules) -> list[str]:
    """Return modules that no other imports and no string names: no registry, and no `-m` or file name of a child."""
    imported = set().union(*import_graph(modules).values())
    strings = " ".join(
        node.value
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    named = set(re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", strings))
    return [
        name
        for name, module in modules.items()
        if not {name, module.path.name} & (imported | named) and not module.path.name.startswith("__")
    ]


def silent_inits(modules: Modules) -> list[str]:
    """Return the `__init__` files without a docstring: nothing says what the folder is for."""
    inits = (module for module in modules.values() if module.path.name == "__init__.py")
    return [str(module.path) for module in inits if not ast.get_docstring(module.tree)]


def unused_code(modules: Modules, extra: str = "") -> dict[str, list[str]]:
    """Return what vulture finds unused: name -> "path:line kind". Classes that a registry names are used.

    extra  further source text whose names count as used
    """
    from vulture import Vulture  # type: ignore[import-not-found, unused-ignore]

    found: defaultdict[str, list[str]] = defaultdict(list)
    # validators are called by pydantic, which reads `model_config` too
    machine = Vulture(ignore_names=["model_config"], ignore_decorators=["@model_validator", "@field_validator"])
    for module in modules.values():
        machine.scan(module.text, filename=module.path)
        for node in module.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                target = re.fullmatch(r"[\w.]+:(\w+)", node.value)
                extra += f"\n{target[1]}" if target else ""
    machine.scan(extra)
    for item in machine.get_unused_code(min_confidence=60):
        found[item.name].append(f"{item.filename}:{item.first_lineno} {item.typ}")
    return dict(found)


def _under(modules: Modules, package: str) -> Iterator[tuple[str, Module]]:
    yield from ((name, module) for name, module in modules.items() if _is_under(name, package))


def _is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
