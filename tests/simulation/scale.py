"""`python tests/simulation/scale.py`: the autoscaler beside every fixed number of engines, in virtual time.

The learner, its metrics, the rollout servers' leases and metrics, and the vote are the product's code. An engine is a
number of places in which a trajectory sleeps; it takes JOIN_S to join, and leaves when its last trajectory has ended. A
training step sleeps too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

if TYPE_CHECKING:
    from sim.farm import Played

STEPS, MOST = 240, 6
LEARNERS = ("slow", "fast", "changing")


def _job(job: tuple[str, int, int, int]) -> Played:
    from sim.farm import play

    logging.disable(logging.CRITICAL)
    return play(*job)


def lines(played: list[Played]) -> list[str]:
    """The table."""
    out = ["| learner | engines | steps an hour | engine hours | learner waits |", "|---|---|---|---|---|"]
    for one in played:
        name = str(one.fixed) if one.fixed else "autoscale"
        out.append(
            f"| {one.learner} | {name} | {one.steps_per_hour:.1f} | {one.engine_hours:.2f} | {one.waiting:.0%} |"
        )
    for one in (p for p in played if not p.fixed):
        rows = [p for p in played if p.learner == one.learner and p.fixed]
        if rows:
            best = max(rows, key=lambda p: p.steps_per_hour)
            share = one.steps_per_hour / best.steps_per_hour
            out.append(
                f"{one.learner}: {share:.2f} of the steps an hour of {best.fixed} engines, "
                f"{one.engine_hours / best.engine_hours:.2f} of their hours, {len(one.reversals)} reversals"
            )
        changes = [(at, n) for (_, m, _), (at, n, _) in pairwise(one.trace) if n != m]
        out.append(f"{one.learner}: engines 1" + "".join(f", {n} from {at / 60:.0f} min" for at, n in changes))
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=LEARNERS, action="append")
    parser.add_argument("--fixed", type=int, nargs="*", default=list(range(MOST + 1)), help="0: the autoscaler")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="one JSON object per run")
    args = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of strings is part of a schedule
        os.execve(sys.executable, [sys.executable, __file__, *argv], os.environ | {"PYTHONHASHSEED": "0"})
    jobs = [(name, n, args.seed, args.steps) for name in args.only or LEARNERS for n in args.fixed]
    with get_context("spawn").Pool(args.jobs) as pool:
        played = pool.map(_job, jobs, chunksize=1)
    print("\n".join(json.dumps(vars(p)) for p in played) if args.json else "\n".join(lines(played)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
