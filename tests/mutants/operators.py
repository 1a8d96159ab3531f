"""The places of a module where a random mutant can be built in: one operator, constant or statement each. Pure."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = re.compile(r"^(log|logging|warnings)\.|\.(debug|info|warning|error|exception)$")
"""Calls whose text only a person reads."""


@dataclass(frozen=True)
class Site:
    """One change: the characters [start, end) of the file become `new`."""

    path: str
    line: int
    last_line: int
    start: int
    end: int
    old: str
    new: str
    source: str
    """The first line of the place."""

    @property
    def change(self) -> str:
        """Identify the change, also after other lines of the file have changed."""
        return f"{self.path}: {self.source}: {' '.join(self.old.split())[:60]} -> {' '.join(self.new.split())[:70]}"

    @property
    def name(self) -> str:
        """Identify the change in this version of the file."""
        return f"{self.change} (line {self.line}, at {self.start})"


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text
        self._raw, self._source = text.encode(), text.split("\n")
        self._lines = [0]
        for line in self._raw.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)
        self._functions = 0
        self.sites: list[Site] = []

    def _at(self, line: int, column: int) -> int:
        """Return the offset in characters; ast counts bytes."""
        return len(self._raw[: self._lines[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, node: ast.expr | ast.stmt, start: int, end: int, new: str) -> None:
        assert node.end_lineno is not None
        old, source = self._text[start:end], self._source[node.lineno - 1].strip()
        self.sites.append(Site(self._path, node.lineno, node.end_lineno, start, end, old, new, source))

    def _between(self, node: ast.expr, left: ast.expr, right: ast.expr, pattern: str, news: tuple[str, ...]) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.search(pattern, re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), self._text[start:end]))
        if found:
            for new in news:
                self._add(node, start + found.start(), start + found.end(), new)

    def _negate(self, test: ast.expr) -> None:
        start, end = self._span(test)
        self._add(test, start, end, f"(not ({self._text[start:end]}))")

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            pattern, news = COMPARISONS[type(op)]
            self._between(node, left, right, pattern, news)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(node, left, right, rf"\b{old}\b", (new,))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        textual = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if type(node.op) in ARITHMETIC and not textual:
            old, new = ARITHMETIC[type(node.op)]
            self._between(node, node.left, node.right, re.escape(old), (new,))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            start = self._span(node)[0]
            self._add(node, start, self._span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add(node, start, end, str(not node.value))
        elif isinstance(node.value, int | float) and node.value in (0, 1, 2, 3):  # larger ones are limits
            self._add(node, start, end, repr(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if SILENT.search(ast.unparse(node.func)):
            return
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self._add(node, *self._span(node.func), NAMES[node.func.id])
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in (condition := ast.unparse(node.test)) or "__name__" in condition:
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add(node, *self._span(node.value), "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and not SILENT.search(ast.unparse(value.func)):
            self._add(node, *self._span(node), "pass")
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            self._between(node.value, node.target, node.value, re.escape(old), (new,))
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, *self._span(node), "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, *self._span(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, *self._span(node), "break")

    def visit_Assign(self, node: ast.Assign) -> None:
        """Leave single numbers of modules and classes alone: limits and defaults, whose size is a matter of taste."""
        if not (self._functions == 0 and isinstance(node.value, ast.Constant)):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not (self._functions == 0 and isinstance(node.value, ast.Constant)):
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Leave decorators alone: `frozen` and `slots` of a dataclass change no result."""
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
            self.visit(default)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""


def sites(path: str, text: str) -> list[Site]:
    """Return the possible changes of one module."""
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    return finder.sites


def is_change(text: str, site: Site) -> bool:
    """Return whether the changed module compiles and is another program."""
    try:
        changed = ast.parse(mutated(text, site))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(text))


def mutated(text: str, site: Site) -> str:
    """Return the module with the change."""
    return text[: site.start] + site.new + text[site.end :]
