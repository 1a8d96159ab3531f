"""The demo's ring as jobs of Slurm, with three nodes: `make test-ops`.

A learner of two nodes, engines 2 -> 4 -> 1 -> 2 by `foray scale`, a node set down, the core requeued: nothing is lost,
and nothing is trained twice.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.launch.slurm import TEMPLATE
from deploy.run.run_dir import locate
from deploy.run.snapshot import RunSnapshot, take_snapshot
from protocol.messages import NodeState
from tests.ops.accounting import require_balanced
from tests.ops.slurm_cluster import Cluster, slurm
from tests.support.waiting import wait_until

STEPS, GROUPS = 150, 8
SMALL = ("run.id=ops", f"run.steps={STEPS}", f"run.groups_per_step={GROUPS}", "learner.checkpoint_every=5")
pytestmark = [pytest.mark.ops, pytest.mark.slow, pytest.mark.timeout(5400)]


class Run:
    """The run, as a user of a login node sees it."""

    def __init__(self, cluster: Cluster, config: Path, directory: Path, template: Path) -> None:
        self.cluster, self.config, self.directory, self.template = cluster, config, directory, template

    def foray(self, *argv: str) -> str:
        """Return the output of a command."""
        return self.cluster.run(sys.executable, "-m", "foray", *argv)

    def submit(self) -> str:
        """`foray submit`: a learner of two nodes, and two engines."""
        more = (f"launch.slurm.template={self.template}", "launch.slurm.nodes=2", "launch.engines=2")
        return self.foray("submit", str(self.config), *more)

    def scale(self, engines: int) -> str:
        """`foray scale`."""
        return self.foray("scale", str(self.directory), f"engines={engines}")

    def core(self) -> str:
        """Return what the launcher in the core job said."""
        return (self.directory / "logs" / "core.log").read_text(errors="replace")

    def seen(self) -> RunSnapshot:
        """Return what `foray status` reads; empty while there is no Redis."""
        try:
            found = locate(Namespace(given=[str(self.directory)], config=None))
        except Exception as error:  # the core has written no configuration yet
            return RunSnapshot("ops", "", error=str(error))
        return take_snapshot(found.redis_url, found.run.id)

    def ready(self) -> list[str]:
        """Return the engines that take requests."""
        return sorted(e.id for e in self.seen().engines if e.state is NodeState.READY)

    def steps(self) -> int:
        """Return the steps done."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def explain(self) -> str:
        """Return what there is to read when something does not happen."""
        logs = [f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in (self.directory / "logs").glob("*")]
        return "\n".join([*self.cluster.queue(), str(self.cluster.states()), *logs])


@pytest.fixture
def run(warm_model: Path, tmp_path: Path) -> Iterator[Run]:
    for program in ("slurmctld", "slurmd", "munged"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: `make test-ops` does that")
    directory = tmp_path / "run"
    prepare = [sys.executable, "-m", "foray", "demo", "--prepare-only", "--dir", str(directory)]
    subprocess.run([*prepare, "--model", str(warm_model), *SMALL], check=True, cwd=tmp_path, timeout=120)
    template = tmp_path / "site.sh"
    text = TEMPLATE.read_text().replace("host=$(hostname)", "host=127.0.0.1")
    text = text.replace("#CORE --time=24:00:00\n#CORE --cpus-per-task=8\n", "#CORE --exclusive\n")
    template.write_text(
        text.replace("#ENGINE --time=4:00:00\n#ENGINE --cpus-per-task=4\n", "#ENGINE --cpus-per-task=2\n")
    )
    with slurm(3) as cluster:
        yield Run(cluster, directory / "demo.yaml", directory, template)


def test_the_ring_trains_while_engines_nodes_and_the_core_come_and_go(run: Run) -> None:
    def wait(condition, what: str, seconds: float = 400) -> None:  # type: ignore[no-untyped-def]
        try:
            wait_until(condition, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{run.explain()}") from None

    assert "core: job" in run.submit()
    wait(lambda: run.steps() >= 3, "the first steps", 900)
    assert "4 requested" in run.scale(4)
    wait(lambda: len(run.ready()) == 4, "four engines", 600)
    assert "engines 3, 4: job" in run.core()
    run.scale(1)
    wait(lambda: run.ready() == ["engine-1"], "one engine")
    assert run.core().count(": drains") == 3 and "not asked through Redis" not in run.core()
    wait(lambda: len(run.cluster.queue()) == 2, "the jobs of the others have ended", 300)
    logs = [(run.directory / "logs" / f"engine-{number}.log").read_text() for number in (2, 3, 4)]
    assert not any("draining ended early" in log for log in logs)

    run.cluster.run("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    wait(lambda: not run.ready(), "the engine of the node is gone")
    run.cluster.run("scontrol", "update", "NodeName=n3", "State=RESUME")
    run.scale(2)
    wait(lambda: run.core().count(": job") == 2, "another engine is submitted")
    run.cluster.start_now("ops-engines")
    wait(lambda: run.ready() == ["engine-1", "engine-2"], "it came back, with another one")

    before = run.steps()
    (core,) = [line for line in run.cluster.run("squeue", "-h", "--format=%i %j").splitlines() if "core" in line]
    run.cluster.run("scontrol", "requeue", core.split()[0])
    wait(lambda: any("ops-core" in line and "PENDING" in line for line in run.cluster.queue()), "it is requeued", 120)
    run.cluster.start_now("ops-core")
    wait(lambda: run.steps() > before + 5, "steps of the second start", 900)
    assert run.ready() == ["engine-1", "engine-2"], "engines stayed and found the new Redis by its file"
    wait(lambda: run.steps() >= STEPS, "the last step", 1800)
    wait(lambda: not run.cluster.queue(), "the core ends the engines")
    counts, starts = require_balanced(run.directory, STEPS, GROUPS)
    assert starts >= 2, "the core has started twice"
    print(counts)
