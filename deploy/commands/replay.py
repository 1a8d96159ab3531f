"""Print trained trajectories: what the policy wrote (trained on), and what it read (marked, not trained on)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.launcher.run_dir import configuration_of, read_configuration, require
from protocol.errors import UserError
from protocol.runtime.config import section
from protocol.settings import RunSettings

if TYPE_CHECKING:
    from rollout_server.environment.tokenizer import TrajectoryTokenizer


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray replay`."""
    parser.add_argument("run_dir", type=Path, nargs="?", help="run directory (default: the latest below ./runs)")
    parser.add_argument(
        "--show", type=int, default=3, help="how many: the best of each of the last groups (default: 3)"
    )
    parser.add_argument("--seq", type=int, help="of this seq instead: its best trajectories")
    parser.add_argument("--all", action="store_true", help="every trajectory of the groups, not the best one")
    parser.add_argument("--model", type=Path, help="directory with the tokenizer (default: the run's own)")
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    """Return 0; raises UserError when there is nothing to show."""
    from deploy.monitor.replay_view import choose, render, to_json
    from deploy.monitor.snapshot import read_ledger_totals
    from learner.checkpoint.journal import read_journal

    if args.show < 1:
        raise UserError("--show must be at least 1")
    directory = args.run_dir if args.run_dir and (args.run_dir / "journal").is_dir() else require(args.run_dir)
    totals = read_ledger_totals(directory)
    entries = read_journal(directory / "journal", lineage=totals.lineage if totals else ())
    run = _settings(directory)
    shown = choose(entries, show=args.show, seq=args.seq, every=args.all, max_lag=run.max_lag if run else None)
    if not shown:
        where = f"no group of seq {args.seq}" if args.seq is not None else "no trained group"
        raise UserError(
            f"{directory} holds {where}",
            why="groups are written when they are trained (learner.journal)",
            todo="wait for the first step, or see `foray status`",
        )
    tokens = _tokens(directory, args.model, run)
    if args.json:
        print(json.dumps([to_json(item, tokens) for item in shown], ensure_ascii=False))
        return 0
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print("\n\n".join(render(item, tokens, colour=colour) for item in shown))
    return 0


def _settings(directory: Path) -> RunSettings | None:
    """Return what the run was started with; None where it was started by hand, from a file elsewhere."""
    path = configuration_of(directory)
    return section(read_configuration(path, directory), "run", RunSettings) if path is not None else None


def _tokens(directory: Path, model: Path | None, run: RunSettings | None) -> TrajectoryTokenizer:
    """Return the tokenizer of `model`, else of the run's newest published weights, else of its initial model."""
    from rollout_server.environment.tokenizer import load_tokenizer

    candidates = [model] if model is not None else sorted((directory / "weights").glob("v*/"), reverse=True)
    if model is None and run is not None:
        candidates.append(run.model)
    for candidate in candidates:
        if (candidate / "tokenizer.json").is_file():
            return load_tokenizer(candidate)
    raise UserError(f"no tokenizer was found for {directory}", todo="name the model's directory: --model DIR")
