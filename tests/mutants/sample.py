"""`python tests/mutants/sample.py --seed N`: build random mutants into learner, rollout_server and protocol.

Each is judged by the fast tests that execute its line, the most specific first, for at most LIMIT_S. The lines of each
test come from one run of the fast tier under coverage.py, kept in --cache. A line that only a child process of a test
executes is judged by the tests of its file, else of its folder. Results are appended to --cache/SEED.jsonl at once, and
a second run continues there. Exit status: 1 when a mutant survives that `equivalent.txt` does not list.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from operators import Site, is_change, mutated, sites
from run import ROOT, copy_checkout, write

PACKAGES = ("learner", "rollout_server", "protocol")
LIMIT_S = 60
BUDGET_S = 20.0
"""Measured duration of the tests chosen for a mutant, at most, in seconds: three times less than its limit."""
MOST_TESTS = 150
PRELOADED = ("torch", "transformers", "safetensors.torch", "aiohttp", "pydantic", "redis", "pytest")
"""What is slow to import, and no part of the product."""
PYTEST = (
    "-x",
    "-q",
    "-m",
    "not slow",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:cov",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
KILLED, SURVIVED, TIMEOUT = "killed", "SURVIVED", "timeout"
USAGE_ERROR = 4
"""Exit code of pytest: a test id is unknown, or conftest.py cannot be imported."""


@dataclass
class Coverage:
    """Which tests execute which lines. `tests`: path -> line -> test ids; `seconds`, `breadth` (lines): by test id."""

    tests: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    breadth: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def choose(self, site: Site) -> list[str]:
        """Return the test ids for a mutant: within BUDGET_S, those that execute the fewest other lines first."""
        lines = self.tests.get(site.path, {})
        found = set().union(*(lines.get(line, set()) for line in range(site.line, site.last_line + 1)))
        if not found:  # at import, or in a child process only
            found = set().union(*lines.values()) or self._neighbours(site.path)
        chosen, total = [], 0.0
        for name in sorted(found, key=lambda name: (self.breadth[name], name)):
            seconds = self.seconds.get(name, 0.005)
            if chosen and (total + seconds > BUDGET_S or len(chosen) == MOST_TESTS):
                continue
            chosen.append(name)
            total += seconds
        return chosen

    def _neighbours(self, path: str) -> set[str]:
        folder = path.rpartition("/")[0] + "/"
        return set().union(*(t for p, lines in self.tests.items() if p.startswith(folder) for t in lines.values()))


def measure(cache: Path, workers: int) -> None:
    """Run the fast tier once under coverage.py."""
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder", "-q"]
    command += ["-m", "not slow", "--cov-context=test", "--cov-report=", "--durations=0", "-p", "no:cacheprovider"]
    env = os.environ | {"COVERAGE_FILE": str(cache / "coverage"), "PYTHONPATH": str(ROOT)}
    with open(cache / "durations.log", "w") as log:
        done = subprocess.run([*command, *(f"--cov={p}" for p in PACKAGES)], cwd=ROOT, env=env, stdout=log, check=False)
    if done.returncode not in (0, 1):  # 1: a test failed; it judges no mutant, because it fails without one too
        raise SystemExit(f"the fast tests did not run: {cache / 'coverage.log'}")


def load(cache: Path) -> Coverage:
    """Read what `measure` wrote."""
    from coverage import CoverageData

    data, result = CoverageData(str(cache / "coverage")), Coverage()
    data.read()
    for name in data.measured_files():
        if not Path(name).is_relative_to(ROOT):
            continue
        lines = result.tests[str(Path(name).relative_to(ROOT))] = {}
        for line, contexts in data.contexts_by_lineno(name).items():
            lines[line] = {c.rpartition("|")[0] for c in contexts if c}
            for test in lines[line]:
                result.breadth[test] += 1
    for line in (cache / "durations.log").read_text().splitlines():
        if found := re.match(r"([\d.]+)s (?:call|setup) +(tests/.*)", line):
            result.seconds[found[2]] = result.seconds.get(found[2], 0.0) + float(found[1])
    return result


def sample(seed: int, count: int) -> list[Site]:
    """Draw `count` of all changes of the packages, each with the same probability."""
    names = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = sorted(name for name in names.split() if name.endswith(".py"))
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in files}
    found = [site for name, text in texts.items() for site in sites(name, text)]
    random.Random(f"mutants {seed}").shuffle(found)
    return list(itertools.islice((site for site in found if is_change(texts[site.path], site)), count))


def judge(site: Site, checkout: Path, tests: list[str]) -> tuple[str, str]:
    """Return KILLED, SURVIVED or TIMEOUT, and the first failed test or the end of the output."""
    if not tests:
        return SURVIVED, "no test executes its folder"
    path = checkout / site.path
    text = path.read_text(encoding="utf-8")
    write(path, mutated(text, site))
    try:
        return run_tests(checkout, tests)
    finally:
        write(path, text)


def run_tests(checkout: Path, tests: list[str]) -> tuple[str, str]:
    """Run the tests in a fork, since this process has imported what is slow. Returns as `judge`."""
    log = checkout.parent / "mutant.log"
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(checkout)
        with open(log, "w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        ours = (ROOT, Path(__file__).parent)
        sys.path[:] = [str(checkout), *(p for p in sys.path if Path(p or ".").resolve() not in ours)]
        os.environ["PYTHONPATH"] = str(checkout)
        import pytest

        status = 3
        try:
            status = int(pytest.main([*PYTEST, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status, text = _await(child), log.read_text(errors="replace")
    gone = set(re.findall(r"^ERROR: not found: (?:.*/)?(tests/.+)$", text, re.MULTILINE))
    if status == USAGE_ERROR and gone:  # the id of a test that cannot be named on a command line
        left = [name for name in tests if name not in gone]
        return run_tests(checkout, left) if left else (SURVIVED, "no test that can be named")
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
    verdict = {None: TIMEOUT, 0: SURVIVED}.get(status, KILLED)
    return verdict, found[1] if found else "" if verdict == SURVIVED else text[-300:]


def failing(checkout: Path, tests: list[str]) -> str:
    """Return the first test, or file that cannot be collected, that fails without a mutant; "?": unknown, "": none."""
    verdict, first = run_tests(checkout, tests)
    return "" if verdict == SURVIVED else first or "?"


def _await(child: int) -> int | None:
    """Return pytest's exit code, None after LIMIT_S. Ends its process group: tests of a mutant may leave processes."""
    began, status = time.monotonic(), None
    while status is None and time.monotonic() < began + LIMIT_S:
        done, waited = os.waitpid(child, os.WNOHANG)
        status = waited if done else None
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def equivalents() -> set[str]:
    """Return the known equivalent changes (`equivalent.txt`: change, tab, reason)."""
    lines = Path(__file__).with_name("equivalent.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition("\t")[0] for line in lines if line and not line.startswith("#")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2, help="of the coverage run")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "mutants")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th mutant from the I-th on, to share the cores")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    if not (args.cache / "coverage").exists():
        measure(args.cache, args.workers)
    covered, known = load(args.cache), equivalents()
    part, parts = map(int, args.part.split("/"))
    chosen = sample(args.seed, args.count)[part::parts]
    results = args.cache / f"{args.seed}.jsonl"
    done = {r["name"]: r for r in map(json.loads, results.read_text().splitlines())} if results.exists() else {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in PRELOADED:
        importlib.import_module(module)
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        checkout = Path(folder) / "checkout"
        copy_checkout(checkout)
        for site in chosen:
            if site.name in done:
                continue
            began, tests = time.monotonic(), covered.choose(site)
            verdict, first = judge(site, checkout, tests)
            while verdict != SURVIVED:  # do they pass without the mutant?
                blamed = [first] if first in tests else tests
                unsound = "" if sound.issuperset(blamed) else failing(checkout, blamed)
                if not unsound:
                    sound.update(blamed)
                    break
                left = [name for name in tests if name != unsound and name.partition("::")[0] != unsound]
                tests = left if len(left) < len(tests) else [name for name in tests if name not in blamed]
                verdict, first = judge(site, checkout, tests)
            if verdict == SURVIVED and site.change in known:
                verdict = "equivalent"
            seconds = round(time.monotonic() - began, 1)
            done[site.name] = {"name": site.name, "verdict": verdict, "by": first, "tests": len(tests), "s": seconds}
            with open(results, "a") as file:
                file.write(json.dumps(done[site.name]) + "\n")
            print(f"{verdict:<10} {seconds:5.1f} s {len(tests):4d} tests  {site.name}  {first[:100]}", flush=True)
    mine = [done[site.name] for site in chosen]
    survivors = [r["name"] for r in mine if r["verdict"] == SURVIVED]
    judged = [r for r in mine if r["verdict"] != "equivalent"]
    print(f"{len(judged) - len(survivors)} of {len(judged)} killed, {len(mine) - len(judged)} equivalent; survivors:")
    print("\n".join(survivors))
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
