"""Names in SGLang's source: flags, routes, fields and texts, read by `ast` without importing or installing SGLang."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

UNKNOWN = object()
"""A default that is not a literal."""
SERVER = "srt/entrypoints/http_server.py"
CLASSES = (
    *("srt/managers/io_struct.py", "srt/sampling/sampling_params.py", "srt/entrypoints/openai/protocol.py"),
    *("srt/managers/load_snapshot.py", "srt/utils/weight_versions.py"),
)
"""Files with the classes of requests and answers."""


@dataclass
class SglangSource:
    """The source in `place`: a wheel, or the folder of the installed package.

    renamed  (file, name, other name): read the file as if it had the other name
    """

    place: Path
    renamed: tuple[str, str, str] = ("", "", "")
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def names(self, folder: str) -> list[str]:
        """Return the Python files of a folder."""
        if self.place.is_dir():
            return [f"{folder}/{path.name}" for path in sorted((self.place / folder).glob("*.py"))]
        with zipfile.ZipFile(self.place) as wheel:
            inside = [name.removeprefix("sglang/") for name in wheel.namelist() if name.startswith(f"sglang/{folder}/")]
        return sorted(name for name in inside if name.count("/") == folder.count("/") + 1 and name.endswith(".py"))

    def tree(self, name: str) -> ast.Module:
        """Return a file, parsed. Raises FileNotFoundError or KeyError if there is none."""
        if name not in self._trees:
            if self.place.is_dir():
                text = (self.place / name).read_text()
            else:
                with zipfile.ZipFile(self.place) as wheel:
                    text = wheel.read(f"sglang/{name}").decode()
            file, old, new = self.renamed
            self._trees[name] = ast.parse(text.replace(old, new) if file == name else text)
        return self._trees[name]

    @cached_property
    def classes(self) -> Mapping[str, Mapping[str, Any]]:
        """Field -> default, inherited ones included, of each class in CLASSES."""
        found: dict[str, dict[str, Any]] = {}
        for node in (node for name in CLASSES for node in self.tree(name).body if isinstance(node, ast.ClassDef)):
            inherited = [found.get(base.id, {}) for base in node.bases if isinstance(base, ast.Name)]
            found[node.name] = {k: v for fields in inherited for k, v in fields.items()} | dict(_fields(node))
        return found

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Field of ServerArgs -> default."""
        trees = [self.tree(name) for name in self.names("srt/arg_groups/fields")]
        nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
        return {name: default for node in nodes for name, default in _fields(node)}

    @cached_property
    def flags(self) -> frozenset[str]:
        """Return the flags of the command line."""
        trees = [self.tree(name) for name in [*self.names("srt/arg_groups/fields"), "srt/server_args.py"]]
        written = {text for tree in trees for text in _texts(tree) if text.startswith("--")}
        return frozenset(written | {"--" + name.replace("_", "-") for name in self.arguments})

    @cached_property
    def routes(self) -> Mapping[tuple[str, str], str]:
        """(method, path) -> name of the class of the request's body, "" if it has none."""
        found = {}
        for file in (SERVER, "srt/entrypoints/v1_loads.py"):
            for node in ast.walk(self.tree(file)):
                if isinstance(node, ast.AsyncFunctionDef):
                    hints = [n for a in node.args.args if a.annotation for n in ast.walk(a.annotation)]
                    body = next((n.id for n in hints if isinstance(n, ast.Name) and n.id in self.classes), "")
                    found |= {pair: body for call in node.decorator_list for pair in _paths(call)}
        return found

    def has(self, name: str, *files: str) -> bool:
        """Return whether one of the files has the name as a text or name, or the words within a text."""
        found = {text for file in files for text in _texts(self.tree(file))}
        return name in found or (" " in name and any(name in text for text in found))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            try:
                yield item.target.id, ast.literal_eval(item.value) if item.value else UNKNOWN
            except ValueError:
                yield item.target.id, UNKNOWN


def _paths(call: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
        given = [ast.literal_eval(k.value) for k in call.keywords if k.arg == "methods"]
        methods = given[0] if given else [call.func.attr.upper()]
        if isinstance(call.args[0], ast.Constant) and str(call.args[0].value).startswith("/"):
            yield from ((method, str(call.args[0].value)) for method in methods)


def _texts(tree: ast.AST) -> frozenset[str]:
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            out.add(node.value)
        elif isinstance(node, ast.Name):
            out.add(node.id)
        elif isinstance(node, ast.keyword):
            out.add(node.arg or "")
    return frozenset(out)
