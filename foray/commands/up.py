"""Start all processes of a run and monitor them until the learner has finished; on Slurm, submit its jobs.

Prints one line per step. The first failure ends the run and is shown with the end of its log. Ctrl-C stops all
processes in order. Run the same command again to resume from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from protocol.errors import UserError
from protocol.runtime.lifecycle import terminate_at_end_of_stdin
from protocol.runtime.progress import Progress
from protocol.runtime.redis.url import redacted_override
from protocol.runtime.service_cli import NOT_RESTARTED, add_config_arguments, config_and_overrides

if TYPE_CHECKING:
    from deploy.config import RunConfig


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray up`."""
    add_config_arguments(
        parser, "YAML file with the sections run, rollout, engine, learner, ...", "run.steps=20", secrets=True
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved settings and the processes; start nothing"
    )
    parser.add_argument(
        "--takeover", action="store_true", help="replace another run or learner with the same run.id in this Redis"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end (progress on stderr)")
    parser.add_argument(
        "--until-stdin-ends", action="store_true", help="stop when standard input ends: with the program that holds it"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 after the last step (or SIGTERM, or if jobs are submitted), 1 if a process failed, 130 after Ctrl-C."""
    from deploy.config import load_config
    from deploy.launch.slurm import is_core
    from foray.commands.submit import submit

    path, overrides = config_and_overrides(args)
    if path is None:
        raise UserError(
            "`foray up` needs a configuration", todo="`foray init run.yaml` writes one; `foray demo` needs none"
        )
    config = load_config(path, overrides)
    if args.dry_run:
        print_plan(config, as_json=args.json)
        return 0
    if config.launch.backend == "slurm" and not is_core(config.run.id):
        if args.takeover or args.until_stdin_ends:
            todo = "leave them out; the core job starts its own Redis, and `foray down` stops them"
            raise UserError("--takeover and --until-stdin-ends are not possible on Slurm", todo=todo)
        return submit(config, path, overrides, as_json=args.json)
    out = sys.stderr if args.json else sys.stdout
    if args.until_stdin_ends:
        terminate_at_end_of_stdin()

    say = Progress.on(out, stamp=lambda: time.strftime("%H:%M:%S "))
    again = shlex.join(["foray", "up", str(path), *map(redacted_override, overrides)])
    code, summary = up(config, say, again=again, takeover=args.takeover)
    if args.json:
        print(json.dumps(summary))
    return code


def up(
    config: RunConfig, say: Callable[[str], None], *, again: str = "", takeover: bool = False
) -> tuple[int, dict[str, Any]]:
    """Return (exit code, summary of the run); print a failure to stderr. `again`: the command that resumes the run."""
    from deploy.launch.launcher import Launcher, RunStopped
    from deploy.launch.process import ProcessFailed
    from deploy.run.run_dir import finished, saved

    began = time.monotonic()
    launcher = Launcher(config, say=say, again=again, takeover=takeover)
    state, code, error = "done", 0, ""
    if finished(config):
        say(f"run {config.run.id} is already done: {config.run.steps} steps; to train further, raise run.steps")
        return code, {"run": config.run.id, "dir": str(config.run.dir), "state": state, "error": error}
    try:
        with launcher:
            say(f"run {config.run.id} in {config.run.dir.absolute()}")
            say(f"dashboard: {shlex.join(['foray', 'dashboard', str(config.run.dir)])}")
            launcher.start()
            launcher.wait()
    except RunStopped as stopped:
        state, code = "stopped", 130 if stopped.number == signal.SIGINT else 0
    except ProcessFailed as failure:
        state, code, error = failure.state, failure.exit_code, str(failure)
        print(failure.render(), file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    say(f"{state} after {seconds:.0f} s; logs, weights and checkpoints are in {config.run.dir}")
    if state != "done":
        # an error that must be fixed first says what to do; the same command would end so again
        for line in saved(config.run.dir, "" if code in NOT_RESTARTED else again):
            say(line)
    else:
        say(f"next: foray replay {config.run.dir} --show 3")
    return code, {
        "run": config.run.id,
        "dir": str(config.run.dir),
        "state": state,
        "error": error,
        "seconds": round(seconds, 1),
        "last_step": launcher.last_step,
    }


def print_plan(config: RunConfig, *, as_json: bool) -> None:
    """Print the processes and settings of a run, and what would stop it. Starts and requires nothing."""
    from deploy.doctor.run import preflight
    from deploy.hardware.assign import NO_GPUS, placement_lines
    from deploy.hardware.run import cores, planned
    from deploy.hardware.speed import with_dtypes
    from deploy.launch.plan import plan
    from deploy.run.addresses import preview, settle
    from deploy.run.run_dir import RESOLVED

    config = with_dtypes(config)
    addresses = preview(config)
    resolved = config.run.dir / RESOLVED
    try:
        placement, note = planned(config)
    except UserError:  # among the findings below
        placement, note = NO_GPUS, ""
    specs = plan(
        *(config, addresses),
        python=sys.executable,
        resolved=resolved,
        read_secrets=False,
        placement=placement,
        cores=cores(),
    )
    settled = settle(config, addresses)
    found = [finding for finding in preflight(config) if finding.verdict != "ok"]
    if as_json:
        plain = {"settings": settled.model_dump(mode="json"), "processes": [s.to_json() for s in specs]}
        print(json.dumps(plain | {"findings": [asdict(finding) for finding in found]}))
        return
    print(settled.to_yaml(), end="")
    print("# processes, in start order:")
    for spec in specs:
        print(f"#   {spec.name}: {shlex.join(spec.argv)}")
        gpus = ",".join(gpu.id for gpu in spec.place.gpus) or "none"
        print(f"#     host {spec.place.host or 'this machine'}; GPUs {gpus}; restarts per hour: {spec.restarts}")
        print(f"#     log {spec.log}; ready when: {spec.ready}")
    if placement.gpus:
        print(f"# GPUs {note}".rstrip() + ":")
        ports = {spec.name: spec.url.rpartition(":")[2] for spec in specs if spec.kind != "redis" and not spec.rank}
        for line in placement_lines(placement, ports):
            print(f"#   {line}")
    print("# ports shown as 0 and a Redis shown as `redis-server` are chosen when the run starts")
    for finding in found:
        print(f"# {finding.verdict}: {finding.check}: {finding.detail}")
        for name, text in (("why", finding.why), (" do", finding.fix)):
            if text:
                print(f"#   {name}: {text}")
