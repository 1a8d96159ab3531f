"""The data of one run for all pages: snapshot, steps, index, groups, accounting. Methods block."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from http.client import HTTPException
from typing import Any

from deploy.run.redis_server import connect
from deploy.run.run_dir import Located, read_record
from deploy.run.snapshot import RunSnapshot, read_ledger
from foray.dashboard.conversation import GroupView
from foray.dashboard.files import StepFile, read_evaluations
from foray.dashboard.filters import parse_filter, read_ages, read_facets, read_page
from foray.dashboard.index import TrajectoryIndex
from foray.watch.dead_letter_pages import as_json
from foray.watch.dead_letters import Fates, read_letters
from foray.watch.findings import diagnose
from foray.watch.records import find_tokenizer, read_lineage
from foray.watch.status import look, problems, seq_balance, to_json
from foray.watch.top import Looks, waits_in_words
from foray.watch.transcript import Decoder
from learner.data.token_values import read_token_values
from learner.validation.results import ValidationFiles
from protocol import events
from protocol.codec import number_of
from protocol.errors import ForayError, UserError
from protocol.keys import Keys
from protocol.runtime.http.client import ask, read_json
from protocol.versions import PolicyVersion, is_orphan

log = logging.getLogger(__name__)

FRESH_S = 1.0
"""A snapshot is shared by all requests for this long."""
DIAGNOSED_S = 30.0
"""A diagnosis, which decodes the newest groups, is shared for this long."""
ANSWER_S = 2.0
LETTERS = 500
"""Number of the newest dead letters to list."""


class RunData:
    """What the dashboard shows of the run `found`. Safe to use from several threads."""

    def __init__(self, found: Located) -> None:
        self._found, self.directory = found, found.directory
        self.index = TrajectoryIndex(found.directory)
        self.steps = StepFile(found.directory / "metrics.jsonl")
        self._looks, self._looking = Looks(), threading.Lock()
        self._seen: tuple[float, RunSnapshot, list[str]] | None = None
        self._reading, self._diagnosing = threading.Lock(), threading.Lock()
        self._diagnosed: tuple[float, dict[str, Any]] | None = None

    @property
    def found(self) -> Located:
        """Return the run. A restart may have given it another Redis."""
        self._found = self._found.refreshed()
        return self._found

    def snapshot(self) -> tuple[RunSnapshot, list[str]]:
        """Return a snapshot that is at most FRESH_S old, and its wait times as sentences."""
        with self._looking:
            if self._seen is None or time.monotonic() - self._seen[0] > FRESH_S:
                snapshot = look(self.found)
                waits = waits_in_words(snapshot, self._looks.before(snapshot)) if snapshot.processes else []
                self._seen = (time.monotonic(), snapshot, waits)
            return self._seen[1:]

    def urls(self, process: str) -> list[str]:
        """Return the addresses of a kind of process (`Located.urls`)."""
        return self.found.urls(self.snapshot()[0], process)

    def read_steps(self) -> None:
        """Read the steps that `metrics.jsonl` has gained since the last call."""
        with self._reading:
            self.steps.update()

    def overview(self) -> dict[str, Any]:
        """Return the page of `foray status --json` and what only the dashboard shows."""
        self.read_steps()
        snapshot, waits = self.snapshot()
        evaluates = [f"evaluations running: {snapshot.evaluations}"] if snapshot.evaluations else []
        return to_json(snapshot, max_lag=self.found.run.max_lag) | {
            "waits": waits,
            "evaluation_lines": [*evaluates, *(f"{name} {line}" for name, line in snapshot.validations.items())],
            "max_lag": self.found.run.max_lag,
            "steps": self.found.run.steps,
            "last": self.steps.last,
            "names": self.steps.names(),
            "is_over": snapshot.is_over,
            "again": snapshot.again,
            "failure": str(read_record(self.directory).get("failure", "")),
            "directory": str(self.directory),
            "device_price": float(self.found.record.get("device_price", 0.0)),
            "index": self.index.progress,
            "conserved": seq_balance(snapshot).source,
        }

    def problems(self) -> list[dict[str, str]]:
        """Return the problems of the newest snapshot, the worst first."""
        found = problems(self.snapshot()[0], max_lag=self.found.run.max_lag)
        return [{"what": problem.what, "todo": problem.todo} for problem in found]

    def diagnosis(self) -> dict[str, Any]:
        """Return what `foray diagnose --no-corpus` finds, at most DIAGNOSED_S old."""
        with self._diagnosing:
            if self._diagnosed is None or time.monotonic() - self._diagnosed[0] > DIAGNOSED_S:
                self._diagnosed = (time.monotonic(), diagnose(self.found))
            return self._diagnosed[1]

    def curves(self, names: list[str]) -> dict[str, Any]:
        """Return columns of `metrics.jsonl`."""
        self.read_steps()
        with self._reading:
            return self.steps.curves(names)

    def page(self, query: dict[str, str]) -> dict[str, Any]:
        """Return a page of the table of trajectories. Raises UserError for an invalid filter."""
        wanted = parse_filter(query)
        with self.index.reading() as db:
            return read_page(db, wanted, self.lineage())

    def facets(self) -> dict[str, Any]:
        """Return what the table can be filtered by."""
        with self.index.reading() as db:
            return read_facets(db)

    def ages(self) -> dict[str, Any]:
        """Return the lag of tokens and groups."""
        with self.index.reading() as db:
            return read_ages(db)

    def lineage(self) -> tuple[PolicyVersion, ...]:
        """Return the first version of each learner start, from the last checkpoint."""
        try:
            return read_lineage(self.directory)
        except ForayError as error:
            log.warning("%s", error)
            return ()

    def group(self, seq: int, epoch: int | None = None) -> GroupView:
        """Read a group as it was trained last, or by the learner of `epoch`. Raises UserError if it is not there."""
        with self.index.reading() as db:
            row = db.execute(
                "SELECT id FROM groups WHERE seq = ? AND (? IS NULL OR epoch = ?) ORDER BY epoch DESC, id DESC LIMIT 1",
                (seq, epoch, epoch),
            ).fetchone()
        read = self.index.group(row["id"]) if row is not None else None
        if read is None:
            raise UserError(
                f"no trained group of seq {seq} was found",
                why="the journal records groups when they are trained, and may drop old ones (learner.journal_max_gb)",
                todo="look for it among the dead letters, or wait until it is trained",
            )
        location, group = read
        limit = self.found.run.max_lag
        return GroupView(group, location.step, location.epoch, self.tokenizer, self.lineage(), limit)

    def group_page(self, seq: int, epoch: int | None) -> dict[str, Any]:
        """Return a group with the life of its question, and the other times that the question was asked."""
        view = self.group(seq, epoch)
        with self.index.reading() as db:
            others = db.execute(
                "SELECT seq, epoch, step, reward FROM groups WHERE question_id = ? ORDER BY step, id LIMIT 200",
                (view.group.question.id,),
            ).fetchall()
            around = db.execute(
                "SELECT (SELECT max(seq) FROM groups WHERE seq < ?) AS previous, "
                "(SELECT min(seq) FROM groups WHERE seq > ?) AS next",
                (seq, seq),
            ).fetchone()
        return view.to_json() | {"life": view.life(), "asked": [dict(row) for row in others]} | dict(around)

    def tokens(self, view: GroupView, place: int) -> dict[str, Any]:
        """Return the tokens of a trajectory, with what the learner computed for them if it was kept."""
        rolled_back = is_orphan(PolicyVersion(view.epoch, view.step), view.lineage)  # its step was made again
        values = {} if rolled_back else read_token_values(self.directory, view.step, view.group.seq, place)
        return {"segments": view.tokens(place, values)}

    @cached_property
    def tokenizer(self) -> Decoder | None:
        """Return the run's tokenizer; None if it is not found: the page then shows ids."""
        try:
            return find_tokenizer(self.directory, None, self.found.run)
        except UserError as error:
            log.warning("%s", error.what)
            return None

    def letters(self) -> dict[str, Any]:
        """Return the newest dead letters and the failed seqs, from Redis or, if it does not answer, from the files."""
        import redis

        ledger = read_ledger(self.directory)
        run = self.found.run.id
        if self.found.redis_url and not self.snapshot()[0].error:
            with connect(self.found.redis_url, timeout_s=3.0) as client:
                try:
                    raw: Any = client.smembers(Keys(run).requeue)
                    letters = read_letters(client, run, self.directory, bodies=False)
                    fates = Fates(ledger, frozenset(seq for member in raw if (seq := number_of(member))))
                    return as_json(run, letters[-LETTERS:], fates)
                except (redis.RedisError, OSError) as error:
                    log.warning("reading dead letters from files: %s", error)
        return as_json(run, read_letters(None, run, self.directory, bodies=False)[-LETTERS:], Fates(ledger))

    def retrievers(self) -> list[dict[str, Any]]:
        """Return what each registered retriever says about itself; `error` if it does not answer."""
        urls = self.urls("retriever")

        def info(url: str) -> dict[str, Any]:
            began = time.monotonic()
            try:
                with ask(f"{url}/info", "viewer", timeout_s=ANSWER_S) as answer:
                    return {"url": url, "error": "", "info": read_json(answer), "seconds": time.monotonic() - began}
            except (OSError, HTTPException, ValueError) as error:
                return {"url": url, "error": str(error), "info": {}, "seconds": None}

        with ThreadPoolExecutor(max(1, min(8, len(urls)))) as pool:
            return list(pool.map(info, urls))

    def drain(self, engine: str) -> dict[str, Any]:
        """Ask a registered engine to drain. Raises UserError if there is none, or if Redis refuses the request."""
        import redis

        known = [info.id for info in self.snapshot()[0].engines]
        if engine not in known:
            raise UserError(f"no engine {engine[:80]!r} is registered", todo=f"known: {', '.join(known) or 'none'}")
        keys = Keys(self.found.run.id)
        entry: Any = events.fields("operator", "dashboard", "drain-asked", f"engine {engine}")
        with connect(self.found.redis_url, timeout_s=3.0) as client:
            try:
                client.sadd(keys.drain, engine)
                client.xadd(keys.events, entry, maxlen=events.MOST, approximate=True)
            except redis.RedisError as error:
                todo = "start the dashboard with the Redis user `operator`"
                raise UserError(f"Redis refused the request: {error}", todo=todo) from None
        return {"engine": engine, "asked": True}

    def evaluations(self) -> dict[str, Any]:
        """Return validations during training and results of `foray eval` for this run."""
        return {"validations": ValidationFiles(self.directory).records(), "results": read_evaluations(self.directory)}
