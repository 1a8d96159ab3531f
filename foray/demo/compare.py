"""Run the demo with several settings from one warm start, and compare the results.

The file lists the variants as `name: [key=value, ...]`, with overrides of the demo. Each variant is a complete demo
(processes, Redis, held-out questions before and after) in its own folder. They run one after another and share the
warm start of the first. The value `last:NAME` is the last weights that variant NAME published.
`foray curves DIR/* --plot FILE.svg` plots the curves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.terminal import aligned
from protocol.errors import UserError
from protocol.runtime.config import NOT_YAML, not_an_override, parse_yaml
from protocol.runtime.service_cli import split_overrides
from protocol.versions import PolicyVersion

VARIANTS = Path(__file__).with_name("algorithms.yaml")
GOAL = 0.8
"""Exact match in training, averaged over WINDOW steps, that a variant should reach."""
WINDOW = 10
LAST = "last:"
"""Prefix of the name of a variant: its last weights."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray compare`."""
    text = "YAML file of variants (default: the algorithms); and overrides for all of them, e.g. run.steps=120"
    parser.add_argument("given", nargs="*", metavar="FILE | key=value", help=text)
    parser.add_argument("--dir", type=Path, default=Path("runs/compare"), help="directory for the runs")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run only these variants")
    parser.add_argument("--model", type=Path, help="warm-started model of an earlier demo, to skip the warm start")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for the worlds, the model and the sampler (default: 0)"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", dest="set", help="further overrides for all variants"
    )
    parser.add_argument("--fresh", action="store_true", help="replace existing runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end (progress on stderr)")


def run(args: argparse.Namespace) -> int:
    """Return 0 if every variant finished, else the exit status of the first one that did not."""
    from foray.demo.run import DemoOptions, prepare, run_demo

    out = sys.stderr if args.json else sys.stdout
    files, shared = split_overrides(args.given)
    shared += args.set
    if len(files) > 1:
        raise not_an_override(str(files[1]))
    variants = read_variants(files[0] if files else VARIANTS, args.only)
    rows: dict[str, dict[str, Any]] = {}
    model = args.model
    for name, overrides in variants.items():
        began = time.monotonic()
        print(f"--- {name}: {' '.join(overrides) or 'the demo without changes'}", file=out, flush=True)

        def say(line: str, began: float = began) -> None:
            print(f"{time.monotonic() - began:6.1f}s  {line}", file=out, flush=True)

        directory = args.dir / name
        overrides = [with_weights(item, args.dir) for item in overrides]
        prepared = prepare(DemoOptions(directory, args.seed, False, model, (*shared, *overrides), args.fresh), say)
        summary = run_demo(prepared, began, say)
        model = model or directory / "model"
        (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        rows[name] = row(summary)
    args.dir.mkdir(parents=True, exist_ok=True)
    (args.dir / "compare.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(render(rows), file=out, flush=True)
    if args.json:
        print(json.dumps(rows))
    return 0


def read_variants(path: Path, only: list[str]) -> dict[str, list[str]]:
    """Return name -> overrides. Raises UserError for an invalid file or a name that it does not contain."""
    try:
        found = parse_yaml(path.read_text())
    except (OSError, *NOT_YAML) as error:
        raise UserError(f"cannot read {path}", why=" ".join(str(error).split())) from None
    if not isinstance(found, dict) or not all(isinstance(v, list) for v in found.values()):
        raise UserError(f"{path} is not a list of variants", todo="write each line as `name: [key=value, ...]`")
    missing = [name for name in only if name not in found]
    if missing:
        raise UserError(f"{path} has no variant {', '.join(missing)}", todo=f"choose among {', '.join(found)}")
    return {name: [str(item) for item in found[name]] for name in (only or found)}


def with_weights(override: str, directory: Path) -> str:
    """Return the override, with the value `last:NAME` replaced by the folder of the last weights of variant NAME.

    Raises UserError if that variant has not run in `directory`.
    """
    key, _, value = override.partition("=")
    if not value.startswith(LAST):
        return override
    name = value.removeprefix(LAST)
    found = {v: p for p in (directory / name / "weights").glob("v*") if (v := PolicyVersion.parse(p.name[1:]))}
    if not found:
        raise UserError(
            f"{key} needs the last weights of variant {name}, and {directory / name} has none",
            todo=f"run that variant first: --only {name}, with the same --dir",
        )
    return f"{key}={found[max(found)].absolute()}"


def row(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table row of one variant. reached: first step at which the mean of WINDOW steps was at least GOAL."""
    curve = summary["curve"]
    means = [sum(curve[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(curve) + 1)]
    reached = next((i + WINDOW for i, mean in enumerate(means) if mean >= GOAL), None)
    return {
        "steps": summary["steps"],
        "reached": reached,
        "em_last": round(means[-1], 3) if means else None,
        "em_best": round(max(means), 3) if means else None,
        "held_out_before": summary["em_before"],
        "held_out_after": summary["em_after"],
        "held_out_greedy": summary["em_greedy_after"],
        "without_search": summary["em_after_without_search"],
        "searches": summary["searches_after"],
        "seconds": summary["seconds_by_phase"]["training"],
    }


def render(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table as text."""
    columns = ("reached", "em_last", "em_best", "held_out_after", "held_out_greedy", "without_search", "seconds")
    cells = ((name, *("never" if of[c] is None else str(of[c]) for c in columns)) for name, of in rows.items())
    note = f"reached: first step at which exact match in training, averaged over {WINDOW} steps, is at least {GOAL}"
    return "\n".join([*aligned(("", *columns), cells, numbers_from=1), note])
