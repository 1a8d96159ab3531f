"""The demo's ring on a Ray cluster of four nodes, on this machine: `make test-ops`.

Two ranks of the learner on two nodes that share the run directory; everything else on nodes that do not see it. An
actor is killed, a rank is killed, a node is lost and another one joins, the driver is killed: nothing is lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.run.run_dir import read_record
from tests.ops.accounting import require_balanced
from tests.ops.ray_nodes import RayNodes, is_alive, parent, ray_nodes
from tests.support.waiting import wait_until

STEPS, GROUPS = 120, 8
SMALL = ("run.id=ray", f"run.steps={STEPS}", f"run.groups_per_step={GROUPS}", "learner.checkpoint_every=5")
RAY = (
    *("launch.backend=ray", "launch.learner_ranks=2", "launch.engines=2", "launch.ready_s=600"),
    "learner.publish={type: distributed, backend: gloo}",
)
pytestmark = [pytest.mark.ops, pytest.mark.slow, pytest.mark.timeout(5400)]


class Run:
    """The run, whose driver is on the head."""

    def __init__(self, nodes: RayNodes, config: Path, directory: Path, log: Path) -> None:
        self.nodes, self.config, self.directory, self.log = nodes, config, directory, log
        self.driver: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Start the driver: `foray up`."""
        argv = [self.nodes.python, "-m", "foray", "up", self.config, f"run.dir={self.directory}", *RAY]
        with self.log.open("ab") as log:
            self.driver = subprocess.Popen(argv, stdout=log, stderr=log, env=self.nodes.env)

    def wait(self, condition: Any, what: str, seconds: float = 300) -> None:
        """Wait, and look at the driver meanwhile."""
        assert self.driver is not None
        driver = self.driver

        def holds() -> bool:
            return bool(condition()) or driver.poll() not in (None, 0)

        wait_until(holds, what, seconds, self.log.read_text)
        assert driver.poll() in (None, 0), self.log.read_text()

    def steps(self) -> int:
        """Return the steps done."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def process(self, name: str) -> dict[str, Any]:
        """Return a process of run.json, {} while it has none."""
        return next((p for p in read_record(self.directory).get("processes", ()) if p["name"] == name), {})

    def pids(self) -> list[int]:
        """Return all processes that are alive."""
        found = [int(p["pid"]) for p in read_record(self.directory).get("processes", ())]
        return [pid for pid in found if pid and is_alive(pid)]


@pytest.fixture
def run(warm_model: Path, tmp_path: Path) -> Iterator[Run]:
    python = os.environ.get("FORAY_RAY_PYTHON", "")
    if not python:
        pytest.skip("FORAY_RAY_PYTHON names no Python with Ray: `make test-ops` does that")
    world, directory = tmp_path / "prepared", tmp_path / "run"
    directory.mkdir()
    prepare = [sys.executable, "-m", "foray", "demo", "--prepare-only", "--dir", str(world)]
    subprocess.run([*prepare, "--model", str(warm_model), *SMALL], check=True, cwd=tmp_path, timeout=300)
    with ray_nodes(Path(python), tmp_path) as nodes:
        made = Run(nodes, world / "demo.yaml", directory, tmp_path / "driver.log")
        try:
            yield made
        finally:
            if made.driver is not None and made.driver.poll() is None:
                made.driver.kill()
                made.driver.wait(30)


def test_the_ring_trains_while_actors_ranks_nodes_and_the_driver_are_lost(run: Run) -> None:
    run.nodes.add(11, 1)
    run.up()
    wait_until(lambda: "waiting for room: learner needs" in run.log.read_text(), "the driver waits for nodes", 300)
    run.nodes.add(12, 1)
    run.nodes.add(13, 4, without=run.directory)
    run.wait(lambda: run.steps() >= 2, "the first steps", 600)
    hosts = {p["name"]: p["host"] for p in read_record(run.directory)["processes"]}
    assert (hosts["redis"], hosts["learner"], hosts["learner-rank-1"]) == ("127.0.0.11", "127.0.0.11", "127.0.0.12")
    assert {hosts[n] for n in ("engine-1", "engine-2", "retriever-1", "rollout-1")} == {"127.0.0.13"}
    assert "ready" in (run.directory / "logs" / "engine-1.log").read_text(), "its log comes from another host"

    engine = int(run.process("engine-1")["pid"])
    os.kill(parent(engine), signal.SIGKILL)
    run.wait(lambda: run.process("engine-1")["pid"] not in (0, engine), "the engine of a killed actor is back")
    assert not is_alive(engine), "it ended with its actor"
    before = run.steps()
    run.wait(lambda: run.steps() >= before + 2, "steps with the new engine")

    run.wait(lambda: (run.directory / "checkpoints" / "CURRENT").exists(), "a checkpoint to resume from", 600)
    os.kill(int(run.process("learner-rank-1")["pid"]), signal.SIGKILL)
    run.wait(lambda: "restarting all 2 ranks (1 of 3 per hour)" in run.log.read_text(), "both ranks restart")
    before = run.steps()
    run.wait(lambda: run.steps() > before + 2, "steps of the second start", 600)

    run.nodes.add(14, 4, without=run.directory)
    run.nodes.lose(13)
    moved = ("engine-1", "engine-2", "retriever-1", "rollout-1")
    run.wait(lambda: {run.process(name)["host"] for name in moved} == {"127.0.0.14"}, "all moved", 600)
    for name in moved:
        assert f"{name} was lost with its host 127.0.0.13: restarting it (this does not count)" in run.log.read_text()
    before = run.steps()
    run.wait(lambda: run.steps() >= before + 2, "steps on the new node", 600)

    assert run.driver is not None
    left = run.pids()
    run.driver.kill()
    run.driver.wait(30)
    wait_until(lambda: not any(map(is_alive, left)), "no process outlives the driver", 60)
    run.nodes.lose(14)
    wait_until(lambda: run.nodes.knows_lost(14), "node 14 is lost", 120)
    before = len(run.log.read_text())
    run.up()
    # the ranks have the nodes with the directory now, and the next node is for the others
    wait_until(lambda: "waiting for room: engine-1" in run.log.read_text()[before:], "the ranks are placed", 300)
    run.nodes.add(15, 4, without=run.directory)
    run.wait(lambda: run.driver is not None and run.driver.poll() == 0, "the last step", 1800)
    counts, starts = require_balanced(run.directory, STEPS, GROUPS)
    assert starts == 3, counts
    print(counts)
