"""Run on Slurm: a core job (Redis, rollout servers, retrievers, the learner's ranks by srun) and an array of engines.

Slurm owns the restarts of jobs; within the core job the launcher owns those of its processes. Engines find the core by
`run.dir/redis.url`, on a disk that all nodes share. `submit` brings the jobs to the wanted state; the launcher of the
core follows `foray scale` and `launch.autoscale` by `scale`.
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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from deploy.config import RunConfig
from deploy.hardware.assign import EngineArgs
from deploy.launch.plan import checkpoint_s
from deploy.launch.supervisor import SHUTDOWN_S
from deploy.run.addresses import REDIS_URL_FILE, Addresses, redis_file_url, settle
from deploy.run.redis_server import connect
from deploy.run.run_dir import RESOLVED, SCRIPTS
from deploy.secrets.env import read_env, redis_url_for
from protocol.errors import ForayError, UserError
from protocol.keys import Keys
from protocol.runtime.files import atomic_write
from protocol.runtime.http.auth import is_loopback
from rollout_server.node.config import SglangEngine

TEMPLATE = Path(__file__).with_name("slurm.sh")
RANK = 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec "$@"'
SLACK_S = 60
"""Seconds between the signal and the time limit, besides those that the processes may need."""
STATES_LEFT = ("CG", "CD", "CA", "F", "TO", "NF", "PR")
"""States of a job that has ended or is ending, as squeue abbreviates them."""

ANSWER_S, POLL_S = 120.0, 1.0
LEAVING = "foray: leaves"
"""Comment of the job of an engine that drains, so that it is not counted, and its number not given again."""
Call = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Job:
    """A job of the run in the queue. task: number of an engine, 0 for the core. leaving: an engine that drains."""

    id: str
    task: int
    pending: bool
    leaving: bool


def call(argv: Sequence[str]) -> str:
    """Run a command of Slurm and return its output. Raises UserError if it fails."""
    if shutil.which(argv[0]) is None:
        raise UserError(f"{argv[0]} was not found", why="Slurm's commands are needed", todo="run it on a login node")
    # within the core job: those of another job are no settings for this one
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False, env=env)
    except subprocess.TimeoutExpired:
        raise UserError(f"{argv[0]} did not answer within {ANSWER_S:g} s", todo="see `sdiag`; try again") from None
    if done.returncode:
        raise UserError(f"{' '.join(argv[:2])} failed", why=done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def names(run: str) -> tuple[str, str]:
    """Return the names of the core job and of the engines' array."""
    return f"{run}-core", f"{run}-engines"


def is_core(run: str) -> bool:
    """Return whether this process is in the core job of `run`."""
    return os.environ.get("SLURM_JOB_NAME") == names(run)[0]


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
    needed_s = 3 * SHUTDOWN_S + checkpoint_s(config) if core else config.engine.drain_s
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


def jobs(run_id: str, run: Call = call) -> list[Job]:
    """Return the jobs of a run that run or wait, the core first."""
    argv = ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", f"--name={','.join(names(run_id))}"]
    lines = [line.split(maxsplit=3) for line in run([*argv, "--format=%i %K %t %k"]).splitlines() if line.strip()]
    found = [
        Job(id_, int(task) if task.isdigit() else 0, state == "PD", comment == [LEAVING])
        for id_, task, state, *comment in lines
        if state not in STATES_LEFT
    ]
    return sorted(found, key=lambda job: job.task)


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
    if not (resolved := folder.parent / RESOLVED).exists():  # until the core replaces it, for `foray down`
        atomic_write(resolved, settle(config, Addresses("", None)).to_yaml(), durable=False)
    said = []
    if not any(not job.task for job in jobs(config.run.id, run)):
        said.append(f"core: job {run(['sbatch', '--parsable', str(folder / 'core.sh')]).strip()}")
    return [*said, *scale(config, config.launch.engines, run)]


def scale(config: RunConfig, wanted: int, run: Call = call) -> list[str]:
    """Bring the engines of a run to `wanted`. Return lines for the user. Raises UserError if a command fails."""
    there = [job for job in jobs(config.run.id, run) if job.task]
    # those that run stay first
    staying = sorted((job for job in there if not job.leaving), key=lambda job: job.pending)
    drop, used = staying[wanted:], {job.task for job in there}
    said = _ask_to_drain(config, [f"engine-{job.task}" for job in drop if not job.pending])
    for job in drop:
        if not job.pending:
            run(["scontrol", "update", f"JobId={job.id}", f"Comment={LEAVING}"])
        run(_cancel(job))
        said.append(f"engine-{job.task}: {'cancelled' if job.pending else 'drains'}")
    more = max(wanted - len(staying), 0)
    if new := [number for number in range(1, more + len(used) + 1) if number not in used][:more]:
        script = config.run.dir.absolute() / SCRIPTS / "engine.sh"
        job_id = run(["sbatch", "--parsable", f"--array={','.join(map(str, new))}", str(script)]).strip()
        said.append(f"engines {', '.join(map(str, new))}: job {job_id}")
    return said


def _ask_to_drain(config: RunConfig, engines: Sequence[str]) -> list[str]:
    """Ask engines through Redis to drain, all at once. Return a line if that is not possible."""
    import redis

    if not engines:
        return []
    place, secrets = redis_file_url(config.run.dir), config.launch.secrets
    try:
        with connect(redis_url_for(secrets, "operator", place) if secrets else place, timeout_s=2.0) as client:
            client.sadd(Keys(config.run.id).drain, *engines)
    except (redis.RedisError, OSError, UserError) as error:
        return [f"the engines are not asked through Redis to drain, but by a signal to their jobs alone: {error}"]
    return []


def stop(run_id: str, timeout_s: float, run: Call = call) -> list[str]:
    """Stop the jobs of a run, and wait until they have ended: the core writes a checkpoint first.

    Return lines for the user, [] if there are no jobs. Raises ForayError if they do not end in time.
    """
    said = []
    for job in jobs(run_id, run):
        run(_cancel(job))
        said.append(f"job {job.id}: {'cancelled' if job.pending else 'stopped'}")
    deadline = time.monotonic() + timeout_s
    while left := [job.id for job in jobs(run_id, run)] if said else []:
        if time.monotonic() > deadline:
            raise ForayError(f"jobs {', '.join(left)} did not end within {timeout_s:g} s: `squeue --me` shows them")
        time.sleep(POLL_S)
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
