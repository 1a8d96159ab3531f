"""Print trained trajectories: what the policy wrote (trained), and what it read (marked, not trained)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import chain
from pathlib import Path

from deploy.run.run_dir import require
from protocol.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray replay`."""
    parser.add_argument("run_dir", type=Path, nargs="?", help="run directory (default: the latest below ./runs)")
    parser.add_argument(
        "--show",
        type=int,
        default=3,
        help="number of groups: print the best trajectory of each of the last (default: 3)",
    )
    parser.add_argument("--seq", type=int, help="print the best trajectory of this seq instead")
    parser.add_argument("--all", action="store_true", help="print every trajectory of a group, not only the best one")
    parser.add_argument("--model", type=Path, help="directory with the tokenizer (default: the run's own)")
    parser.add_argument("--json", action="store_true", help="print one JSON array; with --all one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Return 0. Raises UserError if there is nothing to show."""
    from foray.watch.records import find_tokenizer, read_lineage, read_settings, trained_groups
    from foray.watch.transcript import choose, render, to_json

    if args.show < 1:
        raise UserError("--show must be at least 1")
    directory = args.run_dir if args.run_dir and (args.run_dir / "journal").is_dir() else require(args.run_dir)
    entries = trained_groups(directory, seq=args.seq, last=args.show if args.seq is None else None)
    run = read_settings(directory)
    best = 1 if args.seq is None else args.show
    max_lag, lineage = run.max_lag if run else None, read_lineage(directory)
    shown = choose(entries, best=best, every=args.all, max_lag=max_lag, lineage=lineage)
    first = next(shown, None)
    if first is None:
        where = f"no group of seq {args.seq}" if args.seq is not None else "no trained group"
        raise UserError(
            f"{directory} has {where}",
            why="the journal records groups when they are trained (learner.journal)",
            todo="wait for the first step, or run `foray status`",
        )
    tokens = find_tokenizer(directory, args.model, run)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    start, between, end = ("", "\n", "") if args.all else ("[", ", ", "]")
    if not args.json:
        start, between, end = "", "\n\n", ""
    print(start, end="")
    # one at a time: all trajectories of a run do not fit in memory
    for number, item in enumerate(chain([first], shown)):
        text = (
            json.dumps(to_json(item, tokens), ensure_ascii=False) if args.json else render(item, tokens, colour=colour)
        )
        print(f"{between if number else ''}{text}", end="")
    print(end)
    return 0
