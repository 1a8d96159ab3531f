"""Set the number of engines of a run while it goes on.

    foray scale [RUN_DIR] engines=4       run 4 engines: the launcher starts more, or drains the last ones
    foray scale [RUN_DIR] engines=auto    as the configuration says: launch.engines, or launch.autoscale
    foray scale [RUN_DIR]                 show what runs, what is wanted and why

The request goes through Redis to the launcher of the run, and stays until it is replaced. The default run is the latest
below ./runs.
"""

from __future__ import annotations

import argparse
import json
import re

from deploy.run.run_dir import locate
from protocol.errors import UserError

MOST = 1000
_WANTED = re.compile(r"engines=(.*)")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray scale`."""
    parser.add_argument("rest", nargs="*", metavar="RUN_DIR|CONFIG|engines=N", help="the run, and the number")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0. Raises UserError for a number that is none, or a run without a launcher that would follow."""
    from deploy.run.snapshot import take_snapshot
    from foray.commands.dlq import connected
    from learner.delivery.autoscale import usable
    from protocol.keys import Keys

    wanted = [given[1] for text in args.rest if (given := _WANTED.fullmatch(text))]
    if len(wanted) > 1 or any(not (text == "auto" or (text.isdecimal() and int(text) <= MOST)) for text in wanted):
        raise UserError(
            f"engines={wanted[-1]} is not a number of engines", todo=f"give one of 0 to {MOST}, or engines=auto"
        )
    args.given, args.config = [text for text in args.rest if not _WANTED.fullmatch(text)], None
    found = locate(args)
    key = Keys(found.run.id).launcher
    with connected(found) as client:
        if wanted == ["auto"]:
            client.hdel(key, "engines")
        elif wanted:
            client.hset(key, "engines", str(int(wanted[0])))
        asked = client.hget(key, "engines")
    seen = take_snapshot(found.redis_url, found.run.id)
    facts = {
        "run": found.run.id,
        "engines": len(usable(seen)),
        "requested": int(asked) if asked and asked.isdigit() else None,
        "useful": int(seen.learner.values.get("wanted_engines", 0)) if seen.learner else None,
    }
    if args.json:
        print(json.dumps(facts))
        return 0
    requested = f"{facts['requested']} requested" if facts["requested"] is not None else "as configured"
    useful = f"the learner could use {facts['useful'] or 'an unknown number'}"
    print(f"run {found.run.id}: {facts['engines']} engines generate, {requested}, {useful}")
    return 0
