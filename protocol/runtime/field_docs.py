"""Read the docstrings of settings fields from the source, when a page or a `--help` needs them.

pydantic's `use_attribute_docstrings` reads them at import, which takes a quarter of a process' start-up time.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools

from pydantic import BaseModel


@functools.cache
def descriptions(kind: type[BaseModel]) -> dict[str, str]:
    """Return field name -> docstring. A field redeclared in a subclass without one keeps the docstring of the base."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            body = _classes(inspect.getfile(base))[base.__qualname__].body
            for field, text in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


@functools.cache
def _classes(path: str) -> dict[str, ast.ClassDef]:
    """Return the top-level classes of a source file by name."""
    with open(path, encoding="utf-8") as file:
        return {node.name: node for node in ast.parse(file.read()).body if isinstance(node, ast.ClassDef)}
