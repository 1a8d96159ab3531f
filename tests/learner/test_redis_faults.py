"""Redis fails in every way, and the learner goes on: each with a witness of the fault and one of the recovery."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.run.redis_server import find_server
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from protocol import events
from protocol.codec import decode_as
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.wire import Wire

KEYS = Keys("t1")
Serve = Callable[..., int]


def facts(run: RunSettings) -> dict[str, Any]:
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found is not None
    return found.facts


def assert_whole(run: RunSettings, *, extra: int = 0) -> dict[str, Any]:
    """Every step trained its batch, no seq twice; the accounting is consistent by seq and by token."""
    seqs = [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    made = facts(run)
    assert len(seqs) == len(set(seqs)) == run.steps * run.groups_per_step == made["ledger"]["counts"]["trained"]
    assert made["tokens"]["generated"] == sum(made["tokens"]["buckets"].values())
    return made


def kinds(db: redis.Redis) -> list[str]:
    return [events.parse(fields)["kind"] for _, fields in db.xrange(KEYS.events)]


def values(db: redis.Redis) -> MetricsSnapshot:
    return decode_as(MetricsSnapshot, db.get(KEYS.metrics("learner", "0")))


@contextmanager
def server(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis of the test's own at `folder/s`."""
    argv = [str(find_server().path), "--unixsocket", str(folder / "s"), "--dir", str(folder), "--port", "0"]
    argv += ["--save", "", *options]
    # restore_signals: off, so that SIGXFSZ stays ignored, and a file that may not grow is an error and not the end
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=folder, restore_signals=False)
    try:
        db = redis.Redis(unix_socket_path=str(folder / "s"))
        deadline = time.monotonic() + 20
        while True:
            assert child.poll() is None and time.monotonic() < deadline, "the private Redis did not start"
            try:
                db.ping()
                break
            except redis.RedisError:
                time.sleep(0.02)
        db.close()
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        child.wait(10)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("q")


@pytest.mark.fault(14)
def test_a_learner_cut_off_for_longer_than_its_lease_takes_it_again_and_loses_nothing(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis, redis_socket: str, ) -> None:  # fmt: skip
    with Wire(redis_socket) as link:
        run = run.model_copy(update={"redis_url": f"redis://127.0.0.1:{link.port}/0"})

        def part(updates: int) -> None:
            if updates == 4:
                link.cut()
                deadline = time.monotonic() + 20
                while db.exists(KEYS.lease):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                threading.Timer(0.3, link.restore).start()

        with tiny_learner.Player(address, run.id):
            assert serve(run, settings.model_copy(update={"lease_s": 0.6}), before=part) == 0
        assert link.broken >= 2 and link.refused >= 1
    made = assert_whole(run)
    assert made["lineage"][0] == [1, 0] and made["lineage"][-1][0] >= 2, "taken again, under a higher epoch"
    assert made["tally"]["lease_lapsed"] >= 1 and made["tally"]["state_lost"] == 0
    assert made["redis"]["lost"] == 0, "Redis was the same all the time: every token is accounted for"
    assert kinds(db).count("epoch") >= 2 and values(db).waits["redis"] > 0.1


@pytest.mark.fault(23, 24)
@pytest.mark.parametrize("kept", [True, False])
def test_a_redis_that_is_killed_is_waited_for_and_what_it_forgot_is_made_again(
    run: RunSettings, settings: LearnerSettings, serve: Serve, folder: Path, kept: bool
) -> None:
    options = ["--appendonly", "yes", "--appendfsync", "everysec"] if kept else []
    run = run.model_copy(update={"redis_url": f"unix://{folder / 's'}"})
    with ExitStack() as stack:
        first = stack.enter_context(server(folder, *options))

        def restart() -> None:
            time.sleep(0.3)
            stack.enter_context(server(folder, *options))

        back = threading.Thread(target=restart)

        def kill(updates: int) -> None:
            if updates == 4:
                first.kill()
                first.wait(10)
                back.start()

        with tiny_learner.Player({"unix_socket_path": str(folder / "s")}, run.id):
            assert serve(run, settings, before=kill) == 0
        back.join()
        assert first.returncode == -signal.SIGKILL
        db = redis.Redis(unix_socket_path=str(folder / "s"))
        made = assert_whole(run)
        assert values(db).waits["redis"] > 0.05
        # With its file the streams exist again; without it only the repair can recreate them.
        assert made["tally"]["state_lost"] == (0 if kept else 1) == kinds(db).count("state-lost")
        assert kept or made["redis"]["lost"] < 0, "it has forgotten what was received"
        db.close()


@pytest.mark.fault(25)
def test_at_maxmemory_leases_live_acknowledging_goes_on_and_nothing_is_lost(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    refused: list[str] = []

    def look() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(refused) < 3:
            try:
                db.set("x", "y")
            except redis.exceptions.OutOfMemoryError as error:
                refused.append(str(error))
            time.sleep(0.1)
        time.sleep(1.2)  # longer than a lease
        db.config_set("maxmemory", 0)

    relief = threading.Thread(target=look)

    def fill(updates: int) -> None:
        if updates == 3:
            db.config_set("maxmemory", "1mb")
            relief.start()

    with tiny_learner.Player(address, run.id):
        assert serve(run, settings.model_copy(update={"lease_s": 1.0}), before=fill) == 0
    relief.join()
    made = assert_whole(run)
    assert len(refused) == 3 and values(db).waits["data"] > 0.5, "no more groups came meanwhile"
    assert made["lineage"] == [[1, 0]], "renewing needs no memory"
    assert made["redis"]["lost"] == 0 and made["tally"]["state_lost"] == 0


@pytest.mark.slow
@pytest.mark.fault(26)
@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_a_redis_whose_disk_is_full_pauses_the_run_which_goes_on_when_there_is_room(
    run: RunSettings, settings: LearnerSettings, serve: Serve, folder: Path, fsync: str
) -> None:
    """RLIMIT_FSIZE simulates a full disk: Redis' append-only file may not grow, as on a device without room.

    With everysec Redis answers MISCONF to every write. With always it ends, and must be started again.
    """
    run = run.model_copy(update={"redis_url": f"unix://{folder / 's'}"})
    options = ["--appendonly", "yes", "--appendfsync", fsync, "--auto-aof-rewrite-percentage", "0"]
    seen: list[str] = []
    with ExitStack() as stack:
        first = stack.enter_context(server(folder, *options))
        db = redis.Redis(unix_socket_path=str(folder / "s"))

        def relieve() -> None:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not seen:
                try:
                    db.set("x", "y" * 1000)
                except redis.RedisError as error:
                    seen.append(f"{type(error).__name__} {error}")
                time.sleep(0.05)
            time.sleep(1.0)
            if fsync == "always":
                first.wait(20)
                stack.enter_context(server(folder, *options))
            else:
                size(first.pid, resource.RLIM_INFINITY)

        relief = threading.Thread(target=relieve)

        def fill(updates: int) -> None:
            if updates == 3:
                largest = max(p.stat().st_size for p in folder.rglob("*.aof"))
                size(first.pid, largest + 2000)
                relief.start()

        with tiny_learner.Player({"unix_socket_path": str(folder / "s")}, run.id):
            assert serve(run, settings, before=fill) == 0
        relief.join()
        assert seen and (fsync == "always" or "MISCONF" in seen[0]), seen
        assert values(db).waits["redis"] > 0.3
        assert_whole(run)
        db.close()


def size(pid: int, limit: int) -> None:
    """Sets the soft limit of the size of files that a process writes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.fault(28)
def test_a_redis_that_stands_still_is_waited_for_and_nothing_is_sent_twice(
    run: RunSettings, settings: LearnerSettings, serve: Serve, folder: Path
) -> None:
    run = run.model_copy(update={"redis_url": f"unix://{folder / 's'}"})
    stood: list[float] = []
    with server(folder) as child:

        def stop(updates: int) -> None:
            if updates == 4:
                child.send_signal(signal.SIGSTOP)
                begun = time.monotonic()

                def go_on() -> None:
                    child.send_signal(signal.SIGCONT)
                    stood.append(time.monotonic() - begun)

                threading.Timer(3.0, go_on).start()

        before = os.times()
        with tiny_learner.Player({"unix_socket_path": str(folder / "s")}, run.id):
            assert serve(run, settings.model_copy(update={"lease_s": 15}), before=stop) == 0
        after = os.times()
        db = redis.Redis(unix_socket_path=str(folder / "s"))
        made = assert_whole(run)
        assert stood and stood[0] >= 3.0
        assert made["tally"]["duplicates"] == made["tally"]["reissued"] == made["redis"]["lost"] == 0
        assert made["lineage"] == [[1, 0]] and int(db.hget(KEYS.tokens, "published")) == made["tokens"]["generated"]
        assert (after.user + after.system) - (before.user + before.system) < 3.0, "waiting does not spin"
        db.close()
