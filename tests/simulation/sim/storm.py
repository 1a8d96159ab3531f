"""The faults of a schedule: their effect and duration. Each is recorded in `faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.invariants import STRANGE
from sim.knobs import AWAY_AT_S
from sim.processes import Learner, Rollouts

if TYPE_CHECKING:
    from sim.world import World


class Storm:
    """Draw times for the faults in the knobs, and inject them."""

    def __init__(self, world: World) -> None:
        self.w = world
        self.acts: dict[str, Callable[[], bool]] = {
            "learner killed": self.learner_killed,
            "learner killed at the disk": self.killed_at_the_disk,
            "learner asked to stop": self.learner_signalled,
            "learner stopped and woken": self.learner_stopped,
            "second learner": lambda: self.second(takeover=False),
            "second learner takes over": lambda: self.second(takeover=True),
            "rollouts killed": self.rollouts_killed,
            "rollouts stopped and woken": self.rollouts_stopped,
            "rollouts asked to stop": self.rollouts_signalled,
            "partition": self.partition,
            "redis away": lambda: self.redis_away(0.0),
            "redis wiped": self.redis_wiped,
            "redis rolled back": self.redis_rolled_back,
            "redis full": self.redis_full,
            "redis stopped": self.redis_stopped,
            "clock forward": lambda: self.clock_jumps(self.w.rng.choice((2.0, 20.0, 3600.0))),
            "clock back": lambda: self.clock_jumps(-self.w.rng.uniform(0.5, 40.0)),
            "stranger's entry": self.stranger,
            "task deleted": self.task_deleted,
            "seqs asked for again": self.asked_again,
        }

    def brew(self) -> None:
        """Lays the faults into the schedule."""
        for kind, count in sorted(self.w.knobs.faults.items()):
            for _ in range(count):
                self.w.clock.at(self.w.rng.uniform(0.1, self.w.knobs.storm_s), self._doer(kind))
        if self.w.knobs.away_s:
            self.w.clock.at(AWAY_AT_S, lambda: self.redis_away(self.w.knobs.away_s) and None)

    def _doer(self, kind: str) -> Callable[[], None]:
        def act() -> None:
            if self.acts[kind]():
                self.w.faults[kind] += 1
                self.w.clock.tell(f"FAULT {kind}")

        return act

    def _learner(self) -> Learner | None:
        live = self.w.live_learners()
        return self.w.rng.choice(live) if live else None

    def learner_killed(self) -> bool:
        learner = self._learner()
        if learner is not None:
            self.w.clock.tell(f"{learner} is killed")
            self.w.clock.kill(learner)
        return learner is not None

    def killed_at_the_disk(self) -> bool:
        """At its next write, or one of those after it."""
        self.w.dies_at_disk = self.w.rng.randint(1, 9)
        return True

    def learner_signalled(self) -> bool:
        learner = self._learner()
        if learner is None or not learner.stop.deferred:
            return False
        learner.stop.requested = True
        return True

    def learner_stopped(self) -> bool:
        learner = self._learner()
        if learner is None:
            return False
        learner.stopped_until = self.w.clock.now + self.w.rng.uniform(0.5, 3.0) * self.w.knobs.lease_s
        return True

    def second(self, *, takeover: bool) -> bool:
        """Start a second learner."""
        if len(self.w.live_learners()) > 1:
            return False
        self.w.start_learner(takeover=takeover)
        return True

    def _server(self) -> Rollouts | None:
        return self.w.rng.choice(self.w.servers) if self.w.servers else None

    def rollouts_killed(self) -> bool:
        server = self._server()
        if server is not None:
            self.w.kill_server(server)
        return server is not None

    def rollouts_stopped(self) -> bool:
        server = self._server()
        if server is None:
            return False
        server.stopped_until = self.w.clock.now + self.w.rng.uniform(0.5, 3.0) * self.w.knobs.idle_s
        return True

    def rollouts_signalled(self) -> bool:
        server = self._server()
        if server is not None:
            server.ask()
        return server is not None

    def partition(self) -> bool:
        names = [p.name for p in (*self.w.live_learners(), *self.w.servers)]
        if not names:
            return False
        name = self.w.rng.choice(names)
        self.w.network.cut_until[name] = self.w.clock.now + self.w.rng.uniform(0.5, 8.0)
        self.w.redis.woken()
        return True

    def redis_away(self, seconds: float) -> bool:
        until = self.w.clock.now + (seconds or self.w.rng.uniform(0.3, 6.0))
        self.w.network.down_until = max(self.w.network.down_until, until)
        self.w.redis.woken()
        return True

    def redis_wiped(self) -> bool:
        if self.w.rng.random() < 0.5:  # FLUSHALL: the functions stay
            kept = self.w.redis.functions
            self.w.redis.wipe()
            self.w.redis.functions = kept
            self.w.redis.woken()
            return True
        self.w.redis.wipe()
        self.w.redis.lives += 1
        return self.redis_away(0.3)

    def redis_rolled_back(self) -> bool:
        """The last seconds of the append-only file are lost, or a replica that was behind takes over."""
        saved, behind = self.w.redis.copy(), self.w.rng.uniform(0.1, 2.5)

        def fail() -> None:
            self.w.clock.tell(f"the last {behind:.1f} s of Redis are lost")
            self.w.redis.restore(saved)
            self.w.redis.lives += 1
            self.redis_away(self.w.rng.uniform(0.05, 2.0))

        self.w.clock.at(self.w.clock.now + behind, fail)
        return True

    def redis_full(self) -> bool:
        self.w.redis.made_full = True
        self.w.clock.at(self.w.clock.now + self.w.rng.uniform(0.5, 6.0), self.room)
        return True

    def room(self) -> None:
        """Redis has room again."""
        self.w.redis.made_full = False

    def redis_stopped(self) -> bool:
        self.w.network.stopped_until = self.w.clock.now + self.w.rng.choice((0.5, 3.0, 14.0))
        return True

    def clock_jumps(self, seconds: float) -> bool:
        self.w.redis_ahead += seconds
        self.w.clock.tell(f"the clock of Redis jumps by {seconds:.1f} s")
        return True

    def stranger(self) -> bool:
        """Add an entry without a task of this run."""
        if self.w.redis.stream(self.w.keys.traj) is None:
            return False
        header, body = self.w.sealed(STRANGE + self.w.rng.randrange(9), self.w.rng.choice((self.w.run.id, "other")))
        fields = self.w.rng.choice(({"seq": STRANGE, "h": header, "b": body}, {"x": "y"}))
        self.w.redis.xadd(self.w.keys.traj, fields)
        return True

    def task_deleted(self) -> bool:
        """A user deletes a task manually."""
        stream = self.w.redis.stream(self.w.keys.tasks)
        if stream is None or not stream.entries:
            return False
        del stream.entries[self.w.rng.choice(list(stream.entries))]
        return True

    def asked_again(self) -> bool:
        """A user requeues seqs: some dead or stale ones, some others, and an invalid one."""
        wanted = [*self.w.rng.sample(range(1, 12), 4), "x"]
        return bool(self.w.redis.sadd(self.w.keys.requeue, *wanted))
