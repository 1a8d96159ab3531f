"""Ask the questions of a validation on the run's rollout servers, at one policy version. Runs in its own thread."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from learner.config.validation import ValidationSettings
from learner.validation.results import Suites, ValidatedPolicy, ValidationFiles
from protocol.errors import ForayError, UserError
from protocol.messages import EngineInfo, Question, WeightUpdate
from protocol.runtime.episodes import Episode, NoServer, evaluate, is_failed
from protocol.runtime.redis.errors import RedisUnavailable

log = logging.getLogger(__name__)

PATIENCE_S = 900.0
"""Seconds without a further episode after which a validation is given up."""
PAUSE_S = 1.0
ROUNDS = 3
"""Times that questions are asked whose episodes the infrastructure failed."""
KEY_S = 3600.0
"""Lifetime in Redis of the version under validation; renewed with each request."""


class ValidationLost(ForayError):
    """The validation cannot be finished: engines hold later versions, or no server takes it."""


class ValidationStopped(ForayError):
    """The learner stops."""


class RunLink(Protocol):
    """The run in Redis, as a validation needs it; implemented by `RunStore`. Raises RedisUnavailable."""

    def engines(self) -> list[EngineInfo]:
        """Return engines whose registration is alive."""

    def rollout_urls(self) -> list[str]:
        """Return the addresses of the rollout servers."""

    def validate(self, update: WeightUpdate, ttl_s: float) -> None:
        """Let engines load `update` after a later version was announced."""


class Asking:
    """One validation, from its first request to its last episode.

    policy    what is validated
    update    its version, as announced
    stopping  set when the learner stops
    progress  called with the number of episodes that have ended, and of all
    """

    def __init__(
        self,
        policy: ValidatedPolicy,
        update: WeightUpdate,
        suites: Suites,
        settings: ValidationSettings,
        link: RunLink,
        files: ValidationFiles,
        stopping: threading.Event,
        progress: Callable[[int, int], None],
    ) -> None:
        self._policy, self._update, self._settings, self._link = policy, update, settings, link
        self._files, self._stopping, self._progress = files, stopping, progress
        pairs = [(suite, question) for suite, questions in suites.items() for question in questions]
        # ids are unique within one suite only
        self._of = {str(number): pair for number, pair in enumerate(pairs)}
        self._number = {(suite, question.id): number for number, (suite, question) in self._of.items()}
        self._questions = [q.model_copy(update={"id": number}) for number, (_, q) in self._of.items()]
        self._reported = ""

    def run(self) -> list[Episode]:
        """Return the episodes of all questions; failed ones are among them after ROUNDS attempts.

        Episodes have `suite`, and `question_id` as in the suite. Raises ValidationLost, ValidationStopped, OSError, and
        UserError if a server refuses this learner.
        """
        kept = self._stored()
        with self._files.path(self._policy.name).open("a", encoding="utf-8") as file:

            def each(episode: Episode) -> None:
                if self._stopping.is_set():
                    raise ValidationStopped("the learner stops")
                if episode.get("version", "") not in ("", self._policy.version):
                    log.warning("an episode was sampled at %s: it is asked again", episode["version"])
                    episode["status"] = "stale"
                kept.append(episode)
                file.write(json.dumps(self._as_row(episode)) + "\n")
                file.flush()
                self._progress(self._complete(kept), len(self._questions) * self._settings.n)

            self._ask_all(kept, each)
        return [self._as_row(episode) for episode in self._last_of(kept)]

    def _ask_all(self, kept: list[Episode], each: Callable[[Episode], None]) -> None:
        rounds, moved_at, complete = 0, time.monotonic(), self._complete(kept)
        while (open_ := self._open(kept)) and rounds < ROUNDS:
            before = len(kept)
            ended = self._ask(open_, each)
            if self._complete(kept) > complete:
                moved_at, complete = time.monotonic(), self._complete(kept)
            rounds += ended and len(kept) > before
            if not ended:
                self._check_version()
                if time.monotonic() > moved_at + PATIENCE_S:
                    raise ValidationLost(f"no episode ended within {PATIENCE_S:g} s: {self._reported}")
                if self._stopping.wait(PAUSE_S):
                    raise ValidationStopped("the learner stops")

    def _ask(self, questions: list[Question], each: Callable[[Episode], None]) -> bool:
        """Ask one server after the other. Return whether one has answered all of `questions`."""
        try:
            self._link.validate(self._update, KEY_S)
            urls = self._link.rollout_urls()
        except RedisUnavailable as error:
            self._report(f"Redis: {error}")
            return False
        if not urls:
            self._report("no rollout server is running")
        for url in urls:
            try:
                evaluate(
                    url,
                    questions,
                    n=self._settings.n,
                    temperature=self._settings.temperature,
                    concurrency=self._settings.concurrency,
                    version=self._policy.version,
                    each=each,
                )
            except ValidationStopped:
                raise
            except NoServer as error:
                self._report(f"{error.what}: {error.why}")
            except UserError:
                raise
            except ForayError as error:
                self._report(str(error))
            else:
                return True
        return False

    def _check_version(self) -> None:
        """Raise ValidationLost if no engine can serve the version any more."""
        try:
            engines = self._link.engines()
        except RedisUnavailable:
            return
        serving = [e for e in engines if e.role == "eval"] or engines
        if serving and all(e.version > self._update.version for e in serving):
            raise ValidationLost(f"the engines hold later versions than {self._policy.version}")

    def _report(self, why: str) -> None:
        if why != self._reported:
            log.warning("the validation of step %d waits: %s", self._policy.step, why)
            self._reported = why

    def _stored(self) -> list[Episode]:
        """Return the episodes of an interrupted attempt, with the numbers of their questions."""
        found = []
        for row in self._files.episodes(self._policy.name):
            number = self._number.get((row["suite"], row["question_id"]))
            if number is not None:
                found.append({**row, "question_id": number})
        return found

    def _as_row(self, episode: Episode) -> Episode:
        suite, question = self._of[episode["question_id"]]
        return {**episode, "suite": suite, "question_id": question.id}

    def _last_of(self, kept: list[Episode]) -> list[Episode]:
        """Return one episode per question and index: the first that did not fail, else the last."""
        found: dict[tuple[str, int], Episode] = {}
        for episode in kept:
            key = episode["question_id"], int(episode["index"])
            if key not in found or is_failed(found[key]):
                found[key] = episode
        return list(found.values())

    def _complete(self, kept: list[Episode]) -> int:
        return sum(not is_failed(episode) for episode in self._last_of(kept))

    def _open(self, kept: list[Episode]) -> list[Question]:
        counts = Counter(e["question_id"] for e in self._last_of(kept) if not is_failed(e))
        return [question for question in self._questions if counts[question.id] < self._settings.n]
