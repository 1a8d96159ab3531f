"""Engines join, are killed, hang and leave while they generate: nothing is lost, no other process is restarted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from by_hand import Shells
from elastic import Watcher, read_routes, rollout_values, send, tree_of, wait_until_busy, wrong_routes

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from protocol.keys import Keys
from protocol.ledger import Ledger
from protocol.messages import NodeState
from tests.support.waiting import wait_until

STEPS, GROUPS, LAG = 40, 8, 2
LOST = (NodeState.SUSPECT, NodeState.QUARANTINED)
"""Found hanging; the second when that was in the middle of a weight update."""
QUICK = ("engine.hang_s=2", "engine.probe_s=0.5", "engine.drain_s=10", "engine.heartbeat_s=1", "engine.lease_s=4")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.fault(5, 19)
def test_engines_join_die_hang_and_leave_while_they_generate(warm_model: Path, tmp_path: Path) -> None:
    run_dir, began = tmp_path / "elastic", time.monotonic()
    small = (
        "run.id=demo",
        f"run.steps={STEPS}",
        f"run.groups_per_step={GROUPS}",
        f"run.max_lag={LAG}",
        "learner.checkpoint_every=5",
    )
    prepare = [sys.executable, "-m", "foray", "demo", "--prepare-only", "--dir", str(run_dir)]
    subprocess.run([*prepare, "--model", str(warm_model), *small], check=True, cwd=tmp_path, timeout=60)
    keys, routes = Keys("demo"), tmp_path / "routes.jsonl"
    events: list[str] = []

    def note(what: str) -> None:
        events.append(f"{time.monotonic() - began:6.1f} s  {what}")

    with Shells(tmp_path, run_dir / "demo.yaml") as shells:
        port = shells.redis_url.rsplit(":", 1)[1].split("/")[0]
        shells.start("redis", "-m", "foray", "redis", "--port", port, "--dir", str(tmp_path / "redis"))
        wait_until(lambda: answers(shells), "Redis answers", 20)
        shells.process("retriever", "retriever")
        journal = (f"rollout.journal_routes={routes}", "rollout.id=r", "rollout.stream_interval=1")
        shells.process("rollout", "rollout_server", *journal)
        engine(shells, "a")
        learner = shells.process("learner", "learner")
        others = {name: shells.children[name].pid for name in ("redis", "retriever", "rollout", "learner")}
        with Watcher(shells, keys) as watcher:
            wait_until(lambda: takes_part(shells, keys, "a"), "one engine", 60)
            engine(shells, "b")
            engine(shells, "c")
            wait_until(lambda: all(takes_part(shells, keys, name) for name in "abc"), "three engines", 90)
            note("b and c have joined")

            running = wait_until_busy(shells, keys, "b", running=4)
            send(tree_of(shells.children["b"].pid), signal.SIGKILL)
            note(f"b is killed, node and engine, with {running} requests running")
            running = wait_until_busy(shells, keys, "a", running=4)
            born = shells.engines(keys)["a"].incarnation
            send(tree_of(shells.children["a"].pid)[1:], signal.SIGSTOP)
            note(f"a's engine is stopped, with {running} requests running")
            wait_until(lambda: shells.engines(keys)["a"].state in LOST, "the hang is found", 90)
            note(f"a is {shells.engines(keys)['a'].state}")
            wait_until(lambda: takes_part(shells, keys, "a", not_before=born), "a new engine", 60)
            note("a is ready again, restarted by its node")
            running = wait_until_busy(shells, keys, "c", running=4)
            send([shells.children["c"].pid], signal.SIGTERM)
            note(f"c is stopped with {running} requests running")
            wait_until(lambda: shells.children["c"].poll() is not None, "c leaves", 40)
            assert shells.children["c"].returncode == 0, shells.log("c")[-3000:]
            note("c has left")

            wait_until(lambda: learner.poll() is not None, "the learner ends", 150)
            note("the learner has ended")
            values = rollout_values(shells, keys, "r")
            assert learner.returncode == 0, shells.log("learner")[-3000:]
            alive = {name: shells.children[name].poll() for name in ("redis", "retriever", "rollout", "a")}
            assert alive == dict.fromkeys(alive), "no other process has ended"
            assert {name: shells.children[name].pid for name in others} == others
        logs = {name: shells.log(name) for name in ("rollout", "learner", "a", "b", "c")}

    checkpoint = Checkpoints(run_dir / "checkpoints", 2).load()
    assert checkpoint is not None and checkpoint.facts["step"] == STEPS and len(checkpoint.lineage) == 1
    ledger = Ledger.from_state(checkpoint.facts["ledger"])
    counts = {str(outcome): number for outcome, number in ledger.counts.items()}
    # issued = trained + filtered + stale, by seq, without a gap; trajectories survive the death of an engine
    assert counts["trained"] == STEPS * GROUPS and counts["dead"] == 0
    assert ledger.watermark == sum(counts.values()) and not ledger.above
    entries = list(read_journal(run_dir / "journal", lineage=checkpoint.lineage))
    assert Counter(entry.group.seq for entry in entries).most_common(1)[0][1] == 1
    trajectories = [t for entry in entries for t in entry.group.trajectories]
    ends = Counter(str(t.status) for t in trajectories)
    assert len(trajectories) == STEPS * GROUPS * 8 and ends["failed"] == 0, ends

    sent = read_routes(routes)
    assert not (wrong := wrong_routes(sent, watcher, LAG)), "\n".join(wrong[:10])
    used = Counter(route["engine"] for route in sent)
    assert set(used) == set("abc") and len({r["incarnation"] for r in sent if r["engine"] == "a"}) == 2
    assert values["failovers"] > 0 and values["tokens_continued"] > 0, values
    assert "hung" in logs["a"] and "Traceback" not in "".join(logs.values())
    print("\n".join(events))
    print(f"{len(sent)} requests, by engine {dict(used)}; ends {dict(ends)}; ledger {counts}")
    print(f"failovers {values['failovers']}, tokens saved by continuation {values['tokens_continued']}")
    print({name: n for name, n in sorted(values.items()) if name.startswith(("engine_", "tokens_"))})


def engine(shells: Shells, name: str) -> None:
    shells.process(name, "rollout_server.node", f"engine.id={name}", *QUICK)


def answers(shells: Shells) -> bool:
    from redis import RedisError

    try:
        with shells.client() as client:
            return bool(client.ping())
    except RedisError:
        return False


def takes_part(shells: Shells, keys: Keys, name: str, *, not_before: str = "") -> bool:
    """READY at a version of the learner's, in another incarnation than `not_before`."""
    info = shells.engines(keys).get(name)
    return info is not None and info.state is NodeState.READY and info.epoch >= 1 and info.incarnation != not_before
