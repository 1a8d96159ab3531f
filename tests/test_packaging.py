"""Our five plain package names must be ours: another distribution that ships a `protocol` would win silently."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["protocol", "rollout_server", "learner", "retriever", "deploy"]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_is_ours(name: str) -> None:
    module = import_module(name)
    assert module.__file__ and Path(module.__file__).resolve().is_relative_to(ROOT)
    assert set(packages_distributions().get(name, ["foray"])) == {"foray"}


def test_no_test_folder_is_a_package() -> None:
    # with tests/protocol/__init__.py the folder would become the package `protocol`
    assert not list((ROOT / "tests").rglob("__init__.py"))
