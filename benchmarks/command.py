"""Benchmark one part of Foray against a baseline, on the same machine in the same run.

Absolute figures vary on a shared machine. Compare the ratio of Foray to the baseline: higher is better. The wheel
contains no benchmarks: this command needs a checkout of the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import BENCHMARKS
from benchmarks.report import Circumstances
from deploy.terminal import aligned
from protocol.runtime.config import descriptions, section


def subcommands() -> dict[str, str]:
    """Return the benchmarks, name -> help."""
    return {name: kind.help for name, kind in BENCHMARKS.items()}


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the settings of benchmark `name` as flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="a short run of all parts, whose figures are not meaningful"
    )
    settings = parser.add_argument_group("settings")
    for field, facts in BENCHMARKS[name].model_fields.items():
        default = ",".join(map(str, facts.default)) if isinstance(facts.default, tuple) else facts.default
        text = f"{descriptions(BENCHMARKS[name])[field]} (default: {default})".replace("%", "%%")
        flag = "--" + field.replace("_", "-")
        settings.add_argument(flag, dest=f"set_{field}", default=argparse.SUPPRESS, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its report. Return 0. Raises UserError for settings that it cannot use."""
    kind = BENCHMARKS[args.action]
    given = {name[4:]: value for name, value in vars(args).items() if name.startswith("set_")}
    settings = section({args.action: (kind.quick if args.quick else {}) | given}, args.action, kind)
    circumstances = Circumstances(kind.modules)
    with stdout_to_stderr():
        measured = settings.measure(lambda line: print(f"[{args.action}] {line}", file=sys.stderr, flush=True))
    report: dict[str, Any] = {
        "name": args.action,
        **{key: getattr(measured, key) for key in ("value", "unit", "baseline", "ratio")},
        **measured.details,
        "settings": settings.model_dump(mode="json"),
    }
    report |= circumstances.facts(report, kind.targets)
    print(json.dumps(rounded(report)) if args.json else "\n".join(report_lines(rounded(report))))
    return 0


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, also for child processes: libraries print while they are imported.

    Only the report goes to stdout, so that `--json` prints one JSON object.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def rounded(value: Any) -> Any:
    """Return `value` with every float rounded to four significant digits."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [rounded(item) for item in value]
        case _:
            return value


def report_lines(report: dict[str, Any], indent: str = "") -> list[str]:
    """Return the report as text, one figure per line; a list of records becomes a table."""
    lines = []
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *report_lines(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            rows = aligned(list(value[0]), ([str(item) for item in row.values()] for row in value), numbers_from=0)
            lines += [f"{indent}{name}", *(f"{indent}  {row}" for row in rows)]
        else:
            lines.append(f"{indent}{name:<20} {value}")
    return lines
