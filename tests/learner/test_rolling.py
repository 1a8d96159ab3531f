"""Rolling upgrades, as the learner sees them: rollout servers older and newer than itself, at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from learner.delivery.entry import read_entry
from protocol import functions
from protocol.codec import checksum, decode, pack
from protocol.header import read_header, seal
from protocol.keys import Keys
from protocol.messages import GroupFailed, Task, TrajectoryGroup
from protocol.runtime.redis.server import function_library
from protocol.settings import RunSettings
from tests.support import tiny_learner

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.fault(31, 52)
@pytest.mark.parametrize("kind", ["group", "failed"])
def test_an_entry_in_the_bytes_of_schema_1_0_is_read(kind: str) -> None:
    body = (GOLDEN / f"v1.0-{kind}.msgpack").read_bytes()
    message = decode(body)
    assert isinstance(message, TrajectoryGroup | GroupFailed)
    header = read_header(seal(message)[0]).model_copy(update={"crc": checksum(body), "num_bytes": len(body)})
    fields = {b"seq": str(message.seq).encode(), b"h": pack(header.model_dump()), b"b": body}
    entry = read_entry(b"1-1", fields, message.run)
    assert entry.message.seq == message.seq and entry.counted == 0, "and its token count is unknown"


@pytest.mark.fault(31, 52)
def test_rollout_servers_of_an_older_and_a_newer_minor_serve_one_learner(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Callable[..., int],
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    """The player publishes as servers did before tokens were counted: two keys, four arguments. Of its messages every
    second is of schema 1.0 (what came later is not in it), the others of a 1.9 with unknown fields.
    """
    minors: list[int] = []

    def another_minor(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        envelope = msgpack.unpackb(body, raw=False)
        minors.append(0 if task.seq % 2 else 9)
        envelope["v"] = [1, minors[-1]]
        for trajectory in envelope["body"]["trajectories"]:
            for segment in trajectory["segments"]:
                if minors[-1]:
                    segment["colour"] = "red"
                else:
                    del segment["tool"], segment["reward"]
        changed = msgpack.packb(envelope, use_bin_type=True)
        facts = msgpack.unpackb(header, raw=False) | {"crc": checksum(changed), "num_bytes": len(changed)}
        return pack(facts | ({"colour": "red"} if minors[-1] else {})), changed

    with tiny_learner.Player(address, run.id, spoil=another_minor) as player:
        assert serve(run, settings) == 0
    facts = Checkpoints(run.checkpoint_dir, 2).load().facts
    assert facts["ledger"]["counts"] == {"trained": 32, "filtered": 0, "stale": 0, "dead": 0}
    assert set(minors) == {0, 9} and player.replies["published"] == 32
    assert not (run.dir / "dead_letters.jsonl").exists()


@pytest.mark.fault(52)
def test_both_ways_of_publishing_may_be_used_at_once(db: redis.Redis) -> None:
    keys = Keys("t1")
    db.function_load(function_library(), replace=True)
    for stream, group in ((keys.tasks, "rollout"), (keys.traj, "learner")):
        db.xgroup_create(stream, group, "0", mkstream=True)
    tasks = [db.xadd(keys.tasks, {"seq": seq, "b": b"-"}) for seq in (1, 2)]
    db.xreadgroup("rollout", "c", {keys.tasks: ">"})
    db.fcall(functions.PUBLISH, 2, keys.tasks, keys.traj, tasks[0], 1, b"h", b"b")
    db.fcall(functions.PUBLISH, 3, keys.tasks, keys.traj, keys.tokens, tasks[1], 2, b"h", b"b", 17)
    assert [fields[b"t"] for _, fields in db.xrange(keys.traj)] == [b"0", b"17"]
    assert db.hgetall(keys.tokens) == {b"published": b"17"}
