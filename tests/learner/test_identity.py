"""A run has a lineage id: what another run left under the same run id in Redis is refused, or taken over whole."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import redis

from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import read_journal
from learner.checkpoint.signing import SIGNATURE, run_key
from learner.config.learner import LearnerSettings
from learner.data.questions import load_questions
from learner.data.sampler import Sampler
from learner.delivery.identity import ensure_lineage_id
from protocol import events
from protocol.errors import ForayError, UserError
from protocol.keys import Keys
from protocol.run_meta import LINEAGE_FIELD, LINEAGE_FILE
from protocol.settings import RunSettings
from tests.support import tiny_learner

Serve = Callable[..., int]
Refusal = Callable[[RunSettings], UserError]
KEYS = Keys("t1")


def kept(db: redis.Redis) -> dict[str, Any]:
    """What a run has in Redis, but for the metrics of each second."""
    names = (
        KEYS.tasks,
        KEYS.traj,
        KEYS.issued,
        KEYS.epoch,
        KEYS.lease,
        KEYS.target,
        KEYS.meta,
        KEYS.tokens,
        KEYS.events,
    )
    return {name: db.dump(name) for name in names} | {"functions": db.function_list(withcode=True)}


def lineage(run: RunSettings) -> str:
    return (run.dir / LINEAGE_FILE).read_text().strip()


def other_directory(run: RunSettings, **more: Any) -> RunSettings:
    return run.model_copy(update={"dir": run.dir.parent / "other", **more})


@pytest.fixture
def begun(run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]) -> RunSettings:
    """A run that crashed in its sixth step: its checkpoint is of step 3, its tasks and trajectories are in Redis."""

    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    with tiny_learner.Player(address, run.id), pytest.raises(tiny_learner.Crash):
        serve(run, settings, before=die)
    return run


@pytest.fixture
def refusal(settings: LearnerSettings, serve: Serve) -> Refusal:
    """The error with which a start is refused, before it has trained anything."""

    def start(run: RunSettings) -> UserError:
        def die(updates: int) -> None:
            raise tiny_learner.Crash

        with pytest.raises((UserError, tiny_learner.Crash)) as ended:
            serve(run, settings, before=die)
        assert isinstance(ended.value, UserError), "it trains"
        return ended.value

    return start


def trains_to_the_end(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Serves to the end and returns the manifest: whole steps, every group once and of this run's own questions."""
    with tiny_learner.Player(address, run.id):
        assert serve(run, settings, **more) == 0
    trained = [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    assert len(trained) == len(set(trained)) == run.steps * run.groups_per_step
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found
    return found.facts


def test_a_new_directory_does_not_join_the_run_that_redis_holds(
    begun: RunSettings, refusal: Refusal, db: redis.Redis
) -> None:
    """`rm -rf runs/x` and start again, or a copied YAML: its seqs would be ours, unbounded by any credit."""
    before, fresh = kept(db), other_directory(begun)
    text = refusal(fresh).render()
    assert f"already holds another run named 't1' (lineage {lineage(begun)[:8]}, host " in text
    assert f"run.dir {begun.dir}" in text and "step 5" in text and "tasks up to seq" in text
    assert f"{fresh.dir}, lineage {lineage(fresh)[:8]}" in text, "and who is refused"
    assert "another run.id" in text and "--takeover" in text
    assert kept(db) == before, "nothing in Redis has changed"
    assert not (fresh.checkpoint_dir / "epochs").exists()


def test_a_learner_that_trains_is_not_fenced_by_one_of_another_lineage(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    refusal: Refusal,
    address: dict[str, Any],
) -> None:
    refusals: list[str] = []

    def intrude(updates: int) -> None:
        if updates == 4:
            refusals.append(str(refusal(other_directory(run))))

    facts = trains_to_the_end(run, settings, serve, address, before=intrude)
    assert facts["lineage"] == [[1, 0]] and facts[LINEAGE_FIELD] == lineage(run)
    assert len(refusals) == 1 and "held by epoch 1, process " in refusals[0]


def test_a_takeover_trains_nothing_of_the_run_it_replaces(
    begun: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    refusal: Refusal,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    db.sadd(KEYS.requeue, 1)
    assert db.xlen(KEYS.tasks) + db.xlen(KEYS.traj) > 0
    heir = other_directory(begun, seed=7)
    facts = trains_to_the_end(heir, settings, serve, address, takeover=True)
    own = Sampler(load_questions(settings.questions), heir.seed)
    groups = [entry.group for entry in read_journal(heir.dir / "journal")]
    assert [g.question for g in groups] == [own.question(g.seq) for g in groups]
    assert facts["tally"]["dead_letters"] == facts["tally"]["requeued"] == facts["tally"]["reissued"] == 0
    assert db.hget(KEYS.meta, LINEAGE_FIELD).decode() == lineage(heir) != lineage(begun)
    reported = [events.parse(fields)["text"] for _, fields in db.xrange(KEYS.events)]
    assert [text for text in reported if lineage(begun)[:8] in text], "the history says what was deleted"
    assert f"run.dir {heir.dir}" in str(refusal(begun))


def test_a_run_from_before_there_were_lineage_ids_is_adopted(
    begun: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    refusal: Refusal,
    address: dict[str, Any],
    db: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its Redis, checkpoint and directory as an older Foray leaves them."""
    db.hdel(KEYS.meta, LINEAGE_FIELD)
    (begun.dir / LINEAGE_FILE).unlink()
    for path in (begun.checkpoint_dir / "epochs").glob("*.issued"):
        path.unlink()
    (manifest,) = begun.checkpoint_dir.glob("step_3.*/manifest.json")
    facts = json.loads(manifest.read_text())
    del facts[LINEAGE_FIELD], facts[SIGNATURE]
    manifest.write_text(json.dumps(facts | {SIGNATURE: run_key(begun.dir, {}).sign(facts)}))
    assert "another run named 't1' (lineage unknown" in str(refusal(other_directory(begun)))
    with caplog.at_level(logging.INFO, "learner.delivery.identity"):
        with pytest.raises(TypeError):
            serve(begun, settings, no_such_setting=1)  # the engine fails before a task is issued
        after = trains_to_the_end(begun, settings, serve, address)
    assert after[LINEAGE_FIELD] == lineage(begun) == db.hget(KEYS.meta, LINEAGE_FIELD).decode()
    reported = [r.getMessage() for r in caplog.records]
    assert {text.split(" is from ")[0] for text in reported} == {"the checkpoint", "Redis' state"}
    assert all("assigning it to lineage" in text for text in reported)


def test_a_checkpoint_that_was_copied_from_another_run_is_refused_with_the_way_out(
    begun: RunSettings, refusal: Refusal, db: redis.Redis
) -> None:
    copy = other_directory(begun)
    ensure_lineage_id(copy)
    shutil.copytree(begun.checkpoint_dir, copy.checkpoint_dir)
    shutil.copy(begun.dir / "run.key", copy.dir)
    before = kept(db)
    error = refusal(copy)
    assert f"has lineage {lineage(begun)[:8]}, the run directory {lineage(copy)[:8]}" in str(error)
    assert "foray export" in error.todo and lineage(begun) in error.todo
    assert kept(db) == before


def test_a_lost_file_is_made_again_from_the_checkpoint_and_a_spoilt_one_is_refused(begun: RunSettings) -> None:
    was, path = lineage(begun), begun.dir / LINEAGE_FILE
    path.unlink()
    assert ensure_lineage_id(begun) == ensure_lineage_id(begun) == lineage(begun) == was
    path.write_text("not hex\n")
    with pytest.raises(UserError, match="cannot read the run's lineage id") as refused:
        ensure_lineage_id(begun)
    assert was in refused.value.todo


@pytest.mark.parametrize("older", [False, True])
def test_only_a_checkpoint_without_a_lineage_id_is_said_to_be_without(
    run: RunSettings, caplog: pytest.LogCaptureFixture, older: bool
) -> None:
    caplog.set_level(logging.INFO, "learner.delivery.identity")
    first = ensure_lineage_id(run)
    assert len(first) == 32 and not caplog.records, "there is no checkpoint"
    facts = {} if older else {LINEAGE_FIELD: first}
    checkpoints = Checkpoints(run.checkpoint_dir, 2, key=run_key(run.dir, {}))
    checkpoints.write(facts, step=1, epoch=1, lineage=[], save=lambda path: None, confirm=lambda: None)
    assert ensure_lineage_id(run) == first
    said = [r.getMessage() for r in caplog.records if r.name == "learner.delivery.identity"]
    wanted = f"the checkpoint is from a version without lineage ids; assigning it to lineage {first[:8]}"
    assert said == ([wanted] if older else [])


def test_a_count_beyond_what_this_directory_can_have_issued_stops_the_start(
    begun: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    refusal: Refusal,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    db.set(KEYS.issued, 20_000)
    error = refusal(begun)
    assert "of run t1 up to seq 20000, but" in str(error) and "none above 10" in str(error)
    assert "--takeover" in error.todo
    trains_to_the_end(begun, settings, serve, address, takeover=True)


def test_a_count_that_grows_during_the_run_is_ignored_and_reported(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It let the learner issue 20000 tasks at once, and record them."""

    def meddle(updates: int) -> None:
        if updates == 3:
            db.set(KEYS.issued, 20_000)

    with tiny_learner.Player(address, run.id) as player, suppress(ForayError):
        serve(run, settings, before=meddle)
    assert max(seq for seq, _ in player.seen) == 32 == int(db.get(KEYS.issued))
    assert len(tiny_learner.surviving(run.dir)) == run.steps
    (reported,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert reported.startswith(f"{KEYS.issued} in Redis is 20000, but this run can have issued at most ")
    assert [f for _, f in db.xrange(KEYS.events) if f[b"kind"] == b"issued-ignored"]


@pytest.mark.parametrize(
    ("lost", "words"),
    [(["checkpoints"], "has issued none above 0"), (["checkpoints", LINEAGE_FILE], "another run named 't1'")],
    ids=["checkpoints", "all"],
)
def test_a_directory_that_lost_its_checkpoints_does_not_take_the_old_tasks_for_its_own(
    begun: RunSettings, refusal: Refusal, db: redis.Redis, lost: list[str], words: str
) -> None:
    for name in lost:
        (begun.dir / name).rename(begun.dir / f"{name}.lost")
    before = kept(db)
    assert words in str(refusal(begun))
    assert kept(db) == before
