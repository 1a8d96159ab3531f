"""A train engine of four numbers, a rollout server of one thread, and a learner process made of them.

Run as a program it is a whole learner with the tiny engine: `python -m tests.support.tiny_learner --config FILE`.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import torch
from redis.backoff import NoBackoff
from redis.retry import Retry

from learner.algorithms import build_algorithm
from learner.config.learner import LearnerSettings
from learner.data.batch import Batch
from protocol import functions
from protocol.codec import decode_as
from protocol.errors import ProtocolError
from protocol.header import read_header, seal
from protocol.keys import TASK_GROUP, Keys
from protocol.messages import GroupFailed, Task, WeightUpdate
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.messages import make_group


class Crash(Exception):
    """The learner dies here."""


@dataclass
class TinyReport:
    loss: float
    tokens_trained: int
    metrics: dict[str, float]
    grad_norm: float = 1.0
    skipped: bool = False
    reason: str = ""
    seconds: float = 0.0
    minibatches: int | None = None


class TinyEngine:
    """Adds up what it is trained on: the same batches in the same order give the same weights.

    before  called with the number of updates so far, before each; may raise
    verdict called likewise; a text means that the step is skipped for that reason
    """

    def __init__(
        self,
        run: RunSettings,
        settings: LearnerSettings,
        before: Callable[[int], None] = lambda n: None,
        verdict: Callable[[int], str] = lambda n: "",
        pace_s: float = 0.0,
    ) -> None:
        self.algorithm = build_algorithm(settings.algorithm)
        self.model_files = sorted(p for p in run.model.iterdir() if p.suffix == ".json")
        self.weights = torch.zeros(4)
        self.world_size = 1
        self.updates = 0
        self._before, self._verdict, self._pace_s = before, verdict, pace_s

    def train(self, batch: Batch) -> TinyReport:
        self._before(self.updates)
        time.sleep(self._pace_s)
        reason = "" if batch.num_tokens else "no tokens"
        if reason := self._verdict(self.updates) or reason:
            return TinyReport(0.0, 0, dict(batch.stats), skipped=True, reason=reason)
        self.updates += 1
        self.algorithm.after_update()
        for micro in batch.micro_batches:
            self.weights += torch.tensor([1.0, micro.targets.sum(), micro.advantages.sum(), micro.token_weights.sum()])
        return TinyReport(0.5, batch.num_tokens, dict(batch.stats))

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        yield "weights", self.weights
        yield "tied", self.weights

    def save_state(self, directory: Path) -> None:
        (directory / "tiny.json").write_text(json.dumps([self.updates, *self.weights.tolist()]))

    def snapshot_state(self, directory: Path) -> Callable[[], None]:
        frozen = copy.copy(self)
        frozen.weights = self.weights.clone()
        return lambda: frozen.save_state(directory)

    def load_state(self, directory: Path) -> None:
        self.updates, *numbers = json.loads((directory / "tiny.json").read_text())
        self.weights = torch.tensor(numbers)

    def close(self) -> None:
        pass


Spoil = Callable[[Task, bytes, bytes], tuple[bytes, bytes]]


class Player:
    """A rollout server in a thread: leases tasks, publishes made-up groups at the target's version.

    spoil   what becomes of (task, header, body) before they are published
    fails   seqs whose every attempt ends as GroupFailed
    twice   every publish call is made a second time, as after a lost reply
    """

    def __init__(
        self, address: dict[str, Any], run: str, *, spoil: Spoil | None = None, fails: set[int] | None = None,
        twice: bool = False, name: str = "p1",
    ) -> None:  # fmt: skip
        self._db = redis.Redis(**address, retry=Retry(NoBackoff(), 0), socket_timeout=10)
        self._run, self._keys = run, Keys(run)
        self._spoil, self.fails, self._twice, self._name = spoil, fails or set(), twice, name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self.replies: Counter[str] = Counter()
        self._tokens = 0
        self.seen: list[tuple[int, int]] = []
        self.paused = threading.Event()
        self.resting = threading.Event()  # a pause is in force: nothing is being leased any more

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._db.close()

    def _play(self) -> None:
        while not self._stop.is_set():
            try:
                if not self.paused.is_set() and self._db.hget(self._keys.target, "state") == b"ready":
                    self.resting.clear()
                    self._lease()
                else:
                    self.resting.set()
                    self._stop.wait(0.01)
            except redis.RedisError:
                self._stop.wait(0.02)

    def _lease(self) -> None:
        keys = self._keys
        reply = self._db.xreadgroup(TASK_GROUP, self._name, {keys.tasks: ">"}, count=4, block=20)
        _, claimed, *_ = self._db.xautoclaim(keys.tasks, TASK_GROUP, self._name, 2000, count=4)
        for id_, fields in [e for _, entries in reply or [] for e in entries] + [e for e in claimed if e[1]]:
            task = decode_as(Task, fields[b"b"])
            self.seen.append((task.seq, task.attempt))
            header, body = self._roll_out(task)
            for _ in range(2 if self._twice else 1):
                streams = (keys.tasks, keys.traj, keys.tokens)
                answer = self._db.fcall(functions.PUBLISH, 3, *streams, id_, task.seq, header, body, self._tokens)
                self.replies["DUP" if answer == b"DUP" else "published"] += 1

    def _roll_out(self, task: Task) -> tuple[bytes, bytes]:
        if task.seq in self.fails:
            self._tokens = 7
            return seal(GroupFailed(run=self._run, seq=task.seq, attempt=3, reason="engine", generated_tokens=7))
        raw = self._db.hget(self._keys.target, "b")
        version = decode_as(WeightUpdate, raw).version if raw else PolicyVersion(0, 0)
        group = make_group(task.seq, (1.0, 0.0, 0.0, 1.0)[: task.group_size], run=self._run, version=version)
        self._tokens = sum(t.num_sampled for t in group.trajectories)
        header, body = seal(group.model_copy(update={"question": task.question, "attempt": task.attempt}))
        if self._spoil:
            header, body = self._spoil(task, header, body)
            with suppress(ProtocolError):  # whatever it says is what was sampled
                self._tokens = sum(read_header(header).sampled)
        return header, body


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def surviving(run_dir: Path) -> dict[int, list[int]]:
    """step -> seqs, of the lineage that survived: of two lines for one step, the later epoch's."""
    best: dict[int, dict[str, Any]] = {}
    for line in step_lines(run_dir):
        if line["step"] not in best or line["epoch"] >= best[line["step"]]["epoch"]:
            best[line["step"]] = line
    return {step: best[step]["seqs"] for step in sorted(best)}


def service() -> Any:
    """The module that serves; imported late, since it is heavy."""
    import learner.main

    return learner.main


def main() -> int:
    """A learner process with the tiny engine."""
    from learner import cli

    service().serve.__kwdefaults__["make_engine"] = lambda run, settings: TinyEngine(run, settings, pace_s=0.05)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
