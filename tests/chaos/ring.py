"""The whole ring under faults: real Redis, retriever, nodes with engines, rollout servers and learner, supervised.

Each process has its own link to Redis (proxy.py), and rollout servers also to the retriever. Processes that end are
restarted, as by a supervisor; ends without a fault are recorded as findings.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from disk import SmallDisk
from hooks import FOLDER, NAME, OF
from processes import Life, Ward, die_with_parent
from proxy import FAIR, Links

from deploy.run.redis_server import connect, find_server, redis_argv
from protocol.keys import Keys
from protocol.runtime.net import free_port
from rollout_server.node.guard import descendants
from tests.support.forks import Zygote

MANY_STEPS = 1_000_000
MAXMEMORY_MB = 256
LEASE_S, TASK_IDLE_MS = 3.5, 4500
SMALL = (
    *("run.group_size=2", "run.groups_per_step=4", "run.max_lag=2"),
    *("learner.checkpoint_every=5", "learner.checkpoint_s=6", "learner.keep_checkpoints=3"),
    *(f"learner.lease_s={LEASE_S}", "learner.reconcile_s=1.5", "learner.engine.threads=1"),
    *("rollout.concurrency_groups=6", f"rollout.task_idle_ms={TASK_IDLE_MS}", "rollout.drain_s=1"),
    *("rollout.stall_s=4", "rollout.search.deadline_s=6", "rollout.search.outage_wait_s=60"),
    *("rollout.search.probe_s=1", "engine.hang_s=4", "engine.probe_s=0.5", "engine.probe_timeout_s=3"),
    *(
        "engine.relaunches=1000",
        "engine.lease_s=4",
        "engine.heartbeat_s=1",
        "engine.drain_s=1",
        "engine.kind.max_running=16",
    ),
)
"""Short leases, so that pauses exceed them; small groups, so that much happens in a minute."""
SCARCE = ("learner.checkpoint_every=1000", "learner.checkpoint_s=60")
"""With little memory: a learner that is short of groups must detect that a checkpoint is due."""
ROOM = 1 << 20
"""Bytes that other data in a Redis with little memory leave to the run, including Redis' overhead."""
RESTART_S = {"learner": 0.5, "redis": 0.5}
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
"""Debian's `libfaketime`: a wall clock of its own for one process."""
FAKED = {"FAKETIME_CACHE_DURATION": "1", "FAKETIME_DISABLE_SHM": "1", "NO_FAKE_STAT": "1"} | dict.fromkeys(
    ("FAKETIME_DONT_FAKE_MONOTONIC", "DONT_FAKE_MONOTONIC"), "1"
)


@dataclass
class Finding:
    """An unexpected event: an end without a fault, a traceback."""

    at: float
    what: str
    log: Path | None = None


@dataclass
class Ring:
    """`with ring(...) as it: it.start_all()`. Times are seconds since `began`."""

    directory: Path
    zygote: Zygote
    links: Links
    keys: Keys
    persistence: bool
    wrong: tuple[str, ...] = ()
    maxmemory_mb: int = MAXMEMORY_MB
    wards: dict[str, Ward] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    excuses: dict[str, list[tuple[float, str, float]]] = field(default_factory=dict)
    """process -> until when an end of it with an exit status of its own is explained, by which fault, and since when
    the life must have begun"""
    standing: set[str] = field(default_factory=set)
    """Targets that a long standstill holds; "machine": all."""
    clocks: dict[str, Path] = field(default_factory=dict)
    """Process -> file with the offset of its wall clock, from its next start on."""
    learner_overrides: tuple[str, ...] = ()
    lose_redis: bool = False
    """Its files are removed before it is started the next time."""
    spoiled: set[str] = field(default_factory=set)
    """Checkpoints that a fault has damaged: the checker ignores them."""

    _neighbour_due: float = 0.0

    def __post_init__(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.hooks.mkdir(exist_ok=True)
        self.disk = SmallDisk(self.run_dir)
        self.server = find_server()
        self.redis_port = free_port()
        self._redis: dict[int, subprocess.Popen[bytes]] = {}
        self.db = connect(f"redis://127.0.0.1:{self.redis_port}/0", timeout_s=3.0)
        self.wards["redis"] = Ward("redis", self._begin_redis, self._redis_ended, self.logs)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def hooks(self) -> Path:
        return self.directory / "hooks"

    @property
    def now(self) -> float:
        return time.time() - self.began

    # --- processes ---

    def prepare(self, model: Path, *overrides: str) -> None:
        """The demo's files and configuration, as a user gets them."""
        argv = [sys.executable, "-m", "foray", "demo", "--prepare-only", "--dir", str(self.run_dir)]
        steps = (f"run.id={self.keys.run}", f"run.steps={MANY_STEPS}")
        done = subprocess.run(
            [*argv, "--model", str(model), *SMALL, *steps, *overrides],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the demo could not be prepared:\n{done.stdout}{done.stderr}")

    def add_all(self, engines: int, rollouts: int) -> None:
        """Names every process; none is started."""
        port = free_port()
        self.retriever_port = port
        self._add("retriever", "retriever", f"retriever.port={port}")
        for n in range(1, engines + 1):
            self._add(f"engine-{n}", "rollout_server.node", f"engine.id=engine-{n}")
        for n in range(1, rollouts + 1):
            name = f"rollout-{n}"
            search = self.links.add(f"{name}.search", port, commands=False)
            urls = f"rollout.search.urls=['http://127.0.0.1:{search.port}']"
            self._add(name, "rollout_server", f"rollout.id={name}", f"rollout.port={free_port()}", urls)
        self._add("learner", "learner")

    def _add(self, name: str, module: str, *overrides: str) -> None:
        if module != "retriever":
            self.links.add(name, self.redis_port)
        begin: Callable[[], int] = lambda: self.launch(name, module, self.wards[name].next_log(), *overrides)  # noqa: E731
        self.wards[name] = Ward(name, begin, self.zygote.ended, self.logs, RESTART_S.get(name, 0.3))

    def launch(self, name: str, module: str, log: Path, *overrides: str) -> int:
        """A process of `module` that speaks to Redis by the link `name`; its pid."""
        link = self.links.links.get(name)
        port = link.port if link else self.redis_port
        env = {"FORAY_REDIS_URL": f"redis://127.0.0.1:{port}/0", "PYTHONUNBUFFERED": "1"}
        env |= {FOLDER: str(self.hooks), NAME: name} | self._clock_of(name)
        more = self.learner_overrides if module == "learner" else ()
        argv = ["--config", str(self.run_dir / "demo.yaml"), *overrides, *more]
        return self.zygote.start(module, argv, log, env, self.directory, (*self.wrong, *OF.get(module, ())))

    def _clock_of(self, name: str) -> dict[str, str]:
        """Environment of a process whose wall clock jumps; {} for the others."""
        offset = self.clocks.get(name)
        return {} if offset is None else FAKED | {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(offset)}

    def start_all(self) -> None:
        """Starts every process, Redis first."""
        for ward in self.wards.values():
            ward.start()

    def _begin_redis(self) -> int:
        folder = self.directory / "redis"
        if self.lose_redis or not self.persistence:
            shutil.rmtree(folder, ignore_errors=True)
            self.lose_redis = False
        folder.mkdir(parents=True, exist_ok=True)
        url = f"redis://127.0.0.1:{self.redis_port}/0"
        argv = list(redis_argv(self.server.path, folder, url, maxmemory_mb=self.maxmemory_mb))
        argv += [] if self.persistence else ["--appendonly", "no"]
        with self.wards["redis"].next_log().open("ab") as log:
            child = subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
                cwd=folder,
                env=os.environ | self._clock_of("redis"),
            )
        self._redis[child.pid] = child
        return child.pid

    def _redis_ended(self, pid: int) -> int | None:
        return self._redis[pid].poll()

    def supervise(self) -> None:
        """Detect processes that have ended, and restart them. Call it often."""
        if "machine" in self.standing:
            return  # nothing starts on a suspended machine
        if self.maxmemory_mb < MAXMEMORY_MB and time.monotonic() > self._neighbour_due:
            self._neighbour_due = time.monotonic() + 1.0
            self.ask(self._settle_neighbour)
        for ward in self.wards.values():
            for ended in ward.look():
                if not self.explained(ended):
                    self.finding(f"{ended.name} ended with {ended.status}, and no fault explains it", ended.log)

    def _settle_neighbour(self, db: redis.Redis) -> None:
        """Fill memory beyond ROOM with other data, in each life of Redis that the run uses."""
        if not db.exists("neighbour") and db.exists(self.keys.traj):
            left = (self.maxmemory_mb << 20) - int(db.info("memory")["used_memory"]) - ROOM
            db.set("neighbour", b"x" * max(0, left))

    def explained(self, life: Life) -> bool:
        """Whether a fault is behind the end of `life`."""
        if life.doomed:
            return True
        for until, why, since in reversed(self.excuses.get(life.name, ())):
            if life.ended <= until and life.began >= since:
                life.doomed = why
        return bool(life.doomed)

    def excuse(self, name: str, why: str, seconds: float, *, starts_only: bool = False) -> None:
        """Expect an end of `name` for this time. starts_only: of a life that begins in it."""
        now = time.time()
        self.excuses.setdefault(name, []).append((now + seconds, why, now - 5.0 if starts_only else 0.0))

    def limit_excuses(self, name: str, why: str, seconds: float) -> None:
        """Let the excuses of `name` for this reason end in at most `seconds`: its fault is over."""
        latest, given = time.time() + seconds, self.excuses.get(name, [])
        self.excuses[name] = [(min(u, latest) if reason == why else u, reason, since) for u, reason, since in given]

    def prolong(self, seconds: float, *names: str) -> None:
        """Move the end of the excuses of `names`, of all if none is given: these processes stand still meanwhile."""
        for name in names or self.excuses:
            given = self.excuses.get(name, [])
            self.excuses[name] = [(until + seconds, why, since) for until, why, since in given]

    def finding(self, what: str, log: Path | None = None) -> None:
        """Record an unexpected event."""
        self.findings.append(Finding(self.now, what, log))

    def tree(self, life: Life) -> list[int]:
        """The process and, of a node, its guard and engine."""
        return [life.pid, *(descendants(life.pid) if life.name.startswith("engine") else ())]

    def everything(self) -> list[int]:
        """Every process of the ring, Redis too."""
        return [*descendants(self.zygote.pid), *(pid for pid, child in self._redis.items() if child.poll() is None)]

    def lives(self, kind: str) -> Iterator[Life]:
        """Every life of every process whose name begins with `kind`."""
        for name, ward in self.wards.items():
            if name.startswith(kind):
                yield from ward.lives

    # --- what an observer from outside sees ---

    def ask(self, call: Callable[[redis.Redis], Any], default: Any = None) -> Any:
        """Query Redis directly, without a link; return `default` while it does not answer."""
        try:
            return call(self.db)
        except (redis.RedisError, OSError):
            return default

    def issued(self) -> int:
        """Highest seq issued, as Redis has it."""
        return int(self.ask(lambda db: db.get(self.keys.issued)) or 0)

    def manifest(self) -> dict[str, Any]:
        """Of the checkpoint in force; {} before the first."""
        folder = self.run_dir / "checkpoints"
        try:
            current = (folder / "CURRENT").read_text().strip()
            found: dict[str, Any] = json.loads((folder / current / "manifest.json").read_text())
        except OSError:
            return {}
        return found

    def until(self, what: Callable[[], bool], seconds: float) -> bool:
        """Supervises until `what()`; False when that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                return False
            self.supervise()
            time.sleep(0.05)
        return True

    # --- the end ---

    def close(self) -> None:
        """Heals every link and ends every process, Redis last."""
        for name in self.links.links:
            self.links.set(name, FAIR)
        for ward in self.wards.values():
            ward.wanted = False
        others = [ward for name, ward in self.wards.items() if name != "redis"]
        for life in (life for ward in others for life in ward.lives if life.status is None):
            for pid in reversed(self.tree(life)):
                send(pid, signal.SIGCONT)
            life.send(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(life.status is None for ward in others for life in ward.lives) and time.monotonic() < deadline:
            for ward in others:
                ward.look()
            time.sleep(0.02)
        for child in self._redis.values():
            child.kill()  # also ends a stopped process
            child.wait(10)
        for ward in self.wards.values():
            for life in ward.lives:
                life.close()
        self.db.close()
        self.disk.close()


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process of ours that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it died with its parent


@contextmanager
def open_ring(
    directory: Path,
    model: Path,
    *,
    persistence: bool,
    engines: int = 2,
    rollouts: int = 2,
    wrong: Sequence[str] = (),
    overrides: Sequence[str] = (),
    maxmemory_mb: int = MAXMEMORY_MB,
    small_disk: bool = False,
) -> Iterator[Ring]:
    """A ring that is prepared and not started; ends everything that was. small_disk: the run directory can be full."""
    directory.mkdir(parents=True, exist_ok=True)
    with Zygote(directory / "zygote.log") as zygote, Links() as links:
        ring = Ring(directory, zygote, links, Keys("demo"), persistence, tuple(wrong), maxmemory_mb)
        try:
            ring.prepare(model, *(SCARCE if maxmemory_mb < MAXMEMORY_MB else ()), *overrides)
            if small_disk:
                ring.disk.open()
            ring.add_all(engines, rollouts)
            yield ring
        finally:
            ring.close()
