"""The processes of a run on a Ray cluster: one actor each, which starts the process, watches it and reads its log.

Ray finds a host for each process and notices that a host is lost. Restarts, order and readiness are the Supervisor's,
as on one machine, and no data of the run goes through Ray. Redis is on this host, the driver's. Every other process
has a placement group, for which Ray finds room again after its host is lost. The ranks of a learner share one, with
rank 0 on this host if it fits, because `run.dir` is here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from deploy.config import RunConfig
from deploy.hardware.assign import Placement, needs
from deploy.hardware.gpus import built_for_cuda
from deploy.hardware.run import built_index
from deploy.launch.plan import ProcessSpec
from deploy.launch.process import TAIL_LINES, Child, ManagedProcess, log_tail, rendezvous
from deploy.run.addresses import REDIS_URL_FILE
from deploy.run.run_dir import LOCK
from deploy.secrets.env import SECRET_VARIABLES
from protocol.errors import UserError
from protocol.runtime.files import atomic_write
from protocol.runtime.lifecycle import process_token
from protocol.runtime.net import free_port
from protocol.runtime.number_format import read_facts
from protocol.runtime.progress import Progress
from protocol.runtime.service_cli import EXIT_USER

CHUNK, READ_S = 64 * 1024, 0.5
"""Bytes of a log that are copied at once, and seconds between two looks at a process."""
Bundle = dict[str, float]


@dataclass(frozen=True)
class ActorState:
    """What an actor reports.

    code  exit code of the process, None while it runs
    text  new output before byte `end` of its log, b"" if the driver sees that file itself
    """

    node: str
    host: str
    code: int | None = None
    pid: int = 0
    memory: int = 0
    cpu: float = 0.0
    end: int = 0
    text: bytes = b""


class ProcessActor:
    """One process on the host of this actor, whose only thread lives as long as it."""

    def __init__(self, spec: ProcessSpec, files: Mapping[Path, str], driver: str) -> None:
        self._spec, self._files = spec, files
        self._child: ManagedProcess | None = None
        held = spec.log.parents[1] / LOCK
        self._shared = held.is_file() and held.read_text() == driver
        self._start = spec.log.stat().st_size if spec.log.exists() else 0

    def rendezvous(self) -> dict[str, str]:
        """Return the variables of a rendezvous on this host."""
        host = ray.util.get_node_ip_address()
        return rendezvous(host, free_port(host))

    def look(self, place: Mapping[str, str], start: int = 0) -> ActorState:
        """Start the process unless an earlier call has. Return its state, and its output from byte `start` on."""
        seen = ActorState(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
        if self._spec.kind == "learner" and not self._spec.rank and not self._shared:
            return replace(seen, code=EXIT_USER, text=NOT_SHARED.format(self._spec.log.parents[1]).encode())
        self._child = self._child or self._spawn(place, seen.host)
        code, text, end = self._child.poll(), b"", 0
        if not self._shared:
            with self._spec.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(start, self._start, end - CHUNK))
                text = log.read(end - log.tell())
        memory, cpu = self._child.memory_mib(), self._child.cpu_s()
        return replace(seen, code=code, pid=self._child.pid, memory=memory, cpu=cpu, end=end, text=text)

    def signal(self, method: str) -> None:
        """Terminate or kill the process."""
        if self._child is not None:
            getattr(self._child, method)()

    def _spawn(self, place: Mapping[str, str], host: str) -> ManagedProcess:
        for path, text in self._files.items():
            if not path.exists() or path.read_text() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, text, durable=False)
        # Ray sets these for its own workers
        of_ray = tuple(name for name in os.environ if name.startswith(("RAY_", "OMP_")))
        spec = replace(self._spec, env={**self._spec.env, **place}, hidden=(*self._spec.hidden, *of_ray))
        if spec.argv[1:2] == ("-m",):
            spec = replace(spec, argv=(sys.executable, *spec.argv[1:]))
        # a node that drained would hold its GPU, which Ray gives to another: it ends at once with its actor
        return ManagedProcess(spec, host, signal.SIGTERM if spec.kind == "learner" else signal.SIGKILL)


NOT_SHARED = """error: the learner does not see the run directory {} of `foray up`
  why: its checkpoints, metrics and journal are there
   do: put run.dir on a disk that both hosts mount, or start `foray up` on a node with room for the learner
"""


class RayChild(Child):
    """A process of an actor. No call waits for Ray: results are taken when they are there."""

    def __init__(self, spec: ProcessSpec, actor: Any, place: Any) -> None:
        super().__init__(spec)
        self._actor, self._place = actor, place
        self._seen = ActorState("", "")
        self._log_start = spec.log.stat().st_size if spec.log.exists() else 0
        self._look, self._look_at = actor.look.remote(place), 0.0

    @property
    def pid(self) -> int:
        """Return the process id on its host, 0 while that is unknown."""
        return self._seen.pid

    def poll(self) -> int | None:
        """Return the exit code, None while it runs or waits for room; -9 if its actor or its host was lost."""
        if self._seen.code is None:
            self._read()
        return self._seen.code

    def terminate(self) -> None:
        """Send SIGTERM to this process only."""
        self._actor.signal.remote("terminate")

    def kill(self) -> None:
        """Kill it and what it started."""
        self._actor.signal.remote("kill")

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines that were copied from its log."""
        return log_tail(self.spec.log, self._log_start, lines) if self.spec.log.exists() else ""

    def memory_mib(self) -> int:
        """Return the resident memory that was reported last."""
        return self._seen.memory

    def cpu_s(self) -> float:
        """Return the CPU time that was reported last."""
        return self._seen.cpu

    def _read(self) -> None:
        if self._look is None:
            if time.monotonic() >= self._look_at:
                self._look = self._actor.look.remote(self._place, self._seen.end)
            return
        if not ray.wait([self._look], timeout=0)[0]:
            return
        look, self._look, self._look_at = self._look, None, time.monotonic() + READ_S
        try:
            self._take(ray.get(look))
        except ActorUnavailableError:
            return  # a missed heartbeat, and no end: the process may live
        except RayError as error:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            self.lost = self._seen.node not in ("", *alive)
            self._take(replace(self._seen, code=-signal.SIGKILL, text=f"{error}\n".encode()))
        if self._seen.code is not None:
            ray.kill(self._actor)

    def _take(self, seen: ActorState) -> None:
        self._seen, self.host = seen, seen.host
        if seen.text:
            self.spec.log.parent.mkdir(parents=True, exist_ok=True)
            with self.spec.log.open("ab") as log:
                log.write(seen.text)


class RayBackend:
    """A running Ray cluster, joined by this process. `address`: that of this host in the cluster."""

    def __init__(self, say: Progress) -> None:
        self._beat = say.beat
        self._groups: dict[str, Any] = {}
        self._bundles: dict[str, list[Bundle]] = {}
        self._left = not ray.is_initialized()
        if self._left:
            _join()
        self._node, self.address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def place(self, config: RunConfig) -> Placement:
        """Reserve room for each process that has none.

        Waits for it at the first call, as long as it takes, since nodes may still join. Later processes wait by
        themselves.
        """
        gpus = "GPU" in ray.cluster_resources()
        wanted = needs(config, read_facts(config.run.model), index=built_index(config), cuda=gpus and built_for_cuda())
        self._bundles = bundles(config, {need.name: need.gpus for need in wanted})
        here = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == self._node)
        first = self._bundles.get("learner", [{}])[0]
        if all(here.get(name, 0.0) >= amount for name, amount in first.items()):
            first[f"node:{self.address}"] = 0.001
        begins = not self._groups
        for name, parts in self._bundles.items():  # one after the other: none takes the room that the learner waits for
            if name in self._groups:
                continue
            self._groups[name] = group = placement_group(parts, strategy="PACK", name=f"{config.run.id}/{name}")
            line = f"waiting for room: {name} needs {self._bundles[name]}; `ray status` shows what the cluster has"
            while begins and not group.wait(timeout_seconds=1):
                self._beat(lambda line=line: line)  # type: ignore[misc]
        return Placement(gpus=False, wanted=tuple(wanted))

    def spawn(self, specs: Sequence[ProcessSpec]) -> Sequence[Child]:
        """Start an actor for each process of the group; it waits for room if its host was lost."""
        actors = [self._actor(spec) for spec in specs]
        place = actors[0].rendezvous.remote() if len(specs) > 1 else {}
        return [RayChild(spec, actor, place) for spec, actor in zip(specs, actors, strict=True)]

    def release(self, name: str) -> None:
        """Give back the room of a process that has ended for good."""
        remove_placement_group(self._groups.pop(name))

    def close(self) -> None:
        """Give back the room, and leave the cluster."""
        for name in list(self._groups):
            self.release(name)
        if self._left:
            ray.shutdown()

    def _actor(self, spec: ProcessSpec) -> Any:
        group = self._groups.get(spec.group)
        if group is None:  # Redis: its files are here
            where: Any = NodeAffinitySchedulingStrategy(self._node, soft=False)
            room: Bundle = {}
        else:
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=spec.rank)
            room = self._bundles[spec.group][spec.rank]
        # an actor of a group sees the GPUs that it asks for itself, and no others
        actor = ray.remote(ProcessActor).options(
            num_cpus=room.get("CPU", 0.0),
            num_gpus=room.get("GPU", 0.0),
            scheduling_strategy=where,
            max_restarts=0,
        )
        inherited = {name: os.environ[name] for name in SECRET_VARIABLES if name in os.environ and not spec.hidden}
        files = [Path(spec.argv[i + 1]) for i, word in enumerate(spec.argv) if word == "--config"]
        files += [path for path in (spec.log.parents[1] / REDIS_URL_FILE,) if path.exists()]
        given = replace(spec, env_secret=inherited | spec.env_secret)
        return actor.remote(given, {path: path.read_text() for path in files}, process_token())


def bundles(config: RunConfig, gpus: Mapping[str, int]) -> dict[str, list[Bundle]]:
    """Return what each process needs of Ray, by its group; one bundle a rank. The learner comes first."""
    launch = config.launch
    ranks = [launch.threads] * launch.learner_ranks if launch.learner else []
    others = [*config.engine_roles, *(f"retriever-{i + 1}" for i in range(config.num_retrievers))]
    others += [f"rollout-{i + 1}" for i in range(launch.rollouts)]
    found = ({"learner": ranks} if ranks else {}) | {name: [launch.threads] for name in others}
    shares = {name: gpus.get(name, 0) // len(cpus) for name, cpus in found.items()}
    return {
        name: [{"CPU": float(cpu)} | ({"GPU": float(shares[name])} if shares[name] else {}) for cpu in cpus]
        for name, cpus in found.items()
    }


def _join() -> None:
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise UserError(
            "RAY_ADDRESS is that of a Ray client",
            why="`foray up` starts Redis on its own host, which must be a node of the cluster",
            todo="run it there, or submit it: ray job submit -- foray up run.yaml launch.backend=ray",
        )
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UserError(
            "launch.backend is ray, but no Ray cluster runs on this host",
            why=str(error),
            todo="run `foray up` on a node of the cluster, or start one: ray start --head (docs/clusters.md)",
        ) from None
