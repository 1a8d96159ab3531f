"""`foray bench transport`: groups from a rollout server's memory into the learner's, through one Redis.

chain    encode + publish (the function that also acknowledges the task) + read + decode and check, one group at a time;
         alternating with the same bytes through plain XADD and XREADGROUP, and with the same values through msgpack
         and a transaction, so that all run under the same conditions
load     64 rollout clients in separate processes. First nothing reads, until Redis refuses (back-pressure); then
         the learner's side reads, decodes and acknowledges for `minutes`, while memory and event loops are monitored.
         Every seq must arrive exactly once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.base import BenchResult, Say
from benchmarks.transport.chain import RUN, TransportRing, a_task, ring
from benchmarks.transport.settings import TransportBench
from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.process import Child
from deploy.run.redis_server import connect
from protocol.errors import ForayError
from protocol.keys import Keys
from protocol.ledger import Ledger, Outcome

if TYPE_CHECKING:
    import redis

READ, STALL_S, FILL_S, DRAIN_S = 16, 2.0, 120.0, 120.0
SETTLE = 0.2
"""Share of the load before memory is compared: first caches fill, and the append-only file is rewritten."""


@dataclass
class Pump:
    """The learner's side without a policy: issue tasks as clients finish, read, decode, acknowledge, count."""

    made: TransportRing
    group_size: int
    issued: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    twice: int = 0

    def issue(self, upto: int) -> None:
        """Issue tasks up to seq `upto`."""
        new = range(self.issued + 1, upto + 1)
        self.made.store.issue(0, [(seq, a_task(seq, self.group_size)) for seq in new])
        self.issued = max(self.issued, upto)

    def turn(self) -> int:
        """Read available groups (for at most half a second) and return their number."""
        from learner.delivery.entry import read_entry

        entries = self.made.store.read(READ)
        for id_, fields in entries:
            seq = read_entry(id_, fields, RUN).seq
            if seq in self.ledger:
                self.twice += 1
            else:
                self.ledger.settle(seq, Outcome.TRAINED)
        if entries:
            self.made.store.ack([id_ for id_, _ in entries])
        return len(entries)

    @property
    def open(self) -> int:
        """Return the number of issued groups that have not arrived."""
        return self.issued - self.ledger.settled


def load(settings: TransportBench, directory: Path, say: Say) -> dict[str, Any]:
    """Return the figures of both phases. Raises ForayError if a group was lost or arrived twice."""
    with ring(directory, settings.maxmemory_mb, say) as made:
        pump, client = Pump(made, settings.group_size), connect(made.url)
        try:
            children = _clients(settings, made, directory)
            filled = _fill(settings, pump, client, say)
            held = _hold(settings, pump, client, children, say)
            _drain(pump)
            report = [_end(child, directory) for child in children]
        finally:
            client.close()
    if pump.twice or pump.open:
        raise ForayError(f"{pump.issued} issued, {pump.ledger.settled} arrived, {pump.twice} arrived twice")
    return {
        "groups": pump.issued,
        "lost": pump.open,
        "twice": pump.twice,
        "until_back_pressure": filled,
        "held": held,
        "clients": report,
    }


def _clients(settings: TransportBench, made: TransportRing, directory: Path) -> list[Child]:
    children, each = [], -(-settings.clients // settings.processes)
    for first in range(0, settings.clients, each):
        count = min(each, settings.clients - first)
        numbers = (count, settings.group_size, settings.tokens, first)
        argv = (sys.executable, "-m", "benchmarks.transport.client", made.url, *map(str, numbers))
        name = f"clients-{first}"
        spec = ProcessSpec(name, "rollout", argv, directory / f"{name}.log", Ready.RUNNING)
        children.append(made.supervisor.spawn(spec))
    return children


def _fill(settings: TransportBench, pump: Pump, client: redis.Redis, say: Say) -> dict[str, Any]:
    """Fill Redis without a reader until it refuses groups, which the clients then keep."""
    traj = Keys(RUN).traj
    most = settings.maxmemory_mb * (1 << 20) // (settings.group_size * settings.tokens * 4) + 4 * settings.clients
    pump.issue(most)
    begun = last_change = time.monotonic()
    first = full = 0.0
    before = count = 0
    while not (full and time.monotonic() - last_change > STALL_S):
        now, length = time.monotonic(), int(client.xlen(traj))
        first = first or (now if length else 0.0)
        if length != count:
            count, last_change = length, now
        if not full and _refused(client):
            full, before = now, count
        if now - begun > FILL_S:
            raise ForayError(f"no back-pressure within {FILL_S:g} s: {count} groups, {_memory(client)} MiB used")
        time.sleep(0.02)
    seconds = full - first
    size = int(client.memory_usage(traj, samples=5) or 0) / max(1, count)
    say(f"first refusal after {before} groups in {seconds:.1f} s, full at {count}")
    return {
        "groups": count,
        "groups_until_first_refusal": before,
        "groups_per_s": before / seconds if seconds > 0 else 0.0,
        "bytes_per_group_in_redis": size,
        "refused_writes": _refused(client),
        "memory_mib": _memory(client),
        "maxmemory_mib": settings.maxmemory_mb,
    }


def _hold(settings: TransportBench, pump: Pump, client: redis.Redis, children: list[Child], say: Say) -> dict[str, Any]:
    """Run reader and clients at full speed; read the memory of every process each second."""
    begun, piled = time.monotonic(), pump.issued
    end, look, arrived, peak = begun + 60 * settings.minutes, begun, 0, 0.0
    pids = {"redis": pump.made.redis.pid, "learner": os.getpid(), **{c.spec.name: c.pid for c in children}}
    marks: list[tuple[float, dict[str, float]]] = []
    while (now := time.monotonic()) < end:
        arrived += pump.turn()
        due = piled + int(settings.rate * (now - begun)) if settings.rate else pump.issued + settings.clients
        if pump.open < 4 * settings.clients and due > pump.issued:
            pump.issue(min(due, pump.issued + settings.clients))
        if now >= look:
            look = now + 1.0
            peak = max(peak, _memory(client))
            marks.append((now - begun, {name: _rss_mib(pid) for name, pid in pids.items()}))
            if int(now - begun) % 60 == 0:
                say(f"{now - begun:.0f} s: {arrived} groups, Redis {_memory(client):.0f} MiB, {marks[-1][1]}")
    seconds = time.monotonic() - begun
    size = settings.group_size * settings.tokens * 4
    settled = [rss for at, rss in marks if at >= SETTLE * seconds] or [marks[-1][1]]
    return {
        "seconds": seconds,
        "groups_per_s": arrived / seconds,
        "token_mb_per_s": arrived * size / seconds / 1e6,
        "redis_peak_mib": peak,
        "rss_mib_after_settling": settled[0],
        "rss_mib_at_the_end": settled[-1],
        "rss_mib_most": {name: max(one[name] for one in settled) for name in pids},
    }


def _drain(pump: Pump) -> None:
    deadline = time.monotonic() + DRAIN_S
    while pump.open and time.monotonic() < deadline:
        pump.turn()


def _end(child: Child, directory: Path) -> dict[str, Any]:
    child.terminate()
    child.wait(20)
    last = (directory / f"{child.spec.name}.log").read_text().strip().splitlines()[-1]
    report: dict[str, Any] = json.loads(last)
    if report.pop("broken"):
        raise ForayError(f"{child.spec.name} failed: {last[-1000:]}")
    return report


def _refused(client: redis.Redis) -> int:
    found = client.info("errorstats").get("errorstat_OOM", {})
    return int(found.get("count", 0)) if isinstance(found, dict) else 0


def _memory(client: redis.Redis) -> float:
    return float(client.info("memory")["used_memory"]) / 2**20


def _rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(bench: TransportBench, say: Say) -> BenchResult:
    """Run the chain, then the load, each on its own Redis."""
    from benchmarks.transport.chain import chain

    with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
        figures = chain(bench, Path(name), say)
    ours, unchecked, raw = (figures[name] for name in ("ours", "unchecked", "raw"))
    with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
        held = load(bench, Path(name), say)
    return BenchResult(
        value=ours["groups_per_s"],
        unit="groups/s",
        baseline={"name": "plain XADD + XREADGROUP of the same bytes", **raw},
        ratio=ours["groups_per_s"] / raw["groups_per_s"],
        details={
            "chain": ours,
            "unchecked": unchecked,
            "unchecked_ratio": ours["groups_per_s"] / unchecked["groups_per_s"],
            "load": held,
        },
    )
