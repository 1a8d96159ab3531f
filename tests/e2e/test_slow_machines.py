"""A small run on slow, starved and loaded machines: no engine is killed, no group lost, none trained twice, it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foray.cli import main as foray
from foray.demo.warmstart import new_model, save_model
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from rollout_server.node.guard import descendants

GROUPS = 2
SLOW_ENGINE = Path(__file__).parents[1] / "support" / "slow_engine"
SLICE_S, SHARE = 1.0, 0.1
"""Period of the quota, and the share of it in which the processes run."""


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread meanwhile; it ends when its event is set."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def quota(root: int) -> Iterator[None]:
    """A CPU quota of 10 % for the processes below `root`, `root` included, by SIGSTOP and SIGCONT in turn."""

    def take_turns(over: threading.Event) -> None:
        while not over.is_set():
            pids = [root, *descendants(root)]
            send(pids, signal.SIGSTOP)
            over.wait(SLICE_S * (1 - SHARE))
            send([root, *descendants(root)], signal.SIGCONT)
            over.wait(SLICE_S * SHARE)

    with beside(take_turns):
        yield


@contextlib.contextmanager
def busy(root: int) -> Iterator[None]:
    """The learner at nice 19, beside one loop per core that computes for ever."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]

    def renice(over: threading.Event) -> None:
        while not over.wait(0.2):
            for pid in descendants(root):
                with contextlib.suppress(OSError):
                    if b"\0learner\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        for thread in os.listdir(f"/proc/{pid}/task"):
                            os.setpriority(os.PRIO_PROCESS, int(thread), 19)

    try:
        with beside(renice):
            yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def alone(_: int) -> Iterator[None]:
    yield


SHORT = ("rollout.episode.max_new_tokens=10", "rollout.episode.max_turns=2")
"""A turn of 10 tokens takes 80 s, with 64 s between two chunks of 8."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.fault(19)
@pytest.mark.parametrize(
    ("load", "step_s", "steps", "overrides"),
    [(quota, 0, 2, ()), (alone, 8, 1, SHORT), (busy, 0, 2, ())],
    ids=["a CPU quota of 10 %", "steps of 8 s", "a learner at nice 19"],
)
def test_a_slow_ring_loses_nothing_and_ends(
    load, step_s: int, steps: int, overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(new_model(0), tmp_path / "model")
    run_dir, out = tmp_path / "run", tmp_path / "out"
    small = (f"run.steps={steps}", f"run.groups_per_step={GROUPS}", "run.group_size=4", "learner.checkpoint_every=1")
    words = ["demo", "--prepare-only", "--dir", str(run_dir), "--model", str(tmp_path / "model"), *small, *overrides]
    assert foray(words) == 0
    path = os.pathsep.join([str(SLOW_ENGINE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "SLOW_STEP_S": str(step_s)}
    began = time.monotonic()
    with out.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml")],
            cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            with load(child.pid):
                ended = child.wait(1400)
        finally:
            send([child.pid, *descendants(child.pid)], signal.SIGCONT)
            child.terminate()
            child.wait(60)
    said = out.read_text()
    assert ended == 0, said
    checkpoint = Checkpoints(run_dir / "checkpoints", 2).load()
    assert checkpoint is not None
    counts = checkpoint.facts["ledger"]["counts"]
    groups = [entry.group.seq for entry in read_journal(run_dir / "journal", lineage=checkpoint.lineage)]
    nodes = list((run_dir / "logs").glob("engine-[0-9].log"))
    launches = sum(log.read_text().count("started the engine") for log in nodes)
    record = json.loads((run_dir / "run.json").read_text())
    seen = {
        "seconds": round(time.monotonic() - began),
        "engines killed": launches - len(nodes),
        "groups lost": sum(counts.get(kind, 0) for kind in ("dead", "stale")),
        "trained twice": len(groups) - len(set(groups)),
        "trained": counts["trained"],
        "restarts": record["restarts"],
    }
    with capsys.disabled():
        print(f"\n{seen}")
    assert (seen["engines killed"], seen["groups lost"], seen["trained twice"], seen["restarts"]) == (0, 0, 0, {}), seen
    assert counts["trained"] == steps * GROUPS, seen
