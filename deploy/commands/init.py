"""Write a configuration file to start from: every setting with its default and what it means."""

from __future__ import annotations

import argparse
from pathlib import Path

from protocol.errors import UserError

PRESETS = Path(__file__).parent.parent / "configs" / "presets"


def presets() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray init`."""
    parser.add_argument("file", type=Path, help="file to write, e.g. run.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values to put in, e.g. run.model=/models/qwen"
    )
    parser.add_argument("--preset", choices=presets(), help="a published recipe to begin with, instead of the defaults")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def run(args: argparse.Namespace) -> int:
    """0 when the file was written; raises UserError when it exists already."""
    from deploy.config import from_tree
    from deploy.settings_doc import document
    from protocol.settings import read_tree

    if args.file.exists() and not args.force:
        raise UserError(f"{args.file} exists already", todo="take another name, or --force to replace it")
    recipe = PRESETS / f"{args.preset}.yaml" if args.preset else None
    # `${NAME}` stays as it is: the file is to be read on other machines too
    text = document(from_tree(read_tree(recipe, args.overrides)))
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(text)
    print(f"wrote {args.file}; next: foray doctor {args.file}, then foray up {args.file} --dry-run")
    return 0
