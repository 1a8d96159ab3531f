"""Start all processes of a run on one machine in order, monitor them, stop them in order.

    with Launcher(load(Path("run.yaml"))) as launcher:
        launcher.start()                      # or start("redis", "retriever", ...), then the rest later
        score = launcher.during(evaluate)     # any long call; the processes are monitored meanwhile
        launcher.wait()                       # until the learner has finished its last step

There is no background thread: `wait`, `during` and `check` monitor the processes. Leaving the `with` block stops all.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from types import FrameType, TracebackType
from typing import Any, TypeVar

from deploy.config import RunConfig
from deploy.doctor.finding import Finding, NotReady
from deploy.doctor.identity import CHECK
from deploy.doctor.machine import usable
from deploy.doctor.model import ENGINE_TOKENIZER, RUN_TOKENIZER
from deploy.doctor.run import inputs, preflight
from deploy.hardware.assign import Placement
from deploy.hardware.run import cores
from deploy.hardware.speed import with_dtypes
from deploy.launch import slurm
from deploy.launch.plan import KINDS, ProcessSpec, Ready, plan
from deploy.launch.process import LaunchBackend, LocalBackend, ManagedProcess, ProcessFailed
from deploy.launch.scale import EngineScaler, with_engines
from deploy.launch.supervisor import POLL_S, EngineLosses, Readiness, Say, Supervisor
from deploy.run.addresses import REDIS_URL_FILE, Addresses, choose, dated, reachable, seen_from_here, settle
from deploy.run.history import StepTail, read_history
from deploy.run.learning import learning_problems
from deploy.run.redis_server import check_server
from deploy.run.run_dir import RESOLVED, discard, hold, write_record
from deploy.secrets.env import SECRET_VARIABLES
from learner.delivery.identity import ensure_lineage_id
from learner.observability.reporting import step_line
from learner.validation.results import describe
from protocol.errors import ForayError, UserError
from protocol.redaction import for_terminal
from protocol.runtime.files import atomic_write
from protocol.runtime.progress import HungUp, Progress, TaskProgress
from protocol.runtime.redis.url import redacted

T = TypeVar("T")
STEP_S = 30.0
"""Seconds without output before a progress line while the learner trains: a step may take long."""
LONGEST_FAILURE = 8000
STAGES = (("redis",), ("retriever",), ("engine", "rollout", "learner"))
"""Kinds that start together: a stage may need the earlier ones; within a stage the order does not matter."""


class RunStopped(ForayError):
    """The user (or `foray down`) stopped the run. `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


REPLACED_BY_TAKEOVER = (CHECK, RUN_TOKENIZER, ENGINE_TOKENIZER)
"""Checks of state in Redis that --takeover deletes: they do not stop a run that takes over."""


class Launcher:
    """The processes of one run, as a context: `with Launcher(config) as launcher: launcher.start(); launcher.wait()`.

    say       receives the lines for the user
    python    interpreter of the processes; default: this one
    again     the command that resumes the run
    takeover  fence another learner of the run and empty the run in Redis
    backend   starts the processes; default: that of `launch.backend`
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        say: Say = lambda line: None,
        python: str = "",
        again: str = "",
        takeover: bool = False,
        backend: LaunchBackend | None = None,
    ) -> None:
        self._backend = backend
        self._given, self._python, self._again = config, python or sys.executable, again
        self._takeover = takeover
        self._say = Progress.of(say)
        self._training: TaskProgress | None = None
        self.directory = config.run.dir
        self._exits = ExitStack()
        self._stop_signal: int | None = None
        self._started = time.time()
        self._state = "starting"
        self._error, self._failure = "", ""
        self._steps = StepTail(config.run.dir / "metrics.jsonl")
        self._told: set[str] = set()
        self._stepped = 0.0
        self._validations = StepTail(config.run.dir / "validation.jsonl")

    def __enter__(self) -> Launcher:
        """Lock the run directory and prepare the run. Raises NotReady, before anything starts, if it cannot run.

        Finds a Redis, chooses addresses, writes resolved.yaml, and creates the model if necessary.
        """
        self._require([usable(self._given)])
        fresh = not self.directory.exists()
        self._exits.enter_context(hold(self.directory))
        try:
            self._prepare()
        except BaseException:
            if fresh:
                discard(self.directory)
            self._exits.close()
            raise
        return self

    def _prepare(self) -> None:
        backend = self._backend or open_backend(self._given, self._say)
        self._exits.callback(backend.close)
        self._given = reachable(self._given, backend.address)
        found = preflight(self._given)
        self._require([f for f in found if f.check not in REPLACED_BY_TAKEOVER or not self._takeover])
        if self._given.launch.learner:  # without a learner here, its run directory may be on another disk
            ensure_lineage_id(self._given.run)
        self._place = backend.place
        reserved = self._given.launch.engines
        if self._given.launch.backend == "local":  # a cluster gives more places later
            reserved = max(reserved, self._given.launch.autoscale.max)
        self._placement = self._place(with_dtypes(with_engines(self._given, reserved)))
        self.addresses: Addresses = choose(self._given)
        self._redis_url = seen_from_here(self._given, self.addresses.redis_url)
        if self.addresses.server is None:
            self._say(f"redis: {check_server(self._redis_url)} at {redacted(self._redis_url)}")
        self.resolved = self.directory / RESOLVED
        self.config = dated(with_dtypes(settle(self._given, self.addresses)), self.resolved)
        atomic_write(self.resolved, self.config.to_yaml(), durable=False)
        if self._given.launch.redis_host and self.addresses.server is not None:
            # without a login: that of each role is in launch.secrets; after the settings, as engines wait for this file
            atomic_write(self.directory / REDIS_URL_FILE, f"{self.addresses.redis_url}\n", durable=False)
        launch = self.config.launch
        self.specs = self._planned(self.config, self._placement)
        self._readiness = Readiness(self._redis_url, self.config.run.id)
        self._losses = EngineLosses(self._redis_url, self.config.run.id)
        self.supervisor = Supervisor(
            is_ready=self._readiness,
            ready_s=launch.ready_s,
            say=self._say,
            beat=self._say.beat,
            interrupted=self._raise_if_stopped,
            backend=backend,
            url_of=lambda name: self._readiness.urls.get(name, ""),
        )
        jobs = partial(slurm.scale, self.config) if launch.backend == "slurm" else None
        known = (self._redis_url, self.config.run.id, jobs)
        self._scaler = EngineScaler(launch, self.supervisor, self._add_engine, backend.release, *known)
        self._catch_signals()
        if not self.config.run.model.exists():
            self._make_model()
            self.config = with_dtypes(self.config)
            atomic_write(self.resolved, self.config.to_yaml(), durable=False)
            self._require(inputs(self.config))

    def _planned(self, config: RunConfig, placement: Placement) -> list[ProcessSpec]:
        return plan(
            config,
            self.addresses,
            python=self._python,
            resolved=self.resolved,
            takeover=self._takeover,
            placement=placement,
            cores=cores(),
        )

    def _add_engine(self, number: int) -> None:
        """Start engine `number`. Raises UserError if there is no place for it beside the running ones."""
        config = with_engines(self.config, max(number, self.config.launch.engines))
        most = max(config.launch.autoscale.max, self.config.launch.engines)
        reserved = config.launch.backend == "local" and number <= most
        placement = self._placement if reserved else self._place(config)
        specs = {spec.name: spec for spec in self._planned(config, placement)}
        if any(specs[s.name].place != s.place for s in self.specs if s.name in specs):
            raise UserError(
                f"there is no place for engine-{number}: the GPUs are given to the processes that run",
                why="with one more engine they would be placed otherwise",
                todo="reserve GPUs by launch.autoscale.max and start the run again",
            )
        spec = specs[f"engine-{number}"]
        self.specs = [s for s in self.specs if s.name != spec.name] + [spec]
        self._readiness.starting(spec)
        self.supervisor.spawn(spec)

    @property
    def redis_url(self) -> str:
        """Return the Redis URL for monitoring (with `launch.secrets`, as the viewer)."""
        return self._redis_url

    @property
    def rollout_urls(self) -> tuple[str, ...]:
        """Return the base URLs of the rollout servers (`POST /v1/episodes`)."""
        urls = self._readiness.urls
        return tuple(urls[spec.name] for spec in self.specs if spec.kind == "rollout" and spec.name in urls)

    @property
    def last_step(self) -> dict[str, Any]:
        """Return the newest line of metrics.jsonl, {} before the first."""
        return self._steps.last

    def start(self, *kinds: str) -> None:
        """Start the processes of `kinds` (default: all) that are not running, and wait until they are ready.

        Raises ProcessFailed if one exits or is not ready within launch.ready_s.
        """
        for stage in STAGES:
            chosen = [s for s in self.specs if s.kind in stage and s.kind in (kinds or KINDS)]
            fresh = [spec for spec in chosen if spec.name not in self.supervisor.children]
            for spec in fresh:
                if spec.kind == "redis":
                    (self.directory / "redis").mkdir(parents=True, exist_ok=True)
                self._readiness.starting(spec)
            for _, group in groupby(fresh, key=lambda spec: spec.group or spec.name):
                self.supervisor.spawn(*group)
            self._record()
            self.supervisor.await_ready([spec.name for spec in fresh])
        self._state = "running"
        self._record()

    def check(self) -> None:
        """Restart processes that exited and may be restarted; print new steps. Raises ProcessFailed or RunStopped."""
        before = {(child, child.pid) for child in self.supervisor.children.values()}
        try:
            self.supervisor.check()
        except ProcessFailed as failure:
            raise self._losses.explained(failure, self.directory) from None
        for line in self._scaler.tick():
            self._say(for_terminal(line))
        if self._scaler.stop_asked:
            raise RunStopped(signal.SIGTERM)
        newest = self._steps.last
        for record in self._steps.read():
            if self._training is not None:
                self._training.update(record["step"])
            left = self._training.left() if self._training else ""
            self._say("  ".join(filter(None, (step_line(record, steps=self.config.run.steps), left))))
        if self._steps.last is not newest:
            self._stepped = time.monotonic()
            self._say_problems()
        for line in self._losses.read():
            self._say(for_terminal(line))
        for record in self._validations.read():
            self._say(f"validation of {describe(record)}")
        if before != {(child, child.pid) for child in self.supervisor.children.values()}:
            self._record()

    def _say_problems(self) -> None:
        """Print what keeps the run from learning; of each kind the first."""
        for problem in learning_problems(read_history(self.directory / "metrics.jsonl")):
            if problem.todo not in self._told:
                self._told.add(problem.todo)
                self._say(f"problem: {problem.what}; {problem.todo}")

    def wait(self) -> None:
        """Wait until the learner has exited with code 0 (without a learner: until stopped).

        Raises ProcessFailed for a process that ended too often, and RunStopped for a signal or `foray down`.
        """
        if not self.config.launch.learner:
            self._wait()
            return
        with self._say.task("training", self.config.run.steps, "steps") as self._training:
            self._training.update(read_history(self.directory / "metrics.jsonl").last.get("step", 0))
            self._wait()

    def _wait(self) -> None:
        while not ("learner" in self.supervisor.children and self.supervisor.ended("learner")):
            self.check()
            if learner := self.supervisor.children.get("learner"):
                self._say.beat(
                    lambda: learner.waiting_line("to finish its next step", since=self._stepped), every_s=STEP_S
                )
            if self._training is not None and self._training.drawn:
                self._training.tick()
            time.sleep(POLL_S * 2)
        self.check()

    def during(
        self, work: Callable[[TaskProgress], T], name: str = "working", total: float | None = None, unit: str = ""
    ) -> T:
        """Run `work` in a thread, monitor the processes meanwhile, and return the result. Raises what it raises."""
        try:
            return self._say.beside(work, self.check, name, total, unit)
        except (RunStopped, ProcessFailed):
            raise
        except ForayError as error:
            raise self._losses.explained(error, self.directory) from None

    def stop(self, state: str = "stopped") -> None:
        """Stop all started processes in order. Idempotent."""
        self._state = "stopping"
        self.supervisor.children |= self._scaler.leaving
        try:
            self._record()
        finally:  # also on a full disk
            try:
                self.supervisor.stop()
            except OSError:  # the reader of the lines has ended, as the `tee` of a pipe by the same Ctrl-C: none follow
                self.supervisor.stop()
        self._state = state
        self._record()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, RunStopped | HungUp) or self._stop_signal == signal.SIGHUP
        state = "done" if error is None else "stopped" if stopped else "failed"
        state = error.state if isinstance(error, ProcessFailed) else state
        self._error = str(error) if state in ("failed", "interrupted") else ""
        self._failure = error.render() if isinstance(error, ProcessFailed | UserError) else for_terminal(self._error)
        try:
            self.stop(state)
        finally:
            self._exits.close()

    def _require(self, findings: Sequence[Finding]) -> None:
        """Report warnings; raise NotReady if a finding would stop the run."""
        for finding in findings:
            if finding.verdict == "warn":
                self._say(f"warning: {finding.check}: {finding.detail}; {finding.fix}")
        failed = [finding for finding in findings if finding.verdict == "fail"]
        if failed:
            raise NotReady(failed)

    def _make_model(self) -> None:
        words = {"{python}": self._python, "{model}": str(self.config.run.model), "{config}": str(self.resolved)}
        for number, command in enumerate(self.config.launch.prepare, start=1):
            argv = tuple(words.get(word, word) for word in command)
            name = f"prepare-{number}"
            self._say(f"{name}: {self.config.run.model} does not exist, running {' '.join(argv)}")
            log = self.directory / "logs" / f"{name}.log"
            hidden = SECRET_VARIABLES if self.config.launch.secrets else ()
            child = ManagedProcess(ProcessSpec(name, "prepare", argv, log, Ready.RUNNING, hidden=hidden))
            try:
                while child.poll() is None:
                    self._raise_if_stopped()
                    self._say.beat(lambda child=child: child.waiting_line("to finish"))  # type: ignore[misc]
                    time.sleep(POLL_S)
            finally:
                child.kill()
                child.wait(10.0)
            if child.poll():
                raise child.failed(f"exited with code {child.poll()}")

    def _catch_signals(self) -> None:
        """Raise `RunStopped` at the next check after Ctrl-C, SIGTERM or SIGHUP; a second signal kills the processes."""
        if threading.current_thread() is not threading.main_thread():
            return

        def note(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP:  # writing to the closed terminal fails
                null = os.open(os.devnull, os.O_RDWR)
                for stream in (1, 2):
                    os.dup2(null, stream)
            elif self._stop_signal is not None:
                self.supervisor.hurry()
            self._stop_signal = number

        hang_up = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ()  # ignored by nohup
        for number in (signal.SIGINT, signal.SIGTERM, *hang_up):
            self._exits.callback(signal.signal, number, signal.signal(number, note))

    def _raise_if_stopped(self) -> None:
        if self._stop_signal is not None:
            raise RunStopped(self._stop_signal)

    def _record(self) -> None:
        children = self.supervisor.children
        record: dict[str, Any] = {
            "id": self.config.run.id,
            "pid": os.getpid(),
            "state": self._state,
            "error": self._error,
            "failure": self._failure[-LONGEST_FAILURE:],
            "started": self._started,
            "updated": time.time(),
            "trains": self.config.launch.learner,
            "config": str(self.resolved),
            "again": self._again,
            "redis_url": redacted(self.addresses.redis_url),
            "device_price": self.config.launch.device_price,
            "restarts": dict(self.supervisor.restarts),
            "processes": [
                s.to_json() | {"pid": children[s.name].pid, "host": children[s.name].host}
                for s in self.specs
                if s.name in children
            ],
        }
        write_record(self.directory, record)


def open_backend(config: RunConfig, say: Progress) -> LaunchBackend:
    """Return the backend of `launch.backend`. Raises UserError if it is not there."""
    if config.launch.backend == "slurm" and not slurm.is_core(config.run.id):
        raise UserError("launch.backend is slurm, and this is no job of the run", todo="foray submit, or foray up")
    if config.launch.backend != "ray":
        return LocalBackend()
    if find_spec("ray") is None:
        todo = "install foray[ray] here and on every node, with the Ray of the cluster"
        raise UserError("launch.backend is ray, but Ray is not installed", todo=todo)
    from deploy.launch.ray_cluster import RayBackend

    return RayBackend(say)
