"""Redis servers of many kinds for the tests of this folder, and the tiny learner that runs on them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.run.redis_server import find_server
from learner.config.learner import LearnerSettings
from protocol.runtime.net import free_port
from protocol.settings import RunSettings
from tests.support import tiny_learner

STARTS_S = 30.0


@dataclass
class Server:
    """A server of a test's own: `process` may be signalled, `admin` is a client without rules."""

    port: int
    process: subprocess.Popen[bytes]
    admin: redis.Redis

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextmanager
def serve(folder: Path, *options: str, port: int = 0, program: Path | None = None, **login: Any) -> Iterator[Server]:
    """A server on a loopback port with `options`; it is killed at the end."""
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    argv = [str(program or find_server().path), *(o for o in options if o.endswith(".conf"))]
    argv += ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    argv += [option for option in options if not option.endswith(".conf")]
    admin = redis.Redis(port=port, **login)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
    try:
        deadline = time.monotonic() + STARTS_S
        while True:
            try:
                admin.ping()
                break
            except redis.AuthenticationError:
                break  # it answers, which is what we wait for
            except redis.RedisError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.02)
        yield Server(port, process, admin)
    finally:
        admin.close()
        process.kill()
        process.wait(10)


@pytest.fixture(scope="session")
def server_at() -> Callable[..., Any]:
    """`serve` above."""
    return serve


@pytest.fixture
def run(tmp_path: Path) -> RunSettings:
    """A run of 6 steps of 2 groups of 4 trajectories. It has no Redis yet."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "tiny"}')
    return RunSettings(id="t1", dir=tmp_path / "run", model=model, group_size=4, groups_per_step=2, max_lag=2, steps=6)


@pytest.fixture
def settings(tmp_path: Path) -> LearnerSettings:
    """Everything that waits, waits briefly."""
    path = tmp_path / "questions.jsonl"
    asked = [{"id": f"q{i}", "question": f"what is {i} ?", "answers": [str(i)]} for i in range(7)]
    path.write_text("\n".join(map(json.dumps, asked)))
    return LearnerSettings(questions=path, checkpoint_every=2, lease_s=3, reconcile_s=0.3)


@pytest.fixture
def learn() -> Callable[..., int]:
    """`learner.main.serve` with the tiny engine, whose settings are the keyword arguments."""
    from learner.main import serve as real

    def call(run: RunSettings, settings: LearnerSettings, **engine: Any) -> int:
        return real(run, settings, make_engine=lambda r, s: tiny_learner.TinyEngine(r, s, **engine))

    return call


class RunFiles:
    """Files of a finished run, checked: every step trained a batch, no seq twice, nothing in flight."""

    def __init__(self, run: RunSettings) -> None:
        from learner.checkpoint.checkpoint import Checkpoints

        self.steps = tiny_learner.surviving(run.dir)
        self.lines = tiny_learner.step_lines(run.dir)
        found = Checkpoints(run.checkpoint_dir, 2).load()
        assert found is not None
        self.facts = found.facts
        seqs = [seq for batch in self.steps.values() for seq in batch]
        assert list(self.steps) == list(range(1, run.steps + 1))
        assert len(seqs) == len(set(seqs)) == run.steps * run.groups_per_step, "no seq is trained twice"
        assert self.facts["ledger"]["counts"]["trained"] == len(seqs) and self.facts["ledger"]["above"] == []

    @property
    def epochs(self) -> list[int]:
        """Epochs of the lineage, as its learners started."""
        return [epoch for epoch, _ in self.facts["lineage"]]


@pytest.fixture
def files_of() -> Callable[[RunSettings], RunFiles]:
    """Check a finished run and return its files."""
    return lambda run: RunFiles(run)
