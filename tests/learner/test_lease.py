"""One learner at a time, and a dead one is not waited for longer than need be."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from learner.delivery import lease as lease_module
from learner.delivery.lease import LearnerLease
from learner.delivery.store import RunStore
from protocol.errors import Fenced, UserError
from protocol.keys import Keys
from protocol.settings import RunSettings

Make = Callable[..., LearnerLease]


@pytest.fixture
def make(run: RunSettings, tmp_path: Path) -> Iterator[Make]:
    stores = []

    def lease(ttl_s: float = 30.0, folder: str = "epochs") -> LearnerLease:
        stores.append(RunStore(run.redis_url, run.id))
        stores[-1].prepare()
        return LearnerLease(stores[-1], ttl_s, tmp_path / folder)

    yield lease
    for store in stores:
        store.close()


def test_epochs_rise_above_redis_and_the_checkpoint(make: Make, db: redis.Redis) -> None:
    first = make()
    assert first.acquire(0) == 1
    first.release()
    assert make().acquire(6) == 7
    db.flushall()
    assert make().acquire(7) == 8


def test_an_epoch_is_never_used_twice_though_redis_rolled_back(make: Make, db: redis.Redis) -> None:
    assert make().acquire(0) == 1
    db.flushall()
    assert make().acquire(0) == 2, "a file on disk remembers epoch 1"


def test_an_epoch_that_was_skipped_is_not_used_later(
    make: Make, db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full_disk:
        full_disk.setattr(lease_module, "create_once", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        with pytest.raises(OSError, match="no space"):
            make(ttl_s=0.05).acquire(3)
    time.sleep(0.1)
    assert make(ttl_s=0.05).acquire(3) == 5
    db.flushall()
    later = make()
    assert later.acquire(3) == 6, "epoch 4 is free on disk, but 5 was there"
    later.confirm()


def test_a_redis_that_has_lost_its_functions_does_not_spoil_an_orderly_end(make: Make, db: redis.Redis) -> None:
    lease = make()
    lease.acquire(0)
    db.function_flush()
    lease.release()


@pytest.mark.fault(13)
def test_a_living_holder_is_not_disturbed(make: Make) -> None:
    holder, other = make(0.5), make(0.5)
    holder.acquire(0)
    begun = time.monotonic()
    now = time.strftime("%Y-%m-%d %H:", time.gmtime())
    words = (
        rf"run t1 is held by epoch 1, process {os.getpid()} on .*, since {now}.* renewed 0\.\d s ago, which is alive"
    )
    with pytest.raises(UserError, match=words) as caught:
        renewing(holder, lambda: other.acquire(0))
    assert f"kill {os.getpid()}" in caught.value.todo
    assert "--takeover" in caught.value.todo and time.monotonic() - begun < 5
    assert other.acquire(0, takeover=True) == 2
    with pytest.raises(Fenced):
        holder.renew()
    found = holder.superseded_by()
    assert found and found.token == other.token
    holder.release()
    other.renew()


def renewing(holder: LearnerLease, call: Callable[[], int], *, after: int = 0) -> None:
    """Call while the holder renews, from its epoch `after` on."""
    import threading

    stop = threading.Event()

    def keep() -> None:
        while not stop.wait(0.1):
            if holder.epoch >= after:
                holder.renew()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        call()
    finally:
        stop.set()
        thread.join()


def test_the_lease_of_a_lost_host_is_waited_for(make: Make, db: redis.Redis) -> None:
    dead, successor = make(0.6), make(0.6)
    dead.token = "elsewhere/pid4026:77:123:abc"
    dead.acquire(0)
    begun = time.monotonic()
    assert successor.acquire(0) == 2
    assert 0.2 < time.monotonic() - begun < 3


def test_a_holder_that_ended_on_this_machine_is_not_waited_for(make: Make) -> None:
    dead = make()
    dead.token = ended_here()
    dead.acquire(0)
    begun = time.monotonic()
    assert make().acquire(0) == 2
    assert time.monotonic() - begun < 2


def ended_here() -> str:
    """The token of a learner that has ended on this machine."""
    code = "from learner.delivery.lease import LearnerLease; print(LearnerLease(None, 1, None).token)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_learner_that_is_faster_than_the_one_that_saw_the_dead_holder_keeps_the_lease(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, faster, slower = make(0.5), make(0.5), make(0.5)
    dead.token = ended_here()
    dead.acquire(0)
    real = lease_module.has_ended

    def slow(token: str) -> bool:
        if found := real(token):
            monkeypatch.setattr(lease_module, "has_ended", real)
            assert faster.acquire(0) == 2, "between the two calls of the slower one"
        return found

    monkeypatch.setattr(lease_module, "has_ended", slow)
    with pytest.raises(UserError, match="is alive"):
        renewing(faster, lambda: slower.acquire(0), after=2)
    faster.renew()


def test_a_dead_holder_of_another_lineage_does_not_let_a_learner_in(make: Make, db: redis.Redis) -> None:
    dead, other = make(30), make(30)
    dead.token, other.lineage_id = ended_here(), "two"
    dead.acquire(0)
    real = other._store.acquire

    def acquire(*rest: Any, **more: Any) -> Any:
        if more.get("ended") or more["takeover"]:  # another run has claimed this Redis since the first call
            db.hset(Keys("t1").meta, "lineage_id", "one")
        return real(*rest, **more)

    other._store.acquire = acquire  # type: ignore[method-assign]
    with pytest.raises(UserError):
        other.acquire(0)


def test_a_living_learner_on_a_host_of_the_same_name_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    here, read = lease_module.place(), Path.read_text

    def elsewhere(path: Path, *rest: Any, **more: Any) -> str:
        return "another boot" if path.name == "boot_id" else read(path, *rest, **more)

    monkeypatch.setattr(Path, "read_text", elsewhere)  # its first namespace has the same number
    there = lease_module.place()
    monkeypatch.undo()
    assert there != here and there.split("/")[0] == here.split("/")[0]
    assert lease_module.has_ended(f"{here}:999999999:1:ab") and not lease_module.has_ended(f"{there}:999999999:1:ab")


def test_without_redis_the_epochs_on_disk_decide_who_may_commit(make: Make, tmp_path: Path, db: redis.Redis) -> None:
    lease = make()
    lease.acquire(0)
    lease.confirm()
    lease._store.close()
    lease._store = RunStore("redis://127.0.0.1:1/0", "t1")
    lease.confirm()
    (tmp_path / "epochs" / "e2").touch()
    with pytest.raises(Fenced, match=r"replaced by epoch 2, an unknown process, since 20\d\d-"):
        lease.confirm()


def test_a_lapsed_lease_is_reacquired_unless_another_learner_has_held_it(make: Make, db: redis.Redis) -> None:
    first, second = make(), make()
    first.acquire(0)
    assert not first.reacquire(), "it was ours all the time"
    db.delete(Keys("t1").lease)
    assert first.reacquire() and first.epoch == 2
    db.delete(Keys("t1").lease)
    second.acquire(0)
    with pytest.raises(Fenced, match=r"\(epoch 2, process \d+\) was replaced by epoch 3, .*renewed 0\.\d s ago"):
        first.reacquire()
    # The successor has come and gone, and Redis has forgotten even that.
    second.release()
    db.flushall()
    for call in (first.reacquire, first.confirm):
        with pytest.raises(Fenced, match=rf"replaced by epoch 3, process {os.getpid()} on .*, since 20"):
            call()
    assert first.epoch == 2 and not db.exists(Keys("t1").lease), "a fenced learner takes nothing"


def test_a_lapsed_lease_has_no_holder(make: Make, db: redis.Redis) -> None:
    lease = make()
    lease.acquire(0)
    db.delete(Keys("t1").lease)
    with pytest.raises(Fenced):
        lease.renew()
    assert lease.superseded_by() is None and lease.acquire(lease.epoch) == 2


def test_without_a_file_descriptor_the_end_of_a_learner_is_not_hidden_by_another_error(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    lease = make()
    lease.acquire(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
        assert lease.replaced() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "cannot check whether another learner took over" in caplog.text
