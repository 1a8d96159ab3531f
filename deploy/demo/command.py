"""Teach a tiny model to search, on this machine, in minutes.

A world of facts is generated, a 0.2M-parameter Qwen2 is warmed up until it knows the format but searches and copies
badly, and GRPO trains it through the whole ring: Redis, retriever, engine, rollout server and learner as separate
processes. Before and after, it is asked about another world, on which it was never trained.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray demo`."""
    parser.add_argument("--seed", type=int, default=0, help="of worlds, model, sampler (default: 0)")
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/demo-SEED)")
    parser.add_argument("--fresh", action="store_true", help="replace the demo that was trained in that directory")
    parser.add_argument(
        "--control",
        choices=["none", "shuffled-reward"],
        default="none",
        help="shuffled-reward: the same run with rewards permuted among groups, which must not learn",
    )
    parser.add_argument("--model", type=Path, help="a warm-started model of an earlier demo, instead of a new one")
    parser.add_argument("--prepare-only", action="store_true", help="write worlds, model and demo.yaml, start nothing")
    parser.add_argument("--json", action="store_true", help="print summary.json at the end (progress on stderr)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. run.steps=40 launch.engines=2")


def run(args: argparse.Namespace) -> int:
    """0 when the demo ran to its end, 1 when a process failed, 130 after Ctrl-C."""
    from deploy.child import ProcessFailed
    from deploy.demo.prepare import DemoOptions, prepare
    from deploy.demo.report import table
    from deploy.demo.run import run_demo
    from deploy.launcher import Stopped
    from deploy.saved import saved

    out = sys.stderr if args.json else sys.stdout
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f}s  {line}", file=out, flush=True)

    directory = args.dir or Path("runs") / (f"demo-{args.seed}" + ("-control" if args.control != "none" else ""))
    options = DemoOptions(
        directory, args.seed, args.control == "shuffled-reward", args.model, tuple(args.overrides), args.fresh
    )
    prepared = prepare(options, say)
    if args.prepare_only:
        say(f"next: start each process with --config {prepared.config_path} (see the README)")
        return 0
    try:
        summary = run_demo(prepared, began, say)
    except Stopped as stopped:
        for line in saved(directory, f"foray up {prepared.config_path}"):
            say(line)
        return 130 if stopped.number == signal.SIGINT else 0
    except ProcessFailed as failure:
        print(failure.render(), file=sys.stderr, flush=True)
        return failure.exit_code
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(table(summary), file=out, flush=True)
    print(f"\nmore of them: foray replay {directory} --show 3", file=out, flush=True)
    if args.json:
        print(json.dumps({k: v for k, v in summary.items() if k != "examples"}))
    return 0
