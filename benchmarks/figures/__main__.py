"""Make the figures of `docs/benchmarks.md` one by one, and generate the pages from them.

    python -m benchmarks.figures [NAME ..] [--force]   missing or stale figures; --force: all of them
    python -m benchmarks.figures --gpu                 figures that need a GPU; exit code 2 without one
    python -m benchmarks.figures --page                only the pages, from the existing figures
    python -m benchmarks.figures --check               exit code 1 if a page is not up to date

Each figure is a process with a time limit (`Figure.minutes`); its output is kept below runs/figures. Failures are
listed at the end and do not stop the others; the next call continues with the missing ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import rounded
from benchmarks.figures.page import PAGES, page, verdict
from benchmarks.figures.table import FOLDER, MODEL, NEEDS_BFLOAT16, NEEDS_GPU, RUNS, Figure, figures, read, stale
from benchmarks.report import ROOT, Circumstances, judged
from deploy.hardware.gpus import without_cuda
from deploy.hardware.speed import cpu_speed
from protocol.errors import ForayError
from protocol.runtime.files import atomic_write
from protocol.runtime.lifecycle import terminating

STOP_S = 60.0
"""Time for an interrupted process to stop its children, in seconds."""
WARM_START = ("demo", "--prepare-only", "--fresh", "--seed", "0", "--dir", str(MODEL.parent))


def main(argv: Sequence[str]) -> int:
    """Return 0 if all requested figures exist, 1 if one failed or the page is out of date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description="Make the figures.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"figures to make, of {', '.join(figures())} (default: all)"
    )
    parser.add_argument("--force", action="store_true", help="also make figures that are up to date")
    parser.add_argument("--gpu", action="store_true", help="make the figures that need a GPU")
    parser.add_argument("--page", action="store_true", help="make only the page")
    parser.add_argument("--check", action="store_true", help="make nothing; check that the page is up to date")
    args = parser.parse_args(argv)
    if args.check:
        old = [path.name for path, template in PAGES.items() if path.read_text() != page(template)]
        print(f"not up to date with docs/figures and their templates: {', '.join(old) or 'none'}")
        return 1 if old else 0
    if unknown := sorted(set(args.names) - set(figures())):
        parser.error(f"unknown figures: {', '.join(unknown)}")
    if args.gpu and (why := without_cuda()):
        print(f"error: no GPU for the figures {', '.join(NEEDS_GPU)}\n  why: {why}", file=sys.stderr)
        return 2
    names = NEEDS_GPU if args.gpu and not args.names else args.names
    with terminating():  # a child is stopped on the way out
        failed = [] if args.page else make_all(names, force=args.force)
    write_pages()
    if args.gpu:
        failed += _targets(names)
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def _targets(names: Sequence[str]) -> list[str]:
    """Print each target with its figure. Return one line per missed target."""
    missed = []
    for figure in (figures()[name] for name in names):
        kept = read(figure)
        for target in kept["targets"] if kept else ():
            line = f"{figure.name}: {verdict(target)}"
            print(line)
            missed += [] if target["met"] else [line]
    return missed


def make_all(names: Sequence[str], *, force: bool) -> list[str]:
    """Make the requested figures that are not up to date. Return one line per failure."""
    failed = []
    for name, figure in figures().items():
        if names and name not in names:
            continue
        if name in NEEDS_GPU and (why := without_cuda()):
            print(f"{name}: skipped, {why}", flush=True)
            continue
        if name in NEEDS_BFLOAT16 and (speed := cpu_speed()) and speed.best != "bfloat16":
            print(f"{name}: skipped, {speed}", flush=True)
            continue
        kept = read(figure)
        if kept is not None and not stale(figure, kept) and not force:
            print(f"{name}: up to date, measured {kept['machine']['date']} at {kept['machine']['commit']}", flush=True)
            continue
        print(f"{name}: {figure.command}", flush=True)
        try:
            make(figure)
        except ForayError as error:
            failed.append(f"{name}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        write_pages()
    return failed


def write_pages() -> None:
    """Generate the pages from the figures."""
    for path, template in PAGES.items():
        atomic_write(path, page(template), durable=False)


def make(figure: Figure, *, root: Path = ROOT, folder: Path = FOLDER, timeout_s: float | None = None) -> dict[str, Any]:
    """Run the command and write its file. Raises ForayError if it fails, times out or prints no JSON object."""
    timeout_s = figure.minutes * 60 if timeout_s is None else timeout_s
    if figure.warm and not (root / MODEL / "model.safetensors").exists():
        _run("warm", WARM_START, root, timeout_s)
    circumstances = Circumstances(figure.modules)
    out = _run(figure.name, figure.argv, root, timeout_s)
    try:
        report = json.loads(out)
        report = report[figure.part_of] if figure.part_of else report
    except (ValueError, KeyError) as error:
        raise ForayError(f"printed no report ({error}): {_raw(root, figure.name)}.out") from error
    if "machine" not in report:  # a benchmark reports these itself
        report |= circumstances.facts(report, figure.targets)
    report["targets"] = [judged(target, report) for target in figure.targets]
    made = rounded({"figure": figure.name, "command": figure.command, **report})
    text = json.dumps(made, indent=1).replace(f"{root}/", "")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / figure.path.name, text + "\n", durable=False)
    return json.loads(text)  # type: ignore[no-any-return]


def _raw(root: Path, name: str) -> Path:
    return root / RUNS / name


def _run(name: str, argv: Sequence[str], root: Path, timeout_s: float) -> str:
    """Run `foray ARGV` and return its stdout; both streams are kept in files."""
    return logged(name, (sys.executable, "-m", "foray", *argv), root, timeout_s, root / RUNS)


def logged(name: str, argv: Sequence[str], root: Path, timeout_s: float, folder: Path) -> str:
    """Run a command in `root` and return its stdout; both streams are kept in files of `folder`. Raises ForayError."""
    raw = folder / f"{name}.out"
    raw.parent.mkdir(parents=True, exist_ok=True)
    with raw.open("wb") as out, raw.with_suffix(".log").open("wb") as log:
        child = subprocess.Popen(
            argv,
            cwd=root,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ForayError(f"took more than {timeout_s:g} s; its log: {raw.with_suffix('.log')}") from None
        finally:
            _stop(child)
    if code:
        raise ForayError(f"exited with code {code}; its log: {raw.with_suffix('.log')}")
    return raw.read_text()


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the process, so that it stops its children; after a timeout or another signal kill its session."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(STOP_S)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
