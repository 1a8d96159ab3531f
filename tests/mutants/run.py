"""`python tests/mutants/run.py [WORD ...]`: build each known bug into a copy of the checkout and run its tests.

A mutant is killed when a test of the fast tier (`-m "not slow"`) among its `tests` fails. WORD: only mutants whose name
or path contains it. Exit status: 1 when one survives, or cannot be built in any more.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
TIMES = itertools.count(1_000_000_000)


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(checkout: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run test files of the fast tier in `checkout`; returns pytest's exit status and the first failed test."""
    files = [f"tests/{name}" for name in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        done = subprocess.run(
            command,
            cwd=checkout,
            env=env | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"nothing after {LIMIT_S} s"
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    return done.returncode, found[1] if found else done.stdout[-2000:] if done.returncode else ""


def judge(mutant: Mutant, checkout: Path) -> str:
    """Build `mutant` into the copy, run its tests and take it out again; returns "killed by ..." or what is wrong."""
    path = checkout / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"CANNOT BE BUILT IN: its line stands {text.count(mutant.old)} times in the file"
    write(path, text.replace(mutant.old, mutant.new))
    try:
        code, first = run_tests(checkout, mutant.tests)
    finally:
        write(path, text)
    if code == 1:
        return f"killed by {first}"
    return "SURVIVED" if code == 0 else f"NO VERDICT, pytest ended with {code}: {first}"


def write(path: Path, text: str) -> None:
    """Write with a new mtime each time: Python reuses a .pyc whose mtime (in seconds) and size match."""
    path.write_text(text, encoding="utf-8")
    when = next(TIMES)
    os.utime(path, (when, when))


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.name} {m.path}" for word in words)]
    killed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        checkout = Path(folder)
        copy_checkout(checkout)
        code, first = run_tests(checkout, tuple(sorted({name for m in chosen for name in m.tests})))
        if code:
            print(f"without any mutant the tests fail: {first}", file=sys.stderr)
            return 1
        for mutant in chosen:
            began = time.monotonic()
            verdict = judge(mutant, checkout)
            killed += verdict.startswith("killed")
            print(f"{mutant.name:<48} {time.monotonic() - began:5.0f} s  {verdict}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed by the fast tier")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
