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
    from deploy.run.snapshot import read_ledger_totals
    from foray.watch.replay_view import choose, find_tokenizer, read_settings, render, to_json
    from learner.checkpoint.journal import read_journal

    if args.show < 1:
        raise UserError("--show must be at least 1")
    directory = args.run_dir if args.run_dir and (args.run_dir / "journal").is_dir() else require(args.run_dir)
    totals = read_ledger_totals(directory)
    last = args.show if args.seq is None else None
    lineage = totals.lineage if totals else ()
    entries = read_journal(directory / "journal", lineage=lineage, seq=args.seq, last=last)
    run = read_settings(directory)
    best = 1 if args.seq is None else args.show
    shown = choose(entries, best=best, every=args.all, max_lag=run.max_lag if run else None)
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
