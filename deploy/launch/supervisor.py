"""Start processes, wait until each is ready, restart them within limits, stop all in order.

There is no thread: the owner of a Supervisor calls `check` periodically. Nothing else restarts a process, whatever
`LaunchBackend` started it. The processes of a group, such as the ranks of a learner, are restarted together. A group
that ends without restarts left raises `ProcessFailed`, and the owner then calls `stop`.

The stop order is that of the data: the learner first (it
writes its checkpoint), then the processes that feed it, Redis last.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.process import Child, LaunchBackend, LocalBackend, ProcessFailed
from deploy.run.redis_server import connect, ping
from protocol import events
from protocol.codec import decode_as
from protocol.errors import ForayError, ProtocolError, UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState
from protocol.runtime.service_cli import NOT_RESTARTED, describe_exit
from rollout_server.node.guard import Growth

STOP_ORDER = ("learner", "rollout", "engine", "retriever", "redis")
POLL_S = 0.05
SHUTDOWN_S = 20.0
"""Seconds between SIGTERM and SIGKILL of a process. The learner gets more for its last checkpoint."""
RESTARTS_S = 3600.0
"""Restarts within this period are limited: a loop ends the run, rare failures of a long run do not."""
LEAVE_S = 2.0
"""Seconds for the other ranks to end by themselves after one exited."""
Say = Callable[[str], None]
IsReady = Callable[[ProcessSpec], bool]


class Supervisor:
    """The child processes of one run.

    backend     starts the processes; default: on this machine
    is_ready    returns whether a started process is ready; called every `POLL_S` * 2, must return quickly
    ready_s     time for one process to become ready; it starts again whenever the memory of its processes has grown
    shutdown_s  time between SIGTERM and SIGKILL, for each stage of the stop; default: SHUTDOWN_S
    beat        called in every iteration of a waiting loop with what it waits for
    interrupted called at each check; raises if the user stopped the run
    url_of      returns the address of a ready process by its name, "" without one
    """

    def __init__(
        self,
        *,
        is_ready: IsReady,
        ready_s: float,
        shutdown_s: float | None = None,
        say: Say = lambda line: None,
        beat: Callable[[Callable[[], str]], None] = lambda line: None,
        interrupted: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        backend: LaunchBackend | None = None,
        url_of: Callable[[str], str] = lambda name: "",
    ) -> None:
        self._url_of = url_of
        self._is_ready, self._ready_s = is_ready, ready_s
        self._shutdown_s = SHUTDOWN_S if shutdown_s is None else shutdown_s
        self._hurried = False
        self._say, self._beat, self._interrupted = say, beat, interrupted
        self._backend = backend or LocalBackend()
        self.children: dict[str, Child] = {}
        self.restarts: dict[str, int] = {}
        self._clock = clock
        self._ending: dict[str, tuple[Child, list[tuple[float, str]]]] = {}
        """Group that ends -> its member that ended first, and what is done to the others, and when."""
        self._restarted: dict[str, list[float]] = {}

    def spawn(self, *specs: ProcessSpec) -> Child:
        """Start the processes of one group without waiting for them, and return the first."""
        children = self._backend.spawn(specs)
        self.children.update((child.spec.name, child) for child in children)
        return children[0]

    def await_ready(self, names: Sequence[str]) -> None:
        """Wait until all of `names` are ready. Raises ProcessFailed if one exits for good or the time is over."""
        growth = Growth(self._ready_s)
        while waiting := [name for name in names if not self._look(name)]:
            self.check()
            child = self.children[waiting[0]]
            self._beat(child.waiting_line)
            if growth.has_ended(lambda: sum(self.children[name].memory_mib() for name in waiting)):
                raise child.failed(f"was not ready {self._ready_s:g} s after it last grew ({child.spec.ready})")
            time.sleep(POLL_S * 2)

    def check(self) -> None:
        """Restart groups of processes that exited. Raises ProcessFailed if one has used its restarts of RESTARTS_S.

        A learner that exits with code 0 has finished (after its last step). A group whose first rank has a code of
        NOT_RESTARTED (user error, no training signal, fenced) is not restarted: it would fail again. A restart because
        a host was lost does not count.
        """
        self._interrupted()
        groups: dict[str, list[Child]] = {}
        for child in self.children.values():
            groups.setdefault(child.spec.group or child.spec.name, []).append(child)
        for group, members in groups.items():
            failed = [child for child in members if child.poll() is not None and not child.has_finished]
            if failed and not members[0].has_finished and self._all_ended(group, members, failed[0]):
                self._restart(group, members, self._ending.pop(group)[0])

    def _all_ended(self, group: str, members: Sequence[Child], failed: Child) -> bool:
        """Return whether all members have ended; stop them first, as after a lost rank none can go on."""
        left, now = [child for child in members if child.poll() is None], self._clock()
        # one that exits by itself may follow the first rank, whose exit code counts
        begin = now if failed.lost or (failed.poll() or 0) < 0 else now + LEAVE_S
        stop = [(begin, "terminate"), (begin + self._shutdown_s, "kill")]
        _, due = self._ending.setdefault(group, (failed, stop))
        while left and due and now >= due[0][0]:
            _, method = due.pop(0)
            for child in left:
                getattr(child, method)()
        return not left

    def _restart(self, group: str, members: Sequence[Child], failed: Child) -> None:
        first = members[0].poll()
        failed = members[0] if first in NOT_RESTARTED else failed
        lost = next((child for child in members if child.lost), None)
        code, now = failed.poll() or 0, self._clock()
        recent = self._restarted[group] = [at for at in self._restarted.get(group, ()) if now - at < RESTARTS_S]
        if code in NOT_RESTARTED or (lost is None and len(recent) >= failed.spec.restarts):
            again = f" (after {len(recent)} restarts within an hour)" if recent else ""
            raise failed.failed(f"{describe_exit(code)}{again}")
        self.restarts[group] = self.restarts.get(group, 0) + 1
        if lost is not None:
            why, limit = f"{lost.spec.name} was lost with its host {lost.host}".rstrip(), "(this does not count)"
        else:
            recent.append(now)
            why = f"{failed.spec.name} {describe_exit(code)}"
            limit = f"({len(recent)} of {failed.spec.restarts} per hour)"
        what = "it" if len(members) == 1 else f"all {len(members)} ranks"
        self._say(f"{why}: restarting {what} {limit}, the run continues")
        self.spawn(*(child.spec for child in members))

    def ended(self, name: str) -> bool:
        """Return whether `name` has finished with code 0. `check` handles failures."""
        return self.children[name].poll() == 0

    def stop(self, names: Iterable[str] | None = None) -> list[str]:
        """Stop `names` (default: all) in order: SIGTERM, wait, SIGKILL. Return those that had to be killed."""
        chosen = set(self.children if names is None else names)
        killed: list[str] = []
        for kind in STOP_ORDER:
            stage = [c for n, c in self.children.items() if n in chosen and c.spec.kind == kind]
            killed += self._stop_stage(stage)
        for name in chosen:
            self.children.pop(name, None)
        return killed

    def hurry(self) -> None:
        """Do not wait in the stop in progress, or in later ones."""
        self._hurried = True

    def _stop_stage(self, stage: list[Child]) -> list[str]:
        if alive := [child.spec.name for child in stage if child.poll() is None]:
            checkpoint = ", which finishes its step and writes a checkpoint" if stage[0].spec.kind == "learner" else ""
            self._say(f"stopping {', '.join(alive)}{checkpoint}")
        for child in stage:
            child.terminate()
        begun = time.monotonic()
        limit = self._shutdown_s + max((child.spec.stop_s for child in stage), default=0.0)
        working = Growth(limit)

        def computed() -> float:
            # a learner first finishes its step, however long that takes; less than a tenth of a core is no work
            return sum(child.cpu_s() for child in stage if child.spec.kind == "learner") * 10 // max(limit, POLL_S)

        # `hurry` may be called meanwhile
        while any(child.poll() is None for child in stage) and not working.has_ended(computed) and not self._hurried:
            slow = next((child for child in stage if child.poll() is None), stage[0])
            self._beat(lambda slow=slow: slow.waiting_line("to stop", since=begun))  # type: ignore[misc]
            time.sleep(POLL_S)
        late = [child for child in stage if child.poll() is None]
        for child in late:
            child.kill()
            child.wait(10.0)
            idle = " of its last computing" if child.spec.kind == "learner" else ""
            within = "at once" if self._hurried else f"within {limit:g} s{idle}"
            self._say(f"{child.spec.name} did not stop {within} and was killed")
        return [child.spec.name for child in late]

    def _look(self, name: str) -> bool:
        child = self.children[name]
        if not child.ready and child.poll() is None and self._is_ready(child.spec):
            child.ready = True
            took = time.monotonic() - child.spawned
            state = "started" if child.spec.ready is Ready.RUNNING else "ready"
            url = child.spec.url or self._url_of(name)
            self._say(f"{name} {state} ({took:.1f} s)" + (f", {url}" if url else ""))
        # a learner with nothing left to do may have ended before the first check
        return child.ready or child.has_finished


ANSWER_S = 1.0
"""Timeout for one answer; a starting process is polled again."""
LOOK_S, LOOKED_AT = 2.0, 1000
"""Seconds between two looks at the event log, and entries per look."""


class Readiness:
    """Readiness checks for the processes of run `run_id`, whose Redis is at `redis_url`."""

    def __init__(self, redis_url: str, run_id: str) -> None:
        self._url, self._keys = redis_url, Keys(run_id)
        self._left: dict[str, str] = {}
        self.urls: dict[str, str] = {}
        """Name of a registered process -> its address."""

    def starting(self, spec: ProcessSpec) -> None:
        """Remember what a killed process left in Redis for `spec`, so that it does not count as the new process."""
        if found := self._registration(spec):
            _, self._left[spec.name], _ = found

    def __call__(self, spec: ProcessSpec) -> bool:
        match spec.ready:
            case Ready.PING:
                return not ping(self._url, timeout_s=ANSWER_S)
            case Ready.HTTP:
                return answers(f"{spec.url}/ready")
            case Ready.ALIVE:
                return answers(f"{spec.url}/health")
            case Ready.REGISTERED | Ready.ENGINE:
                state, incarnation, url = self._registration(spec) or ("", "", "")
                if not state or incarnation == self._left.get(spec.name):
                    return False
                if spec.ready is Ready.REGISTERED:
                    self.urls[spec.name] = url
                return state == NodeState.READY
            case Ready.RUNNING:
                return True

    def _registration(self, spec: ProcessSpec) -> tuple[str, str, str] | None:
        """Return state, incarnation and URL of a process; None if it registers nowhere, or there is none to read."""
        import redis

        if spec.ready not in (Ready.REGISTERED, Ready.ENGINE):
            return None
        with connect(self._url, timeout_s=ANSWER_S) as client:
            try:
                if spec.ready is Ready.ENGINE:
                    raw: Any = client.hget(self._keys.engine(spec.name), "b")
                    engine = decode_as(EngineInfo, raw or b"")
                    return engine.state, engine.incarnation, engine.url
                raw = client.get(self._keys.metrics(spec.kind, spec.name))
                text = decode_as(MetricsSnapshot, raw or b"").text
                return text.get("state", ""), text.get("incarnation", ""), text.get("url", "")
            except (redis.RedisError, OSError, ProtocolError):
                return None


class EngineLosses:
    """What nodes on any host report about lost engines in the event log of run `run_id`, since the first `read`."""

    def __init__(self, redis_url: str, run_id: str) -> None:
        self._url, self._events = redis_url, Keys(run_id).events
        self._after, self._due = "", 0.0
        self._lost: dict[str, list[str]] = {}

    def read(self) -> list[str]:
        """Return new lines; none within LOOK_S of the last look, and none while Redis does not answer."""
        import redis

        if (now := time.monotonic()) < self._due:
            return []
        self._due = now + LOOK_S
        with connect(self._url, timeout_s=ANSWER_S) as client:
            try:
                if not self._after:
                    found: Any = client.xrevrange(self._events, count=1)
                    self._after = found[0][0].decode() if found else "0-0"
                    return []
                found = client.xrange(self._events, min=f"({self._after}", count=LOOKED_AT)
            except (redis.RedisError, OSError):
                return []
        self._after = found[-1][0].decode() if found else self._after
        lost = [e for _, fields in found if (e := events.parse(fields))["kind"] == events.ENGINE_LOST]
        for event in lost:
            self._lost.setdefault(event["id"], []).append(event["text"])
        return [f"{e['id']}: {e['text']}, the run continues" for e in lost]

    def explained(self, error: ForayError, directory: Path) -> ForayError:
        """Return the error with the lost engine as its cause; `error` itself if none was lost, or if it says so."""
        self._due = 0.0
        self.read()
        if isinstance(error, UserError) or not self._lost:
            return error
        name, texts = max(self._lost.items(), key=lambda one: len(one[1]))
        what = f"engine {name} was lost {len(texts)} times, the last time: {texts[-1]}"
        logs = directory / "logs"
        seen = f"{logs / name}.log has each loss, {logs / name}.engine.log the output of the engine"
        if isinstance(error, ProcessFailed):
            error.cause = f"{what}; {seen}"
            return error
        todo = "the machine may be short of memory or of CPU time: `foray doctor` measures both; then start it again"
        return UserError(what, why=f"so {error}. {seen}", todo=todo)


def answers(url: str) -> bool:
    """Return whether GET `url` returns 200."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
