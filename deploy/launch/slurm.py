"""Run on Slurm: a core job (Redis, rollout servers, retrievers, the learner's ranks by srun) and an array of engines.

Slurm owns the restarts of jobs; within the core job the launcher owns those of its processes. Engines find the core by
`run.dir/redis.url`, on a disk that all nodes share. `submit` brings the jobs to the wanted state, and so also scales.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from deploy.config import RunConfig
from deploy.hardware.assign import EngineArgs
from deploy.launch.plan import checkpoint_s
from deploy.run.addresses import REDIS_URL_FILE
from deploy.run.run_dir import RESOLVED, SCRIPTS
from deploy.secrets.env import read_env
from protocol.errors import UserError
from protocol.runtime.files import atomic_write
from protocol.runtime.http.auth import is_loopback
from rollout_server.node.config import SglangEngine

TEMPLATE = Path(__file__).with_name("slurm.sh")
RANK = 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec "$@"'
SLACK_S = 60
"""Seconds between the signal and the time limit, besides those that the processes may need."""
STATES_LEFT = ("CG", "CD", "CA", "F", "TO", "NF", "PR")
"""States of a job that has ended or is ending, as squeue abbreviates them."""

Call = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Job:
    """A job of the run in the queue. `task`: number of an engine, 0 for the core."""

    id: str
    task: int
    pending: bool


def call(argv: Sequence[str]) -> str:
    """Run a command of Slurm and return its output. Raises UserError if it fails."""
    if shutil.which(argv[0]) is None:
        raise UserError(f"{argv[0]} was not found", why="Slurm's commands are needed", todo="run it on a login node")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(argv[:2])} failed", why=done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def names(run: str) -> tuple[str, str]:
    """Return the names of the core job and of the engines' array."""
    return f"{run}-core", f"{run}-engines"


def render(config: RunConfig, given: Sequence[str], part: str) -> str:
    """Return the script of `part`: "core" or "engine". `given`: the arguments of `foray up`, without secrets."""
    slurm, run, core = config.launch.slurm, config.run.dir.absolute(), part == "core"
    text = (slurm.template or TEMPLATE).read_text()
    ranks = config.launch.learner_ranks
    gpus = 0 if not isinstance(config.engine.kind, SglangEngine) else EngineArgs.of(config.engine.kind.args).gpus
    resources = [f"--nodes={slurm.nodes if core else 1}", f"--ntasks-per-node={ranks if core else 1}"]
    if gpus:
        resources.append(f"--gres=gpu:{ranks if core else gpus}")
    srun = ["srun", f"--nodes={slurm.nodes}", f"--ntasks-per-node={ranks}", "--kill-on-bad-exit=1"]
    learner = json.dumps([*srun, "bash", "-c", RANK, "rank"])
    needed_s = 3 * config.launch.shutdown_s + checkpoint_s(config) if core else config.engine.drain_s
    redis_file, secrets = run / REDIS_URL_FILE, config.launch.secrets
    filled = {
        "NAME": names(config.run.id)[0 if core else 1],
        "OUTPUT": str(run / "logs" / ("core.log" if core else "engine-%a.log")),
        "SIGNAL_S": str(math.ceil(needed_s) + SLACK_S),
        "RESOURCES": "\n".join(f"#SBATCH {line}" for line in resources),
        "DIRECTORY": shlex.quote(os.getcwd()),
        "PYTHON": shlex.quote(sys.executable),
        "CONFIG": f"{shlex.join(given)} launch.engines=0",
        "LEARNER": shlex.quote(f"launch.learner_prefix={learner}") if slurm.nodes * ranks > 1 else "",
        "ENGINES": shlex.quote(names(config.run.id)[1]),
        "REDIS_FILE": shlex.quote(str(redis_file)),
        "REDIS_PATH": quote(str(redis_file)),
        "RESOLVED": shlex.quote(str(run / RESOLVED)),
        "SECRETS": shlex.quote(str(secrets.absolute()) if secrets else ""),
        "PART": part,
    }
    lines = [_for_part(line, part) for line in text.splitlines()]
    text = "\n".join(line for line in lines if line is not None) + "\n"
    for name, value in filled.items():
        text = text.replace(f"@{name}@", value)
    return text


def _for_part(line: str, part: str) -> str | None:
    for name in ("core", "engine"):
        if line.startswith(f"#{name.upper()} "):
            return f"#SBATCH {line.partition(' ')[2]}" if name == part else None
    return line


def jobs(name: str, run: Call = call) -> list[Job]:
    """Return the jobs of this user with `name` that run or wait."""
    out = run(["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", f"--name={name}", "--format=%i %K %t"])
    found = [line.split() for line in out.splitlines() if line.strip()]
    left = [(job, task, state) for job, task, state in found if state not in STATES_LEFT]
    return [Job(job, int(task) if task.isdigit() else 0, state == "PD") for job, task, state in left]


def submit(config: RunConfig, given: Sequence[str], run: Call = call) -> list[str]:
    """Submit what the run lacks: the core, and engines up to `launch.engines`. Return lines for the user.

    More engines than that are drained: the last ones finish or hand over their requests, and end.
    """
    check(config)
    folder = config.run.dir.absolute() / SCRIPTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "logs").mkdir(exist_ok=True)  # Slurm does not make it
    for part in ("core", "engine"):
        atomic_write(folder / f"{part}.sh", render(config, given, part), durable=False)
    core, engines = names(config.run.id)
    said = []
    if not jobs(core, run):
        said.append(f"core: job {run(['sbatch', '--parsable', str(folder / 'core.sh')]).strip()}")
    return [*said, *scale(config.run.dir, engines, config.launch.engines, run)]


def scale(directory: Path, name: str, wanted: int, run: Call = call) -> list[str]:
    """Bring the engines of the array `name` to `wanted`. Return lines for the user."""
    there = sorted(jobs(name, run), key=lambda job: (job.pending, job.task))
    keep, drop = there[:wanted], there[wanted:]  # those that run stay first
    said = []
    for job in drop:
        run(_cancel(job))
        said.append(f"engine-{job.task}: {'cancelled' if job.pending else 'drains'}")
    used = {job.task for job in there}
    if new := [number for number in range(1, wanted + len(used) + 1) if number not in used][: wanted - len(keep)]:
        script = directory.absolute() / SCRIPTS / "engine.sh"
        job_id = run(["sbatch", "--parsable", f"--array={','.join(map(str, new))}", str(script)]).strip()
        said.append(f"engines {', '.join(map(str, new))}: job {job_id}")
    return said


def stop(run_id: str, run: Call = call) -> list[str]:
    """Stop the jobs of a run: the core writes a checkpoint first. Return lines for the user; [] if there are none."""
    core, engines = names(run_id)
    said = []
    for job in [*jobs(core, run), *jobs(engines, run)]:
        run(_cancel(job))
        said.append(f"job {job.id}: {'cancelled' if job.pending else 'stopping'}")
    return said


def _cancel(job: Job) -> list[str]:
    # to the script alone, which passes SIGTERM on: one to all processes would end an engine before its node drains it,
    # and Redis before the learner's checkpoint
    return ["scancel", *(["--quiet"] if job.pending else ["--batch", "--signal=USR2"]), job.id]


def check(config: RunConfig) -> None:
    """Raise UserError if the configuration cannot run as jobs."""
    template = config.launch.slurm.template
    if template is not None and not template.is_file():
        raise UserError(f"launch.slurm.template = {template} does not exist", todo=f"copy {TEMPLATE}, or unset it")
    if config.launch.secrets is not None:
        read_env(config.launch.secrets, "node")
    elif not any(line.startswith("host=") and is_loopback(line[5:].strip()) for line in _lines(template)):
        raise UserError(
            "jobs on several nodes need launch.secrets",
            why="their Redis and services listen on the network",
            todo="`foray init run.yaml --secure --hosts NODE,NODE,...` makes them, for the nodes of the core",
        )
    if config.launch.eval_engines:
        raise UserError("launch.eval_engines is not possible on Slurm", todo="set it to 0")


def _lines(template: Path | None) -> list[str]:
    return (template or TEMPLATE).read_text().splitlines()
