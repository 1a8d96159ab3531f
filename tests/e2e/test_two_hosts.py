"""Two hosts without a shared path: an engine of the second one joins a running demo by hand, leaves, and is killed.

The hosts are network namespaces, each with a directory that the other one cannot see. Host `a` runs Redis and
`foray up`; on host `b` the commands are those of docs/clusters.md, "Add an engine on another host".
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.run.redis_server import find_server
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.ledger import Ledger
from protocol.messages import NodeState
from rollout_server.node.guard import descendants
from tests.support.hosts import TwoHosts
from tests.support.waiting import wait_until

GROUPS = 4
SMALL = (
    "run.id=demo",
    "run.steps=100000",  # it is stopped when everything was seen: a fast machine must not end before that
    f"run.groups_per_step={GROUPS}",
    "run.group_size=4",
    "learner.checkpoint_every=10",
)
LEASE_S = 4.0
FORAY = [sys.executable, "-m", "foray"]


class Demo:
    """The run of host `a`, and its commands there."""

    def __init__(self, hosts: TwoHosts, home: Path) -> None:
        self.hosts, self.home, self.run_dir = hosts, home, home / "run"
        self.events: list[str] = []
        self.launcher: subprocess.Popen[bytes]

    def env(self, role: str, home: Path | None = None) -> dict[str, str]:
        """What `set -a; . secrets/ROLE.env` adds to the environment."""
        lines = ((home or self.home) / "secrets" / f"{role}.env").read_text().splitlines()
        given = dict(line.split("=", 1) for line in lines)
        return {**os.environ, "OMP_NUM_THREADS": "1"} | given

    def status(self) -> dict[str, Any]:
        """`foray status --json`, on host `a`."""
        argv = self.hosts.argv("a", *FORAY, "status", str(self.run_dir), "--json")
        done = subprocess.run(argv, env=self.env("viewer"), capture_output=True, text=True, timeout=240, check=False)
        assert done.stdout, done.stderr
        return dict(json.loads(done.stdout))

    def engine(self, name: str) -> dict[str, Any]:
        """One engine in it, {} if it is not registered."""
        return next((e for e in self.status()["engines"] if e["id"] == name), {})

    def shows(self, what: str) -> None:
        """Note the lines of `foray status` about engines and accounting."""
        argv = self.hosts.argv("a", *FORAY, "status", str(self.run_dir))
        done = subprocess.run(argv, env=self.env("viewer"), capture_output=True, text=True, timeout=240, check=False)
        lines = [
            line for line in done.stdout.splitlines() if re.match(r"run |target|engine|ledger|tokens|problem", line)
        ]
        self.events += [f"# {what}", *lines]

    def serves(self, *, since: int, more_than: int = 0) -> bool:
        """Whether engine `b` has received the version of the day, or the one before, since this line of its log, and
        more of its turns were trained than that many.
        """
        lines = (self.home.parent / "b" / "engine.log").read_text().splitlines()[since:]
        received = [int(step) for line in lines for step in re.findall(r"received 1\.(\d+):", line)]
        today = steps(self)[-1]["step"]
        return bool(received) and received[-1] >= today - 1 and engines_used(self.run_dir)["b"] > more_than


def engines_used(run_dir: Path) -> Counter[str]:
    """How many turns each engine has generated, in what was trained."""
    entries = read_journal(run_dir / "journal")
    turns = (segment for e in entries for t in e.group.trajectories for segment in t.segments)
    return Counter(segment.engine for segment in turns if segment.engine)


@contextmanager
def running(argv: list[str], log: Path, **given: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, its output in `log`, terminated at the end."""
    with log.open("ab") as output:
        child = subprocess.Popen(argv, stdout=output, stderr=output, **given)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)


@pytest.fixture
def demo(warm_model: Path, tmp_path: Path) -> Iterator[Demo]:
    """The demo on host `a`, training; what host `b` needs is copied to `tmp_path / "b"`."""
    home, other = tmp_path / "a", tmp_path / "b"
    home.mkdir()
    with TwoHosts() as hosts:
        demo = Demo(hosts, home)
        publish = ("learner.publish.type=distributed", f"learner.publish.address={hosts.address['a']}")
        prepare = [*FORAY, "demo", "--prepare-only", "--dir", str(demo.run_dir), "--model", str(warm_model)]
        subprocess.run([*prepare, *SMALL, *publish], check=True, cwd=home, timeout=300)
        secure = ["--secure", "--no-tls", "--secrets", "secrets", "--hosts", hosts.address["a"]]
        subprocess.run([*FORAY, "init", "run/demo.yaml", *secure], check=True, cwd=home, timeout=300)
        shutil.copytree(demo.run_dir / "model", other / "model")
        (other / "secrets").mkdir()
        shutil.copy(home / "secrets" / "node.env", other / "secrets")
        shutil.copy(demo.run_dir / "demo.yaml", other / "run.yaml")
        server = hosts.argv("a", str(find_server().path), "secrets/redis.conf")
        up = [*FORAY, "up", "run/demo.yaml", "launch.secrets=secrets", "launch.redis=configured"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (
            running(server, home / "redis.log", cwd=home),
            running(hosts.argv("a", *up), home / "up.log", cwd=home, env=env) as demo.launcher,
        ):
            wait_until(lambda: len(steps(demo)) >= 2, "the first steps", 400, (home / "up.log").read_text)
            yield demo


def steps(demo: Demo) -> list[dict[str, Any]]:
    """The steps that were trained."""
    path = demo.run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def engine_b(demo: Demo, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """`foray engine` on host `b`, which finds the directory of host `a` empty."""
    home = demo.home.parent / "b"
    argv = ["engine", "--config", "run.yaml", "engine.id=b", "run.dir=run", "run.model=model", "engine.host=0.0.0.0"]
    argv += [f"engine.lease_s={LEASE_S}", "engine.heartbeat_s=1"]
    argv = demo.hosts.argv("b", *FORAY, *argv, *overrides, hide=demo.home)
    demo.events.append(f"b$ foray {' '.join([*argv[argv.index('foray') + 1 :]])}")
    log = home / "engine.log"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    turns = engines_used(demo.run_dir)["b"]
    with running(argv, log, cwd=home, env=demo.env("node", home)) as node:
        wait_until(lambda: demo.serves(since=before, more_than=turns), "b serves current versions", 400, log.read_text)
        yield node


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_engine_of_another_host_joins_by_hand_leaves_and_is_killed(demo: Demo) -> None:
    log = demo.home.parent / "b" / "engine.log"
    with engine_b(demo) as node:
        demo.shows("b has joined")
        info = demo.engine("b")
        assert info["url"].startswith(f"http://{demo.hosts.address['b']}:"), "found by the route to Redis"
        assert info["state"] in (NodeState.READY, NodeState.LOADING) and info["epoch"] == 1
        served, lines = engines_used(demo.run_dir)["b"], len(log.read_text().splitlines())
        wait_until(lambda: demo.serves(since=lines, more_than=served), "it follows and serves", 240)
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == 0, log.read_text()[-3000:]
    assert not demo.engine("b"), "it has left"
    demo.shows("b has left")
    said = log.read_text()
    assert "is not on this host" in said and "received" in said and "Traceback" not in said
    assert not list((demo.home.parent / "b" / "run").glob("weights/*")), "no version was written or read there"

    with engine_b(demo, f"engine.advertise={demo.hosts.address['b']}") as node:
        demo.shows("b has joined again")
        for pid in [node.pid, *descendants(node.pid)]:
            os.kill(pid, signal.SIGKILL)
        node.wait(10)
        demo.events.append("b# kill -9 the node and its engine")
        time.sleep(LEASE_S + 1.0)
        assert not demo.engine("b"), "its registration has ended"
    demo.shows("b was killed")

    demo.launcher.send_signal(signal.SIGTERM)
    assert demo.launcher.wait(600) == 0, (demo.home / "up.log").read_text()[-3000:]
    accounts_balance(demo)
    print("\n".join(demo.events))


def accounts_balance(demo: Demo) -> None:
    """Nothing is lost and nothing is trained twice."""
    wait_until(lambda: demo.status()["state"] == "stopped", "the learner's last report has expired")
    demo.shows("the end")
    seen = demo.status()
    assert seen["ledger"]["closes"], seen["ledger"]
    assert seen["tokens"]["closes"], seen["tokens"]
    checkpoint = Checkpoints(demo.run_dir / "checkpoints", 2).load()
    assert checkpoint is not None
    ledger = Ledger.from_state(checkpoint.facts["ledger"])
    counts = {str(outcome): number for outcome, number in ledger.counts.items()}
    assert counts["trained"] == checkpoint.facts["step"] * GROUPS and counts["dead"] == 0
    assert ledger.watermark + len(ledger.above) == sum(counts.values())
    seqs = Counter(entry.group.seq for entry in read_journal(demo.run_dir / "journal", lineage=checkpoint.lineage))
    assert len(seqs) == counts["trained"] and max(seqs.values()) == 1
    last = steps(demo)[-1]
    names = [f"publish_{name}" for name in ("distributed", "disk", "again", "fallbacks", "snapshots")]
    published = ", ".join(f"{name} {last[name]:.0f}" for name in names)
    demo.events.append(f"# turns by engine {dict(engines_used(demo.run_dir))}; {published}")
