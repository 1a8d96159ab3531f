"""The learner, put together and run: lease, resume, publish, train, end.

training thread   loop.py: take groups -> train -> publish -> book -> checkpoint -> acknowledge
reader thread     source.py: stream entries -> buffered groups
keeper thread     keeper.py: renew the lease, issue tasks, reconcile, metrics
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from learner.checkpoint.checkpoint import STATE, Checkpoint, Checkpoints
from learner.checkpoint.journal import Journal, all_places, frames, rolled_back
from learner.checkpoint.signing import run_key
from learner.config.learner import LearnerSettings
from learner.context import Parts
from learner.data.filter import GroupFilter
from learner.data.questions import load_questions
from learner.data.replay_buffer import Mix, Trained, mix_count
from learner.data.sampler import Sampler
from learner.delivery.audit import Audit, CrossCheck
from learner.delivery.background import Alarm, IoLoop, Keeper
from learner.delivery.consumer import Source
from learner.delivery.dead_letters import Evidence, History
from learner.delivery.identity import own_lineage, stranger, take_over
from learner.delivery.issue_limit import Reserved
from learner.delivery.issuer import Issuer
from learner.delivery.lease import Lease
from learner.delivery.reconciler import Reconciler, Requests
from learner.delivery.state import Books
from learner.delivery.store import RunStore
from learner.interfaces import TrainEngine
from learner.loop import TrainingLoop
from learner.observability.metrics import Meter, StepLog
from learner.observability.metrics_server import page_of, serve_prometheus
from learner.observability.reporting import Teller, measure, meta_of, open_trackers, summary
from learner.weights import build_publisher
from protocol.codec import decode_as
from protocol.errors import Fenced, StateLost, UserError
from protocol.messages import MetricsSnapshot, TrajectoryGroup
from protocol.runtime.http.server import ThreadedServer
from protocol.runtime.lifecycle import DeferredShutdown, deferred_shutdown
from protocol.runtime.redis.errors import RedisFull, RedisUnavailable
from protocol.runtime.redis.memory_policy import eviction_refusal, unknown_policy
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

# Everything of the learner that tasks and groups go through, put together.


@dataclass(frozen=True)
class Delivery:
    """See each of them."""

    history: History
    group_filter: GroupFilter
    source: Source
    issuer: Issuer
    audit: Audit
    keeper: Keeper


def build_delivery(
    run: RunSettings,
    settings: LearnerSettings,
    sampler: Sampler,
    store: RunStore,
    lease: Lease,
    books: Books,
    meter: Meter,
    checkpoint: Checkpoint | None,
) -> Delivery:
    """From books that have been restored. checkpoint: the one they are from."""
    history, reserved = History(store), Reserved(lease.epochs_dir)
    group_filter = GroupFilter(settings.filtering, run.groups_per_step)
    source = Source(
        store,
        books,
        run.id,
        group_filter,
        room=settings.prefetch_steps * run.groups_per_step,
        max_attempts=settings.max_attempts,
        evidence=Evidence(store, run.dir / "dead_letters.jsonl"),
        history=history,
    )
    issuer, requests = Issuer(store, books, sampler, run, reserved, history), Requests(store, books, history)
    state, name = (checkpoint.facts.get("redis"), checkpoint.path.name) if checkpoint else (None, "")
    cross = CrossCheck(store, books, history, state=state, checkpoint=name)
    audit = Audit(store, books, history, requests, cross, meta_of(run, sampler, lease.lineage_id))
    keeper = Keeper(
        store,
        lease,
        issuer,
        Reconciler(store, books, source, history),
        requests,
        cross,
        meter,
        measure(run, books, lease, meter, audit),
        lease_s=settings.lease_s,
        reconcile_s=settings.reconcile_s,
    )
    return Delivery(history, group_filter, source, issuer, audit, keeper)


log = logging.getLogger(__name__)

REDIS_PATIENCE_S = 30.0

T = TypeVar("T")
MakeEngine = Callable[[RunSettings, LearnerSettings], TrainEngine]


def build_trainer(run: RunSettings, settings: LearnerSettings) -> TrainEngine:
    """The real train engine, of all ranks; imports torch and DeepSpeed."""
    from learner.trainer.distributed.leader import lead
    from learner.trainer.trainer import Trainer

    return lead(Trainer(run, settings, adapters=settings.publish.type == "adapter"))


def serve(
    run: RunSettings,
    settings: LearnerSettings,
    *,
    takeover: bool = False,
    trust_checkpoint: bool = False,
    make_engine: MakeEngine = build_trainer,
) -> int:
    """Trains to the end of the run, or until SIGTERM or SIGINT; 0 in both cases.

    trust_checkpoint  go on from a checkpoint that was not signed with the run's key
    Raises UserError, Fenced when another learner took over, ForayError when the books do not close.
    """
    sampler = Sampler(load_questions(settings.questions), run.seed)
    lineage_id = own_lineage(run)
    store = RunStore(run.redis_url, run.id)
    with deferred_shutdown() as stop:
        lease = Lease(store, settings.lease_s, run.checkpoint_dir / "epochs", lineage_id)
        reserved = Reserved(lease.epochs_dir)
        refusal = _reach(store, lambda: _evicting(store, run.redis_url))
        if refusal is None and not takeover:
            refusal = _reach(store, lambda: stranger(store, run, lineage_id, reserved))
        if refusal is not None:
            store.close()
            raise refusal
        _reach(store, store.prepare)
        key = run_key(run.dir, os.environ)
        checkpoints = Checkpoints(run.checkpoint_dir, settings.keep_checkpoints, key=key, trust=trust_checkpoint)
        _reach(store, lambda: lease.acquire(checkpoints.current_epoch(), takeover=takeover))
        parts: Parts | None = None
        try:
            if takeover:
                meta = meta_of(run, sampler, lineage_id).fields()
                if taken := _reach(store, lambda: take_over(store, run, lineage_id, reserved, meta)):
                    History(store).tell("takeover", f"what Redis held was deleted: {taken}")
            elif reserved.most() is None:  # issued by an older Foray: adopted once, later starts find it on disk
                reserved.cover(_reach(store, store.issued), lease.epoch)
            parts, lineage = assemble(run, settings, sampler, store, checkpoints, lease, make_engine)
            _train(parts, TrainingLoop(parts, lineage, stop.is_set), stop)
        except Fenced as error:
            History(store).tell("fenced", str(error))
            raise
        except BaseException:
            stop.deferred = True  # a second signal must not break off the tidying up
            lease.release()
            raise
        finally:
            (store if parts is None else parts).close()
    return 0


def assemble(
    run: RunSettings,
    settings: LearnerSettings,
    sampler: Sampler,
    store: RunStore,
    checkpoints: Checkpoints,
    lease: Lease,
    make_engine: MakeEngine,
) -> tuple[Parts, list[PolicyVersion]]:
    """All parts with the state of the last checkpoint, and the lineage. The lease is renewed from here on."""
    checkpoint = checkpoints.load()
    if checkpoint is not None and checkpoint.epoch >= lease.epoch:  # Redis rolled back while we waited
        _reach(store, lambda: lease.acquire(checkpoint.epoch))
    books, meter, alarm = Books(), Meter(), Alarm()
    if checkpoint is not None:
        _restore(books, checkpoint, run, sampler)
    trackers = open_trackers(run, settings, books.step, lease.epoch)
    delivery = build_delivery(run, settings, sampler, store, lease, books, meter, checkpoint)
    endpoint = _endpoint(run, settings, meter, delivery.keeper.snapshot)
    keeping = IoLoop("keeper", delivery.keeper.turn, alarm)
    keeping.start()
    try:
        engine = resumed_engine(make_engine, run, settings, checkpoint)
    except BaseException:
        keeping.stop()
        if endpoint is not None:
            endpoint.close()
        raise
    lineage = [*(checkpoint.lineage if checkpoint else ()), PolicyVersion(lease.epoch, books.step)]
    parts = Parts(
        run=run,
        settings=settings,
        store=store,
        books=books,
        history=delivery.history,
        audit=delivery.audit,
        meter=meter,
        alarm=alarm,
        lease=lease,
        sampler=sampler,
        checkpoints=checkpoints,
        issuer=delivery.issuer,
        source=delivery.source,
        group_filter=delivery.group_filter,
        keeper=delivery.keeper,
        engine=engine,
        publisher=build_publisher(settings.publish, run, engine.model_files, store),
        journal=Journal(run.dir / "journal", settings.journal_bytes) if settings.journal else None,
        skipped_journal=Journal(run.dir / "skipped"),
        teller=Teller(meter, StepLog(run.dir / "metrics.jsonl"), trackers, steps=run.steps),
        mix=_mix(run, settings, books.step, lineage),
        reader=IoLoop("reader", delivery.source.turn, alarm),
        keeping=keeping,
        endpoint=endpoint,
    )
    return parts, lineage


def _endpoint(
    run: RunSettings, settings: LearnerSettings, meter: Meter, snapshot: Callable[[], MetricsSnapshot]
) -> ThreadedServer | None:
    """Serve `/metrics`; its URL is logged and, as `metrics_url`, in the snapshots. Raises UserError as `serve_prometheus`."""
    if settings.metrics_port is None:
        return None
    page = page_of(run.id, snapshot, meter.histograms)
    endpoint = serve_prometheus(settings.metrics_host, settings.metrics_port, page.text)
    url = f"{endpoint.url}/metrics"
    log.info("metrics: %s", url)
    meter.say(metrics_url=url)
    return endpoint


def resumed_engine(
    make_engine: MakeEngine, run: RunSettings, settings: LearnerSettings, checkpoint: Checkpoint | None
) -> TrainEngine:
    """The train engine as the checkpoint has it, or with the initial weights where there is none."""
    engine = make_engine(run, settings)
    if checkpoint is not None:
        engine.load_state(checkpoint.path / STATE)
        checkpoint.confirm_unchanged()
    return engine


def _train(parts: Parts, loop: TrainingLoop, stop: DeferredShutdown) -> None:
    log.info("epoch %d begins at step %d of %d", parts.lease.epoch, parts.books.step, parts.run.steps)
    parts.history.tell("epoch", f"epoch {parts.lease.epoch} begins at step {parts.books.step} of {parts.run.steps}")
    stop.deferred = True
    try:
        loop.run()
        if stop.is_set():
            loop.interrupt()
            log.info("stopped at step %d; the same command goes on from there", parts.books.step)
        else:
            loop.finish()
            parts.meter.say(state="done")
            log.info("done: %s", summary(parts.books))
            parts.last_report()
    except RedisUnavailable:
        if not stop.is_set():
            raise
        loop.interrupt()
    parts.keeping.stop()
    parts.lease.release()


def _restore(books: Books, checkpoint: Checkpoint, run: RunSettings, sampler: Sampler) -> None:
    facts = checkpoint.facts
    if "replay" in facts:
        raise UserError(
            f"the checkpoint {checkpoint.path} is of a replay, which knows nothing of seqs",
            todo="give the run a run.dir of its own, and the replay's exported weights as run.model",
        )
    if facts["run"] != run.id:
        raise UserError(
            f"the checkpoint {checkpoint.path} is of run {facts['run']!r}, not of {run.id!r}",
            why="its seqs would be taken for ours",
            todo="give each run a run.dir of its own",
        )
    if facts["sampler"] != sampler.fingerprint:
        raise UserError(
            "the questions or run.seed are not those the run began with",
            why="seq n would mean another question than the one that was trained",
            todo="restore them, or start a new run with another run.id and run.dir",
        )
    books.restore(facts)
    if books.step > run.steps:
        raise UserError(f"run.steps is {run.steps} and the checkpoint has {books.step} steps", todo="raise run.steps")
    log.info("resuming from %s", checkpoint.path)


def _mix(run: RunSettings, settings: LearnerSettings, step: int, lineage: list[PolicyVersion]) -> Mix:
    """The mix as it was when the checkpoint of `step` was written: the journal has what was trained."""
    count = mix_count(settings.replay_mix.share, run.groups_per_step)
    if not count:
        return Mix(0, run.max_lag, run.seed)
    lately = range(step - run.max_lag + 1, step + 1)
    wanted = [p for p in all_places(run.dir / "journal") if p.step in lately and not rolled_back(p, lineage)]
    past = (Trained(place.step, decode_as(TrajectoryGroup, frame["b"])) for place, frame in frames(wanted))
    return Mix(count, run.max_lag, run.seed, past)


def _evicting(store: RunStore, url: str) -> UserError | None:
    """The error for a Redis that would throw away what it promised to keep."""
    policy = store.eviction_policy()
    if not policy:
        log.warning("%s", unknown_policy(url))
        return None
    return eviction_refusal(policy, url)


def _unreachable(store: RunStore, error: Exception) -> UserError:
    if not isinstance(error, RedisFull):
        return UserError(f"cannot reach Redis at {store.url}", why=str(error), todo="start it, or set run.redis_url")
    return UserError(
        f"the Redis at {store.url} is full: it takes neither the functions nor the streams of this run",
        why=f"it answers: {error}. Nothing is lost",
        todo="raise its maxmemory (CONFIG SET maxmemory 2gb; launch.redis_maxmemory_mb for one of our own), or remove "
        "what else it holds, then start again: it goes on from the checkpoint",
    )


def _reach(store: RunStore, call: Callable[[], T]) -> T:
    """Calls until Redis has answered, and makes it ready when it has lost its state; raises UserError when it stays
    away. `call` may be made again after a reply that never came.
    """
    deadline, told = 0.0, False
    while True:
        try:
            return call()
        except (RedisUnavailable, StateLost) as error:
            deadline = deadline or time.monotonic() + REDIS_PATIENCE_S
            if time.monotonic() >= deadline:
                raise _unreachable(store, error) from None
            if not told:
                log.warning("waiting for Redis at %s: %s", store.url, error)
            told = True
            time.sleep(0.3)
            if isinstance(error, StateLost):
                _reach(store, store.prepare)
