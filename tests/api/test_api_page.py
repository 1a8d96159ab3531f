"""docs/api.md and `help()`: every public name is there, and its docstring names every parameter and field."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import foray
from benchmarks.pages.api import GROUPS, PARTS, page
from protocol.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
NAMED = {name: getattr(foray, name) for names in GROUPS.values() for name in names}
CLEAR = {"id", "text", "answers", "contents", "directory", "what", "why", "todo"}
"""Parameters whose name says all."""


def parameters(thing: Any) -> set[str]:
    """Return the parameters of a function, or the fields of a class that is made from them."""
    if inspect.isclass(thing) and issubclass(thing, Settings | Exception):
        return set()  # a setting has a docstring of its own, which tests/deploy/test_settings_documented.py checks
    return set(inspect.signature(thing).parameters) - {"self", "args", "kwargs", "extra_data"}


def test_the_page_is_made_from_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "make reference"


def test_every_public_name_is_on_the_page() -> None:
    left_out = {name for name in foray.__all__ if name not in NAMED and getattr(foray, name) not in NAMED.values()}
    assert not left_out, "add it to GROUPS in benchmarks/pages/api.py"


@pytest.mark.parametrize("thing", [*NAMED.values(), *PARTS], ids=lambda thing: thing.__name__)
def test_a_docstring_names_every_parameter(thing: Any) -> None:
    words = set(re.findall(r"\w+", inspect.getdoc(thing) or ""))
    assert words and not parameters(thing) - words - CLEAR


@pytest.mark.parametrize("call", [foray.Reward, foray.Search, foray.Tool], ids=lambda call: call.__name__)
def test_what_extenders_write_says_what_it_returns_and_raises(call: Any) -> None:
    said = inspect.getdoc(call.__call__) or ""
    assert said.startswith(("Return", "Run")) and re.search("[Rr]aises", said)
