"""Benchmark one part of Foray against a baseline, on the same machine in the same run.

Absolute figures vary on a shared machine. Compare the ratio of Foray to the baseline: higher is better. The wheel
contains no benchmarks: this command needs a checkout of the repository.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from protocol.errors import UserError

ROOT = Path(__file__).parents[2]


def benchmarks() -> ModuleType:
    """Import `benchmarks.command` of the checkout. Not statically: `deploy` is below it and is packaged without it.

    Raises UserError outside a checkout.
    """
    if not (ROOT / "benchmarks" / "command.py").is_file():
        raise UserError(
            "`foray bench` needs a checkout of the repository: the installed package has no benchmarks",
            todo="clone the repository, run `make setup` in it, then `.venv/bin/foray bench`",
        )
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module("benchmarks.command")


def subcommands() -> dict[str, str]:
    """Return the benchmarks, name -> help."""
    known: dict[str, str] = benchmarks().subcommands()
    return known


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the settings of benchmark `name` as flags."""
    benchmarks().configure(parser, name)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its report. Return 0. Raises UserError for settings that it cannot use."""
    code: int = benchmarks().run(args)
    return code
