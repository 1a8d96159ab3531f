"""The learner's composition root: acquire the lease, resume, build the context, run the loop, end.

training thread     loop.py        take groups -> train -> journal -> publish -> settle -> checkpoint -> acknowledge
reader thread       consumer.py    stream entries -> buffered groups
lease thread        background.py  renew the lease, from its acquisition on
maintenance thread  background.py  issue tasks, reconcile, metrics
checkpoint thread   loop.py        write a snapshot of the state; the training thread commits it
validation thread   asking.py      ask the questions of a validation; the training thread reports the result
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TypeVar

from learner.checkpoint.checkpoint import STATE, Checkpoint, Checkpoints
from learner.checkpoint.journal import GroupJournal, all_locations, frames, rolled_back
from learner.checkpoint.resume import require_resumable, with_dtype
from learner.checkpoint.signing import run_key
from learner.config.learner import LearnerSettings
from learner.context import DeliveryServices, LearnerContext
from learner.data.filter import GroupFilter
from learner.data.questions import load_questions
from learner.data.replay_buffer import ReplayBuffer, ReplayedGroup, replay_count
from learner.data.sampler import Sampler
from learner.delivery.audit import AccountingAudit, RedisAudit
from learner.delivery.autoscale import Autoscaler
from learner.delivery.background import BackgroundLoop, ErrorSlot, LeaseRenewal, MaintenanceTask
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import LEARNER_ID, CrashRecord, DeadLetterStore, EventLog
from learner.delivery.identity import ensure_lineage_id, foreign_run_error, take_over
from learner.delivery.issue_limit import IssueReservation
from learner.delivery.issuer import TaskIssuer
from learner.delivery.lease import LearnerLease
from learner.delivery.reconciler import MissingSeqReconciler, RequeueRequests
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from learner.interfaces import TrainEngine
from learner.loop import TrainingLoop
from learner.observability.metrics import Meter, StepLog
from learner.observability.metrics_server import metrics_page, serve_prometheus
from learner.observability.reporting import StepReporter, open_trackers, run_meta, snapshot_source, summary
from learner.validation.results import ValidationFiles
from learner.validation.validator import Validator
from learner.weights import build_publisher
from protocol.codec import decode_as
from protocol.errors import Fenced, ForayError, StateLost, UserError
from protocol.ledger import Outcome
from protocol.messages import MetricsSnapshot, TrajectoryGroup
from protocol.runtime.http.auth import read_access
from protocol.runtime.http.server import ThreadedServer, reachable_url, service_host
from protocol.runtime.lifecycle import DeferredShutdown, deferred_shutdown
from protocol.runtime.redis.errors import RedisFull, RedisUnavailable
from protocol.runtime.redis.server import eviction_refusal, unknown_policy
from protocol.runtime.tracing import Tracer, build_tracer
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)

PREFETCH_STEPS = 2
"""Groups read ahead of training, in batches; the rest stays in Redis."""
REDIS_PATIENCE_S = 30.0
"""Seconds that a start waits for Redis."""

T = TypeVar("T")
MakeEngine = Callable[[RunSettings, LearnerSettings], TrainEngine]


def build_trainer(run: RunSettings, settings: LearnerSettings) -> TrainEngine:
    """Build the real train engine, over all ranks. Imports torch and DeepSpeed."""
    from learner.trainer.distributed.leader import lead
    from learner.trainer.distributed.worker import ranks, require_shared_folder
    from learner.trainer.trainer import Trainer

    if ranks()[1] > 1:
        require_shared_folder(run.checkpoint_dir, settings.model.dtype)
    return lead(Trainer(run, settings, adapters=settings.publish.type == "adapter"))


def serve(
    run: RunSettings,
    settings: LearnerSettings,
    *,
    takeover: bool = False,
    trust_checkpoint: bool = False,
    make_engine: MakeEngine = build_trainer,
) -> int:
    """Train to the end of the run and return 0, or until SIGTERM or SIGINT and return 128 + its number.

    takeover          take over the run from a learner that still holds it or has another lineage
    trust_checkpoint  resume from a checkpoint that is not signed with the run's key
    Raises UserError, Fenced if another learner took over, ForayError if the accounting is inconsistent.
    """
    settings = with_dtype(run, settings)
    sampler = Sampler(load_questions(settings.questions), run.seed)
    lineage_id = ensure_lineage_id(run)
    store = RunStore(run.redis_url, run.id)
    with deferred_shutdown() as stop:
        lease = LearnerLease(store, settings.lease_s, run.checkpoint_dir / "epochs", lineage_id)
        reserved = IssueReservation(lease.epochs_dir)
        refusal = _reach(store, lambda: _eviction_error(store, run.redis_url))
        if refusal is None and not takeover:
            refusal = _reach(store, lambda: foreign_run_error(store, run, lineage_id, reserved))
        if refusal is not None:
            store.close()
            raise refusal
        _reach(store, store.prepare)
        key = run_key(run.dir, os.environ)
        checkpoints = Checkpoints(run.checkpoint_dir, settings.keep_checkpoints, key=key, trust=trust_checkpoint)
        _reach(store, lambda: lease.acquire(checkpoints.current_epoch(), takeover=takeover))
        ctx: LearnerContext | None = None
        errors = ErrorSlot()
        renewal = BackgroundLoop("lease", LeaseRenewal(lease, settings.lease_s).tick, errors)
        renewal.start()
        try:
            if takeover:
                meta = run_meta(run, sampler, lineage_id).fields()
                if taken := _reach(store, lambda: take_over(store, run, lineage_id, reserved, meta)):
                    EventLog(store).emit("takeover", f"deleted the run's state in Redis: {taken}")
            elif reserved.highest() is None:  # issued by an older Foray: adopted once, later starts read it from disk
                reserved.reserve(_reach(store, store.issued), lease.epoch)
            ctx, lineage = build_context(run, settings, sampler, store, checkpoints, lease, errors, make_engine)
            code = _train(ctx, TrainingLoop(ctx, lineage, stop.is_set), stop)
        except BaseException as error:
            stop.deferred = True  # a second signal must not interrupt the shutdown
            _leave(store, lease, error)
            raise
        finally:
            renewal.stop()
            (store if ctx is None else ctx).close()
    return code


def _leave(store: RunStore, lease: LearnerLease, error: BaseException) -> None:
    """Release the lease after `error`. Raises Fenced, with the name of the other learner, if the error is its work.

    A successor removes files that its predecessor is writing: the predecessor may find out by an error of its disk, or
    by the checkpoint that the successor committed.
    """
    fenced = lease.replaced() or (error if isinstance(error, Fenced) else None)
    if fenced is None:
        lease.release()
        return
    EventLog(store).emit("fenced", str(fenced))
    if not isinstance(error, Fenced):
        log.warning("failed after another learner took over: %s", error)
    if fenced is not error:
        raise fenced from error


def build_delivery(
    run: RunSettings,
    settings: LearnerSettings,
    sampler: Sampler,
    store: RunStore,
    lease: LearnerLease,
    delivery: DeliveryState,
    meter: Meter,
    checkpoint: Checkpoint | None,
) -> DeliveryServices:
    """Build the services around the delivery state, restored from `checkpoint` if there is one."""
    event_log, reserved = EventLog(store), IssueReservation(lease.epochs_dir)
    crashes = CrashRecord(run.dir / "training.json")
    group_filter = GroupFilter(settings.filtering, run.groups_per_step)
    consumer = StreamConsumer(
        store,
        delivery,
        run.id,
        group_filter,
        capacity=PREFETCH_STEPS * run.groups_per_step,
        dead_letters=DeadLetterStore(store, run.dir / "dead_letters.jsonl"),
        event_log=event_log,
        crashes=crashes.of,
    )
    tracer = build_tracer(run, "learner", LEARNER_ID, lambda: lease.lineage_id)
    issuer = TaskIssuer(store, delivery, sampler, run, reserved, event_log, tracer)
    requests = RequeueRequests(store, delivery, event_log)
    state, name = (checkpoint.facts.get("redis"), checkpoint.path.name) if checkpoint else (None, "")
    redis_audit = RedisAudit(store, delivery, event_log, state=state, checkpoint=name)
    meta = run_meta(run, sampler, lease.lineage_id)
    audit = AccountingAudit(store, delivery, event_log, requests, redis_audit, meta)
    snapshot = snapshot_source(run, delivery, lease, meter, audit)
    autoscaler = Autoscaler((run.max_lag + 1) * run.groups_per_step * run.group_size)
    maintenance = MaintenanceTask(
        store,
        issuer,
        MissingSeqReconciler(store, delivery, consumer, event_log),
        requests,
        redis_audit,
        snapshot,
        reconcile_s=settings.reconcile_s,
        autoscale=lambda: meter.set(wanted_engines=autoscaler.look(store.look(snapshot()))),
    )
    return DeliveryServices(event_log, crashes, group_filter, consumer, issuer, audit, maintenance, tracer)


def build_context(
    run: RunSettings,
    settings: LearnerSettings,
    sampler: Sampler,
    store: RunStore,
    checkpoints: Checkpoints,
    lease: LearnerLease,
    errors: ErrorSlot,
    make_engine: MakeEngine,
) -> tuple[LearnerContext, list[PolicyVersion]]:
    """Build all parts with the state of the last checkpoint; return the context and the lineage."""
    checkpoint = checkpoints.load()
    if checkpoint is not None and checkpoint.epoch >= lease.epoch:  # Redis rolled back while we waited
        _reach(store, lambda: lease.acquire(checkpoint.epoch))
    delivery, meter = DeliveryState(), Meter()
    if checkpoint is not None:
        _restore(delivery, checkpoint, run, settings, sampler)
    services = build_delivery(run, settings, sampler, store, lease, delivery, meter, checkpoint)
    metrics_server = _metrics_server(run, settings, meter, services.maintenance.snapshot)
    maintainer = BackgroundLoop("maintenance", services.maintenance.tick, errors)
    maintainer.start()
    with ExitStack() as started:
        started.callback(maintainer.stop)
        started.callback(metrics_server.close if metrics_server is not None else lambda: None)
        reporter = started.enter_context(closing(_reporter(run, settings, meter, services.tracer, delivery, lease)))
        files = ValidationFiles(run.dir)
        validator = Validator(settings.eval, files, store, reporter, services.event_log, checkpoints.exists)
        checkpoints.kept = validator.kept
        engine = resumed_engine(make_engine, run, settings, checkpoint)
        started.pop_all()
    lineage = [*(checkpoint.lineage if checkpoint else ()), PolicyVersion(lease.epoch, delivery.step)]
    ctx = LearnerContext(
        **vars(services),
        run=run,
        settings=settings,
        store=store,
        delivery=delivery,
        meter=meter,
        errors=errors,
        lease=lease,
        sampler=sampler,
        checkpoints=checkpoints,
        engine=engine,
        publisher=build_publisher(settings.publish, run, engine.model_files, store, settings.model.lora),
        journal=GroupJournal(run.dir / "journal", settings.journal_bytes) if settings.journal else None,
        skipped_journal=GroupJournal(run.dir / "skipped"),
        reporter=reporter,
        validator=validator,
        replay_buffer=_replay_buffer(run, settings, delivery.step, lineage),
        reader=BackgroundLoop("reader", services.consumer.tick, errors),
        maintainer=maintainer,
        metrics_server=metrics_server,
    )
    return ctx, lineage


def _reporter(
    run: RunSettings,
    settings: LearnerSettings,
    meter: Meter,
    tracer: Tracer,
    delivery: DeliveryState,
    lease: LearnerLease,
) -> StepReporter:
    trackers = open_trackers(run, settings, delivery.step, lease.epoch)
    log_file = StepLog(run.dir / "metrics.jsonl")
    return StepReporter(meter, log_file, trackers, steps=run.steps, model=run.model, tracer=tracer)


def resumed_engine(
    make_engine: MakeEngine, run: RunSettings, settings: LearnerSettings, checkpoint: Checkpoint | None
) -> TrainEngine:
    """Build the train engine with the state of `checkpoint`, or with the initial weights if there is none."""
    engine = make_engine(run, settings)
    if checkpoint is not None:
        engine.load_state(checkpoint.path / STATE)
        checkpoint.confirm_unchanged()
    return engine


def _metrics_server(
    run: RunSettings, settings: LearnerSettings, meter: Meter, snapshot: Callable[[], MetricsSnapshot]
) -> ThreadedServer | None:
    """Serve `/metrics`, and write its address to the log and, as `url`, to the snapshots."""
    if settings.metrics_port is None:
        return None
    page = metrics_page(run.id, snapshot, meter.histograms)
    host = service_host(settings.metrics_host, run.redis_url, read_access(os.environ), "learner.metrics_host")
    server = serve_prometheus(host, settings.metrics_port, page.text)
    log.info("metrics: %s/metrics", server.url)
    meter.set_text(url=reachable_url(host, server.port, run.redis_url))
    return server


def _restore(
    delivery: DeliveryState, checkpoint: Checkpoint, run: RunSettings, settings: LearnerSettings, sampler: Sampler
) -> None:
    require_resumable(checkpoint.facts, str(checkpoint.path), run, settings, sampler.fingerprint)
    delivery.restore(checkpoint.facts)
    log.info("resuming from %s", checkpoint.path)


def _replay_buffer(
    run: RunSettings, settings: LearnerSettings, step: int, lineage: list[PolicyVersion]
) -> ReplayBuffer:
    """Build the buffer as of the checkpoint of `step`, from the journal."""
    count = replay_count(settings.replay_mix.share, run.groups_per_step)
    if not count:
        return ReplayBuffer(0, run.max_lag, run.seed)
    recent = range(step - run.max_lag + 1, step + 1)
    wanted = [p for p in all_locations(run.dir / "journal") if p.step in recent and not rolled_back(p, lineage)]
    past = (ReplayedGroup(location.step, decode_as(TrajectoryGroup, frame["b"])) for location, frame in frames(wanted))
    return ReplayBuffer(count, run.max_lag, run.seed, past)


def _train(ctx: LearnerContext, loop: TrainingLoop, stop: DeferredShutdown) -> int:
    """Train, write the last checkpoint and release the lease. Return the exit code: 0 if the run is done."""
    log.info("epoch %d begins at step %d of %d", ctx.lease.epoch, ctx.delivery.step, ctx.run.steps)
    ctx.event_log.emit("epoch", f"epoch {ctx.lease.epoch} begins at step {ctx.delivery.step} of {ctx.run.steps}")
    stop.deferred, code = True, 0
    try:
        loop.run()
        if stop.is_set():
            code = stop.exit_code
            _interrupt(loop)
            log.info("stopped at step %d; run the same command to continue", ctx.delivery.step)
        else:
            _finish(ctx, loop, stop)
            ctx.meter.set_text(state="done")
            log.info("done: %s", summary(ctx.delivery))
            ctx.report_metrics()
    except RedisUnavailable:
        if not stop.is_set():
            raise
        code = stop.exit_code
        _interrupt(loop)
    finally:
        ctx.validator.close()
        loop.writer.keep_written()
    ctx.maintainer.stop()
    ctx.lease.release()
    return code


def _interrupt(loop: TrainingLoop) -> None:
    """Write a checkpoint before the end, so that no step is repeated. Raises ForayError if it cannot be written."""
    try:
        if not loop.writer.persist():
            step, current = loop.ctx.delivery.step, loop.writer.step
            raise ForayError(f"stopped at step {step} without a checkpoint of it: that of step {current} is current")
    except RedisUnavailable as error:
        log.warning("Redis is unavailable; trained groups will be acknowledged after the next start: %s", error)


def _finish(ctx: LearnerContext, loop: TrainingLoop, stop: DeferredShutdown) -> None:
    """Write the last checkpoint and announce the end. Raises ForayError if the accounting is inconsistent."""
    retry = loop.recovery.retry_until_available
    ctx.reader.stop()  # from here only this thread changes the delivery state
    ctx.issuer.enabled.clear()
    with ctx.delivery.lock:
        # The maintenance thread may have seen the issuer enabled, and may still honour a request.
        ctx.delivery.finished = True
        excess = ctx.delivery.in_flight()
    if excess and (ctx.lease.epoch > 1 or ctx.delivery.counters.requeued):
        # Issued by a predecessor to replace seqs that it had settled but the checkpoint does not contain, or issued
        # again on request: the steps were completed without them.
        log.info("%d excess seqs will not be trained: settled as filtered", len(excess))
        ctx.delivery.settle(excess, Outcome.FILTERED, "excess", tokens=ctx.consumer.drain())
        ctx.delivery.counters.excess += len(excess)
    if ctx.delivery.has_uncommitted() and not loop.writer.persist(stop.is_set):
        raise UserError("the last checkpoint could not be written", todo="free disk space and start again")
    retry(lambda: loop.announcer.announce("done"))
    if problem := retry(ctx.audit.problem):
        ctx.event_log.emit("inconsistent", f"the accounting is not consistent: {problem}")
        raise ForayError(f"the accounting is not consistent: {problem}")
    settled = ctx.delivery.ledger.settled
    ctx.event_log.emit("done", f"done: {ctx.delivery.step} steps, {settled} seqs, the accounting is consistent")


def _eviction_error(store: RunStore, url: str) -> UserError | None:
    """Return the error for a Redis that may evict keys of the run."""
    policy = store.eviction_policy()
    if not policy:
        log.warning("%s", unknown_policy(url))
        return None
    return eviction_refusal(policy, url)


def _unreachable(store: RunStore, error: Exception) -> UserError:
    if not isinstance(error, RedisFull):
        return UserError(f"cannot reach Redis at {store.url}", why=str(error), todo="start Redis, or set run.redis_url")
    return UserError(
        f"the Redis at {store.url} is full: it refuses the functions and streams of this run",
        why=f"Redis answers: {error}. Nothing is lost",
        todo="raise its maxmemory (CONFIG SET maxmemory 2gb; launch.redis_maxmemory_mb for one that Foray starts), "
        "or remove other data from it, then start again: the run resumes from the checkpoint",
    )


def _reach(store: RunStore, call: Callable[[], T]) -> T:
    """Repeat `call` until Redis answers, recreating lost state. Raises UserError after REDIS_PATIENCE_S.

    `call` may be repeated after a lost reply.
    """
    deadline, already_logged = 0.0, False
    while True:
        try:
            return call()
        except (RedisUnavailable, StateLost) as error:
            deadline = deadline or time.monotonic() + REDIS_PATIENCE_S
            if time.monotonic() >= deadline:
                raise _unreachable(store, error) from None
            if not already_logged:
                log.warning("waiting for Redis at %s: %s", store.url, error)
            already_logged = True
            time.sleep(0.3)
            if isinstance(error, StateLost):
                _reach(store, store.prepare)
