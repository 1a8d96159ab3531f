"""How every command takes its configuration: `CONFIG a.b=c ...`, or `--config CONFIG a.b=c ...`. No I/O but stat."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from protocol.runtime.config import not_an_override


def add_config_arguments(
    parser: ArgumentParser, what: str, example: str, *, metavar: str = "CONFIG", secrets: bool = False
) -> None:
    """Positional CONFIG and overrides, --config for scripts and, where `launch` is read, --secrets.

    what  what CONFIG is, for the help
    """
    text = f"{what}; and overrides, e.g. {example}"
    parser.add_argument("given", nargs="*", metavar=f"{metavar} | key=value", help=text)
    parser.add_argument("--config", type=Path, metavar="CONFIG", help="the same as the positional CONFIG")
    if secrets:
        parser.add_argument("--secrets", type=Path, metavar="DIR", help="the same as launch.secrets=DIR")


def config_and_overrides(args: Namespace) -> tuple[Path | None, list[str]]:
    """What the arguments of `add_config_arguments` say; raises UserError where they name two configurations."""
    paths, overrides = split(args.given)
    if args.config is not None:
        paths = [args.config, *paths]
    if len(paths) > 1:
        raise not_an_override(str(paths[1]))
    if getattr(args, "secrets", None) is not None:
        overrides.append(f"launch.secrets={args.secrets}")
    return (paths[0] if paths else None), overrides


def split(given: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(paths, overrides): an override has a `=` and is no file. Path.exists raises where a name is too long."""
    paths = [Path(item) for item in given if "=" not in item or os.path.exists(item)]
    return paths, [item for item in given if Path(item) not in paths]
