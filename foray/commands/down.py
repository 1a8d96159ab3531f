"""Stop the run of a directory: learner first (it writes a checkpoint), Redis last."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

from deploy.run import run_dir
from deploy.run.redis_server import connect
from protocol.errors import ForayError, UserError
from protocol.keys import Keys
from protocol.runtime.config import read_tree, section
from protocol.runtime.redis.url import redacted
from protocol.settings import RunSettings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray down`."""
    parser.add_argument("run_dir", type=Path, nargs="?", help="run directory (default: the latest below ./runs)")
    parser.add_argument("--timeout", type=float, default=120.0, help="timeout in seconds (default: 120)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _stop_jobs(directory: Path, timeout_s: float) -> list[str]:
    """Stop the run's jobs on Slurm. Return what was done, [] if there are none."""
    from deploy.launch import slurm

    return slurm.stop(section(read_tree(run_dir.configuration_of(directory)), "run", RunSettings).id, timeout_s)


def run(args: argparse.Namespace) -> int:
    """Return 0 when nothing runs there. Raises ForayError if the launcher does not end in time."""
    directory = run_dir.require(args.run_dir)
    jobs = _stop_jobs(directory, args.timeout) if (directory / run_dir.SCRIPTS).is_dir() else []
    was_running = bool(jobs) or stop(directory, args.timeout)
    if args.json:
        print(json.dumps({"run_dir": str(directory), "was_running": was_running, "jobs": jobs}))
    else:
        print("\n".join([*jobs, f"{directory}: {'stopped' if was_running else 'nothing was running'}"]))
        if was_running:
            print("\n".join(run_dir.saved(directory, run_dir.read_record(directory).get("again", ""))))
    return 0


def stop(directory: Path, timeout_s: float) -> bool:
    """Stop the run of `directory` and return whether one was in progress. Raises ForayError if it does not end."""
    if not run_dir.is_held(directory) and not run_dir.runs_elsewhere(directory):
        return False
    if (pid := run_dir.launcher_pid(directory)) is not None:
        os.kill(pid, signal.SIGTERM)
    elif run_dir.runs_elsewhere(directory):
        _ask(directory)
    else:
        raise ForayError(
            f"cannot tell which process runs {directory}: {directory / run_dir.LOCK} names no process of this machine. "
            "Stop it on the host where `foray up` runs"
        )
    if not run_dir.wait_until_free(directory, timeout_s):
        which = f"process {pid}" if pid else "on another host"
        raise ForayError(
            f"the launcher ({which}) of {directory} did not end within {timeout_s:g} s: its learner may still finish a "
            "step, and it ends after that; the same command again kills what has not ended"
        )
    return True


def _ask(directory: Path) -> None:
    """Ask the launcher on another host to stop, by its name in the run's Redis. Raises UserError."""
    import redis

    found = run_dir.locate(argparse.Namespace(given=[str(directory)], config=None))
    with connect(found.redis_url) as client:
        try:
            client.hset(Keys(found.run.id).launcher, "stop", str(found.record.get("launcher", "")))
        except (redis.RedisError, OSError) as error:
            raise UserError(
                f"cannot ask the launcher of {directory}, which is on another host, to stop",
                why=f"the Redis at {redacted(found.redis_url)}: {error}",
                todo="export FORAY_REDIS_URL with the login of `operator`, or stop it on its host",
            ) from None
