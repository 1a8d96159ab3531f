"""Print the messages that users see after faults: `python tests/chaos/messages.py [SITUATION ...]`.

Each situation uses real processes (the learner's `main`, the node's, `foray status`; a real Redis; a disk that is
really full) with a model of four numbers and a scripted engine, and prints their output and exit codes. A line without
a `$` was written by the process of the line above it. Times of day are removed from log lines. Exit code 1 if a process
ended otherwise than expected.

Processes are forked from this one, which has imported everything and has no threads.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from staging import LEASE_S, Stage, heavy, last_words, prepare, redis_in, small_disk

import learner.delivery.consumer
from foray import cli as foray
from learner.delivery.entry import StreamEntry
from protocol.codec import decode
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState
from rollout_server.node import cli as node_cli
from rollout_server.node import server as _serve  # noqa: F401 - imported before the forks
from tests.support.fake_engine import FakeServer, Fault
from tests.support.waiting import wait_until

LEARN = "python -m learner --config run.yaml"


def two_learners(stage: Stage) -> None:
    """A user starts a second learner while the first one trains; then with --takeover."""
    stage.player()
    first = stage.learner()
    stage.reaches(2)
    second = stage.learner()
    code = second.wait()
    stage.tell(
        f"{LEARN}                # process {first.pid} trains this run already", last_words(second.text), code, 2
    )
    third = stage.learner("--takeover")
    code = first.wait()
    stage.tell(f"{LEARN}                # process {first.pid}, after {third.pid} was started with --takeover",
               last_words(first.text), code, 75)  # fmt: skip


def woken(stage: Stage) -> None:
    """A learner is paused for longer than its lease; a successor takes over; the first one resumes."""
    stage.player()
    first = stage.learner()
    stage.reaches(3)
    first.send(signal.SIGSTOP)
    second = stage.learner()
    wait_until(lambda: stage.db.get(stage.keys.epoch) == b"2", f"the successor begins:\n{second.text[-2000:]}")
    before = stage.step()
    stage.reaches(before + 3)
    checkpoints = stage.run_dir / "checkpoints"
    wait_until(lambda: ".e2" in (checkpoints / "CURRENT").read_text(), "the successor commits a checkpoint")
    first.send(signal.SIGCONT)
    code = first.wait()
    why = f"stopped for longer than learner.lease_s={LEASE_S:g}, then woken"
    stage.tell(f"{LEARN}                # process {first.pid}, {why}", last_words(first.text), code, 75)
    litter = [p.name for p in checkpoints.glob(".step_*.e1.tmp")]
    if ".e2" not in (checkpoints / "CURRENT").read_text() or litter or second.poll() is not None:
        stage.failures.append(f"the woken learner touched the disk: {litter}, or ended its successor: {second.status}")


def half_loaded_engine(stage: Stage) -> None:
    """An engine fails in the middle of loading a version."""

    async def engine(path: Path) -> None:
        async with FakeServer() as server:
            why = "CUDA out of memory. Tried to allocate 1.02 GiB while loading model-00002-of-00004.safetensors"
            server.faults["/update_weights_from_disk"] = Fault(body={"success": False, "message": why})
            path.write_text(server.url)
            await asyncio.Event().wait()

    url = Path("engine.url").absolute()
    stage.fork("engine", lambda: asyncio.run(engine(url)))
    wait_until(lambda: url.exists() and url.read_text(), "the engine listens")
    stage.learner()
    stage.player()
    stage.reaches(1)
    argv = ["--config", "run.yaml", "engine.id=gpu-0", "engine.kind.type=attach", f"engine.kind.url={url.read_text()}"]
    node = stage.fork("node", lambda: node_cli.main([*argv, "engine.probe_s=0.2", "engine.drain_s=0.1"]))

    def quarantined() -> bool:
        raw = stage.db.hget(stage.keys.engine("gpu-0"), "b")
        found = decode(raw) if raw else None
        return isinstance(found, EngineInfo) and found.state is NodeState.QUARANTINED

    wait_until(quarantined, f"QUARANTINED; the node said:\n{node.text[-3000:]}")
    stage.status()


def poisoned_group(stage: Stage) -> None:
    """One trajectory group kills the learner each time it reads it, like a bug in a decoder."""
    whole = learner.delivery.consumer.read_entry

    def deadly(id_: bytes, fields: dict[bytes, bytes], run: str) -> StreamEntry:
        if fields[b"seq"] == b"9":
            os.kill(os.getpid(), signal.SIGSEGV)
            signal.pause()
        return whole(id_, fields, run)

    def fragile() -> None:
        learner.delivery.consumer.read_entry = deadly
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    stage.player()
    codes: list[int] = []
    while True:
        life = stage.learner(prepare=fragile)
        wait_until(
            lambda life=life: life.poll() is not None or "9) is unusable" in life.text, f"an end:\n{life.text[-2000:]}"
        )
        if life.status is None:
            break
        codes.append(life.status)
        assert codes == [-signal.SIGSEGV] * len(codes) and len(codes) < 9, life.text
    print(f"(started {len(codes) + 1} times, as a launcher would; it ended with {codes})\n")
    stage.tell(LEARN, last_words(life.text, "unusable"))
    letters = stage.fork("dlq", lambda: foray.main(["dlq", "list", "--config", "run.yaml"]))
    code = letters.wait()
    stage.tell("foray dlq list --config run.yaml", letters.text, code, 0)


def nan_step(stage: Stage) -> None:
    """The loss or a gradient is not finite: once, and then three times in a row."""
    calls: list[int] = []

    def verdict(updates: int) -> str:
        calls.append(updates)
        return "not finite" if len(calls) == 3 or updates >= 5 else ""

    stage.player()
    trains = stage.learner("learner.checkpoint_every=2", verdict=verdict)
    code = trains.wait()
    stage.tell(LEARN, last_words(trains.text), code, 65)
    kept = sorted(p.name for p in (stage.run_dir / "skipped").iterdir())
    goes_on_from = (stage.run_dir / "checkpoints" / "CURRENT").read_text()
    command = "ls runs/demo/skipped; cat runs/demo/checkpoints/CURRENT     # the evidence; what a start goes on from"
    stage.tell(command, f"{'  '.join(kept)}\n{goes_on_from}")


def redis_full(stage: Stage) -> None:
    """Redis reaches maxmemory: nothing is lost, and all processes wait for free memory."""
    stage.player()
    trains = stage.learner()
    stage.reaches(2)
    used = int(stage.db.info("memory")["used_memory"])
    stage.db.config_set("maxmemory", used // 2)
    wait_until(lambda: "Redis is full" in last_words(trains.text), f"the learner says so:\n{trains.text[-3000:]}")
    stage.tell(f"{LEARN}                # maxmemory is reached", last_words(trains.text))
    stage.status()
    stage.db.config_set("maxmemory", 0)
    before = stage.step()
    stage.reaches(before + 2)
    print(f"(with room again it went on by itself: step {stage.step()})\n")


def disk_full(stage: Stage) -> None:
    """No disk space for checkpoints: training continues, then no more tasks are issued. None for weights: it stops."""
    with small_disk(stage.run_dir / "checkpoints") as fill:
        stage.player()
        trains = stage.learner("learner.checkpoint_every=1", prepare=heavy, before=lambda n: n != 3 or fill())
        wait_until(lambda: "3 checkpoints failed" in trains.text, "three failures")
        wait_until(lambda: _failures(stage) >= 3, "they are reported")
        stage.tell(f"{LEARN}                # the disk of runs/demo/checkpoints is full", last_words(trains.text))
        stage.status()
        stage.clear()
    stage.db.flushall()
    shutil.rmtree(stage.run_dir)
    with small_disk(stage.run_dir / "weights") as fill:
        stage.player()
        trains = stage.learner(prepare=heavy, before=lambda n: n != 3 or fill())
        code = trains.wait()
        stage.tell(f"{LEARN}                # the disk of runs/demo/weights is full", last_words(trains.text), code, 2)


def _failures(stage: Stage) -> float:
    raw = stage.db.get(stage.keys.metrics("learner", "0"))
    found = decode(raw) if raw else None
    return found.values.get("checkpoint_failures", 0) if isinstance(found, MetricsSnapshot) else 0.0


SITUATIONS: dict[str, Callable[[Stage], None]] = {
    "two-learners": two_learners,
    "woken": woken,
    "half-loaded-engine": half_loaded_engine,
    "poisoned-group": poisoned_group,
    "nan-step": nan_step,
    "redis-full": redis_full,
    "disk-full": disk_full,
}


def play(names: list[str]) -> int:
    """Run the situations in order. Return 1 if one of them ended otherwise than expected."""
    home, failures = Path.cwd(), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foray-")))
        client = stack.enter_context(redis_in(folder))
        stack.callback(os.chdir, home)
        os.environ |= {"FORAY_REDIS_URL": f"unix://{folder / 's'}", "OMP_NUM_THREADS": "1"}
        for name in names:
            place = folder / name
            place.mkdir()
            prepare(place)
            os.chdir(place)
            client.flushall()
            stage = Stage(client)
            print(f"=== {name}: {(SITUATIONS[name].__doc__ or '').splitlines()[0]}\n", flush=True)
            try:
                SITUATIONS[name](stage)
            except AssertionError as error:
                stage.failures.append(str(error))
            finally:
                stage.clear()
            failures += [f"{name}: {failure}" for failure in stage.failures]
            sys.stdout.flush()
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *SITUATIONS], metavar="SITUATION", help=", ".join(SITUATIONS))
    return play(parser.parse_args().names or list(SITUATIONS))


if __name__ == "__main__":
    sys.exit(main())
