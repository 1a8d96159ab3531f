"""Train a tiny model to search, on this machine, in minutes.

The demo generates a world of facts and gives a 0.2M-parameter Qwen2 a supervised warm start, which teaches the format
and then adds bad search habits. GRPO removes them through the whole ring: Redis, retriever, engine, rollout server and
learner as separate processes. Before and after, the model is evaluated on another world that is never trained on.
It shows that the processes train together, not how well a model learns to search: the habits disappear in a few steps.

--hard shows learning. There are no habits to remove: the warm start ends while the model cannot yet query and read
well, the questions have one to three hops, and subjects with a second name force another search.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.runtime.lifecycle import Terminated
from protocol.runtime.progress import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray demo`."""
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for the worlds, the model and the sampler (default: 0)"
    )
    parser.add_argument(
        "--hard", action="store_true", help="learn to query and to read, not only to drop bad habits; takes much longer"
    )
    parser.add_argument("--dir", type=Path, help="run directory (default: runs/demo-SEED or runs/demo-hard-SEED)")
    parser.add_argument("--fresh", action="store_true", help="replace an existing demo in that directory")
    parser.add_argument(
        "--control",
        choices=["none", "shuffled-reward"],
        default="none",
        help="shuffled-reward: permute rewards among groups; this run must not learn",
    )
    parser.add_argument("--model", type=Path, help="warm-started model of an earlier demo, to skip the warm start")
    parser.add_argument("--prepare-only", action="store_true", help="write worlds, model and demo.yaml, start nothing")
    parser.add_argument("--json", action="store_true", help="print summary.json at the end (progress on stderr)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. run.steps=40 launch.engines=2")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the demo finished, 1 if a process failed, 130 after Ctrl-C."""
    from deploy.launch.launcher import RunStopped
    from deploy.run.run_dir import saved
    from foray.demo.run import DemoOptions, prepare, run_demo

    out = sys.stderr if args.json else sys.stdout
    began = time.monotonic()

    say = Progress.on(out, stamp=lambda: f"{time.monotonic() - began:6.1f}s  ")
    name = f"demo{'-hard' * args.hard}-{args.seed}" + ("-control" if args.control != "none" else "")
    directory = args.dir or Path("runs") / name
    options = DemoOptions(
        directory,
        args.seed,
        args.control == "shuffled-reward",
        args.model,
        tuple(args.overrides),
        args.fresh,
        args.hard,
    )
    try:
        prepared = prepare(options, say)
    except (KeyboardInterrupt, Terminated):
        say(f"stopped while the demo was prepared, of which nothing is kept; begin again with: {args.again}")
        raise
    if args.prepare_only:
        say(f"next: start each process with --config {prepared.config_path} (see docs/operate.md)")
        return 0
    try:
        summary = run_demo(prepared, began, say)
    except RunStopped as stopped:
        for line in saved(directory, f"foray up {prepared.config_path}"):
            say(line)
        return 130 if stopped.number == signal.SIGINT else 0
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(summary_text(summary), file=out, flush=True)
    print(f"\nmore examples: foray replay {directory} --show 3", file=out, flush=True)
    print(f"ask it questions, such as the one above: {shlex.join(['foray', 'chat', str(directory)])}", file=out)
    if args.json:
        print(json.dumps({k: v for k, v in summary.items() if k != "examples"}))
    return 0


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return the summary as text, with a table of exact match."""
    from foray.demo.run import HOP_NAMES

    s = summary
    lines = [
        "",
        f"exact match on {s['questions']} questions about a world never trained on",
        f"{'':10}{'sampled, T=' + format(s['temperature'], 'g'):>24}{'greedy':>24}",
        f"{'':10}{'before':>12}{'after':>12}{'before':>12}{'after':>12}",
    ]
    rows = [(name, f"{hops}hop_") for hops, name in HOP_NAMES.items() if f"em_{hops}hop_before" in s]
    for name, key in [*rows, ("mean", "")]:
        cells = [s[f"em_{key}before"], s[f"em_{key}after"], s[f"em_greedy_{key}before"], s[f"em_greedy_{key}after"]]
        lines.append(f"{name:10}" + "".join(f"{cell:12.3f}" for cell in cells))
    lines += [
        "",
        _row("with search disabled", f"{s['em_after_without_search']:.3f}"),
        _row("searches per question", f"{s['searches_before']:.2f} before, {s['searches_after']:.2f} after"),
        *_skills(s),
        _row("steps", f"{s['steps']}, {s['weight_updates']} weight updates loaded by running engines"),
        _row("half of the gain", f"after {s['half_gain']} steps" if s["half_gain"] else "never: no gain in training"),
        _row(
            "groups", f"{s['groups_published']} published, {s['groups_trained']} trained, {s['duplicates']} duplicates"
        ),
        _row("lag in steps", f"{s['lag_mean']:.2f} mean, {s['lag_max']:.0f} max"),
        _row("tokens", f"{s['tokens_generated']:,} generated, {s['tokens_trained']:,} trained"),
        _row("seconds", f"{s['seconds']:.0f}: " + ", ".join(f"{k} {v:.0f}" for k, v in s["seconds_by_phase"].items())),
        "",
        f"the same question, before and after: {s['examples']['question']} ({' | '.join(s['examples']['answers'])})",
        f"  before: {_one_line(s['examples']['before'])}",
        f"  after:  {_one_line(s['examples']['after'])}",
    ]
    return "\n".join(lines)


def _skills(summary: Mapping[str, Any]) -> list[str]:
    if "gate_query" not in summary:  # a copied model
        return []
    shares = f"{summary['gate_query']:.2f} of queries right, {summary['gate_evidence']:.2f} of quotes"
    return [_row("skills at the gate", shares)]


def _row(name: str, text: str) -> str:
    return f"{name:26}{text}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
