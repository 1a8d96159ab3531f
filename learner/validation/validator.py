"""Validation during training: when it is due, what is reported, and which checkpoint is the best.

A validation runs in a separate thread and uses the run's rollout servers; the training thread only begins it and
collects its result. It needs the version that was just published, so it is asked for before the next one is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from learner.background_call import BackgroundCall
from learner.config.questions import QuestionSource
from learner.config.validation import ValidationSettings
from learner.data.questions import load_questions
from learner.delivery.dead_letters import EventLog
from learner.observability.reporting import StepReporter
from learner.validation import results
from learner.validation.asking import Asking, RunLink, ValidationLost
from protocol.errors import UserError
from protocol.messages import Question, WeightUpdate
from protocol.runtime.episodes import Episode
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)

RETRIES = 10
"""A lost validation is repeated after this part of the steps between two."""


def load_suites(settings: ValidationSettings) -> results.Suites:
    """Return the questions of each data set of the suites. Raises UserError for an unreadable file, or if two suites
    have one name or a suite two questions with one id."""
    found: dict[str, tuple[Question, ...]] = {}
    for suite in settings.suites:
        sets: dict[str, list[Question]] = {}
        for question in load_questions([QuestionSource(path=suite.path)]).questions:
            sets.setdefault(suite.name or question.source, []).append(question)
        if twice := found.keys() & sets.keys():
            raise UserError(f"two of learner.eval.suites are named {min(twice)!r}", todo="give each a different `name`")
        found |= {name: tuple(questions[: suite.limit]) for name, questions in sets.items()}
    for name, questions in found.items():
        if len({question.id for question in questions}) < len(questions):
            raise UserError(
                f"two questions of the validation suite {name!r} have one id", todo="give each question its own id"
            )
    return found


class Validator:
    """Begins, collects and reports validations. All calls come from the training thread.

    Raises UserError as `load_suites` does.

    exists   whether a checkpoint of this name was committed and not removed since
    needed   the version whose weights must be kept
    writing  returns the name of the checkpoint that is being written, "" without one
    """

    def __init__(
        self,
        settings: ValidationSettings,
        files: results.ValidationFiles,
        link: RunLink,
        reporter: StepReporter,
        event_log: EventLog,
        exists: Callable[[str], bool] = bool,
    ) -> None:
        self._settings, self._suites, self._files, self._link = settings, load_suites(settings), files, link
        self._reporter, self._event_log, self._exists = reporter, event_log, exists
        self.writing: Callable[[], str] = str
        self._records: list[results.Record] = files.records() if self._suites else []
        self._stopping = threading.Event()
        self._call: BackgroundCall[list[Episode]] | None = None
        self._policy: results.ValidatedPolicy | None = None
        self._began_at = 0.0
        self._validated = -1
        """Step of the last policy that was validated, or began to be."""
        self._retry_at: int | None = None
        """Step at which a validation is due because the last one was lost."""
        self.needed: PolicyVersion | None = None
        self._show()

    @property
    def running(self) -> bool:
        """Return whether a validation is in progress, or not collected yet."""
        return self._call is not None

    def resume(self, checkpoint: str, step: int) -> bool:
        """Return whether the policy that this start resumed from has to be validated: its own validation was
        interrupted, or that of a policy that is lost.

        checkpoint  its name, "" for the initial model
        step        its step
        """
        if not self._suites:
            return False
        name, left = checkpoint or results.INITIAL, self._files.unfinished()
        for other in set(left) - {name}:
            self._files.discard(other)
        if any(record["name"] == name for record in self._records):
            self._validated = step
            return False
        return bool(left) or (not checkpoint and self._settings.at_start)

    def due(self, step: int, steps: int) -> bool:
        """Return whether the policy after `step` of `steps` has to be validated now. Reports it if that is impossible
        because another validation is in progress."""
        settings, last = self._settings, step == steps
        if not self._suites or step == self._validated:
            return False
        if not (last or step % settings.every == 0 or (self._retry_at is not None and step >= self._retry_at)):
            return False
        if self.running and not last:
            self._lost(f"step {step} is not validated: the validation of step {self._validated} is in progress")
        return not self.running

    @property
    def wants_checkpoint(self) -> bool:
        """Return whether a validated policy needs a checkpoint, because the best one is kept."""
        return bool(self._settings.best)

    def begin(self, update: WeightUpdate, checkpoint: str) -> None:
        """Begin the validation of `update`, or continue it. `checkpoint` is the name of its checkpoint, "" if it has
        none. No other validation is in progress."""
        version = update.version
        name = checkpoint or (results.INITIAL if version.step == 0 else f"step_{version.step}.e{version.epoch}")
        policy = results.ValidatedPolicy(name, version.step, version.epoch, version.label, checkpoint)
        asking = Asking(
            *(policy, update, self._suites, self._settings, self._link, self._files, self._stopping),
            progress=partial(self._reporter.validating, version.step),
        )
        self._policy, self._began_at, self.needed = policy, time.monotonic(), version
        self._validated, self._retry_at = version.step, None
        self._call = BackgroundCall("validation", asking.run)

    def close(self) -> None:
        """End a validation that is in progress; the next start continues it."""
        self._stopping.set()

    def collect(self, step: int) -> None:
        """Report a validation that has ended; `step` is the learner's."""
        if self._call is None or not self._call.ended:
            return
        policy = self._policy
        assert policy is not None
        if policy.checkpoint and policy.checkpoint == self.writing():
            return  # it may fail: the result may not name it before it is committed
        call, self._call, self.needed = self._call, None, None
        if not self._exists(policy.checkpoint):
            policy = replace(policy, checkpoint="")
        try:
            episodes = call.result()
            self._finish(policy, episodes, step)
        except (ValidationLost, UserError, OSError) as error:
            if isinstance(error, ValidationLost):
                self._retry_at = step + max(1, self._settings.every // RETRIES)
            self._lost(f"step {policy.step} is not validated: {error}")
            self._files.discard(policy.name)
        finally:
            self._reporter.validating(policy.step, 0, 0)

    def kept(self) -> set[str]:
        """Return the names of checkpoints to keep: the best one, and that of the validation in progress."""
        running = {self._policy.checkpoint} if self._call is not None and self._policy is not None else set()
        best = self._best()
        return (running | ({best["checkpoint"]} if best else set())) - {""}

    def _best(self) -> results.Record | None:
        there = [r for r in self._records if r["name"] == results.INITIAL or self._exists(r["checkpoint"])]
        return results.best_of(there, self._settings.best) if self._settings.best else None

    def _finish(self, policy: results.ValidatedPolicy, episodes: list[Episode], step: int) -> None:
        by_suite: dict[str, list[Episode]] = {name: [] for name in self._suites}
        for episode in episodes:
            by_suite[episode["suite"]].append(episode)
        record: results.Record = {
            **vars(policy),
            "seconds": round(time.monotonic() - self._began_at, 3),
            "suites": {name: results.suite_means(self._suites[name], found) for name, found in by_suite.items()},
        }
        self._files.add(record)
        self._records = self._files.records()
        text = results.describe(record)
        self._event_log.emit("validated", text)
        self._reporter.validated(step, record["step"], text, record["suites"])
        self._show()

    def _show(self) -> None:
        """Show the last result and the best one in the learner's snapshots."""
        if self._records:
            last, best = self._records[-1], self._best()
            text = results.describe(last)
            if best is not None:
                value, where = results.overall(best, self._settings.best), best["checkpoint"] or "the initial model"
                text += f"; best {self._settings.best} {value:.3f} at step {best['step']} ({where})"
            self._reporter.show_validation(last["step"], text, last["suites"])

    def _lost(self, why: str) -> None:
        log.warning("%s", why)
        self._event_log.emit("validation-lost", why)
