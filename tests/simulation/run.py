"""`python tests/simulation/run.py --seconds 60 --seed 0`: run schedules on every core until the time is over.

A seed that fails is run again with its log, and the command that repeats it is printed. Exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="wall-clock seconds to go on for")
    parser.add_argument("--seed", type=int, default=0, help="first seed; the next schedules take the next ones")
    parser.add_argument("--only", action="store_true", help="this one seed, aloud")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser.parse_args(argv)


def schedules(first: int, stride: int, seconds: float) -> dict[str, Any]:
    """Run every `stride`-th seed from `first` on, until the time is over or one has failed."""
    from sim.install import installed
    from sim.world import play

    if hasattr(os, "sched_setaffinity"):  # switching between threads is faster on one core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[first % stride % len(cores)]})
    sums: dict[str, Any] = {"schedules": 0, "moves": 0, "virtual_s": 0.0, "failed": []}
    faults, checks, endings = Counter[str](), Counter[str](), Counter[str]()
    until, seed = time.perf_counter() + seconds, first
    with installed():
        while time.perf_counter() < until and not sums["failed"]:
            result = play(seed)
            sums["schedules"] += 1
            sums["moves"] += result.moves
            sums["virtual_s"] += result.virtual_s
            faults, checks, endings = faults + result.faults, checks + result.checks, endings + result.endings
            if result.problem:
                sums["failed"].append([seed, result.problem])
            seed += stride
    return sums | {"faults": faults, "checks": checks, "endings": endings}


def aloud(seed: int) -> int:
    """One schedule with its log; 1 when it failed."""
    from sim.install import installed
    from sim.world import play

    with installed():
        result = play(seed, aloud=True)
    print("\n".join(result.lines))
    print(f"seed {seed}: {result.problem or 'every invariant held'} ({result.moves} moves, {result.virtual_s:.1f} s)")
    return int(bool(result.problem))


def lines(sums: dict[str, Any], seconds: float) -> Iterator[str]:
    """The report."""
    count, rate = sums["schedules"], sums["schedules"] / seconds * 60
    yield f"{count} schedules in {seconds:.0f} s: {rate:.0f} a minute, {sums['virtual_s'] / 3600:.1f} virtual hours"
    yield f"{sums['moves']} moves ({sums['moves'] / max(1, count):.0f} a schedule)"
    for name in ("faults", "checks", "endings"):
        found = sums[name]
        yield f"{name}: {sum(found.values())}"
        yield from (f"  {number:>8}  {what}" for what, number in sorted(found.items(), key=lambda i: (-i[1], i[0])))
    yield f"failed: {len(sums['failed'])}"


def main(argv: list[str]) -> int:
    args = parse(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of strings is part of a schedule
        os.execve(sys.executable, [sys.executable, __file__, *argv], os.environ | {"PYTHONHASHSEED": "0"})
    if args.only:
        return aloud(args.seed)
    began = time.perf_counter()
    with get_context("spawn").Pool(args.jobs) as pool:
        work = [(args.seed + job, args.jobs, args.seconds) for job in range(args.jobs)]
        parts = pool.starmap(schedules, work)
    sums = {name: sum((p[name] for p in parts[1:]), parts[0][name]) for name in parts[0]}
    seconds = time.perf_counter() - began
    if args.json:
        print(json.dumps(sums | {"seconds": seconds}))
    else:
        print("\n".join(lines(sums, seconds)))
    for seed, problem in sums["failed"]:
        print(f"\nseed {seed}: {problem}\n  again: python tests/simulation/run.py --only --seed {seed}", flush=True)
        aloud(seed)
    return int(bool(sums["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
