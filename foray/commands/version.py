"""Print the versions of Foray, Python and the packages that affect a run."""

from __future__ import annotations

import argparse
import json

from foray.versions import versions


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray version`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0. Reads package metadata only, without imports."""
    found = versions()
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<14} {value or '-'}")
    return 0
