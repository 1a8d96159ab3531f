"""Write the report of a run: one HTML file without scripts, to keep or to mail.

It has the summary, problems, curves, validation, staleness, trajectories, configuration and versions. It works on a
running and on a finished run, with and without its Redis.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.run.run_dir import add_arguments, locate
from protocol.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray report`."""
    add_arguments(parser)
    parser.add_argument("--out", type=Path, help="file (default: report.html in the run directory)")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the file is written. Raises UserError if it cannot be written."""
    from foray.watch.page import to_html
    from foray.watch.records import find_tokenizer
    from foray.watch.report import build_report
    from foray.watch.status import look

    found = locate(args, without_redis=True)
    out: Path = args.out or found.directory / "report.html"
    try:
        tokens = find_tokenizer(found.directory, None, found.run)
    except UserError:
        tokens = None
    page = to_html(build_report(found, look(found), tokens))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}", todo="give another file with --out") from error
    print(f"wrote {out} ({out.stat().st_size / 1024:.0f} KiB)")
    return 0
