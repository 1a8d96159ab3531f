"""Run directories for the dashboard: a journal written by the journal itself, steps, validations, a tokenizer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deploy.run.run_dir import Located, read_configuration
from foray.dashboard.app import build_app
from foray.dashboard.chat import ChatProxy
from foray.dashboard.source import RunData
from learner.checkpoint.journal import GroupJournal
from protocol.header import seal
from protocol.messages import Owner, Question, Segment, Status, Trajectory, TrajectoryGroup, VersionSpan
from protocol.runtime.config import section
from protocol.runtime.http.auth import Access
from protocol.runtime.http.server import listening
from protocol.settings import RunSettings
from tests.support.registered import registered

EVIL = "<script>alert(1)</script>"
EVIL_IMAGE = '<img/src="x"/onerror="alert(2)">'
WORDS = (
    *("<unk>", "who", "wrote", "emma", "?", "austen", "brontë", "<think>", "</think>", "<search>", "</search>"),
    *("<information>", "</information>", "<answer>", "</answer>", "Doc", "1(Title:", "2(Title:", "Jane)", "Emily)"),
    *(EVIL, EVIL_IMAGE, "novel", "maybe"),
)


@contextmanager
def served_at(run_dir: Path, *urls: str) -> Iterator[Path]:
    """Register rollout servers at `urls` in the Redis of the run directory inside the block."""
    settings = json.loads((run_dir / "resolved.yaml").read_text())["run"]
    with registered(settings["redis_url"], settings["id"], "rollout", *urls):
        yield run_dir


def write_model(directory: Path) -> Path:
    """Write a model directory with nothing but a word-level tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def ids(text: str) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray([WORDS.index(word) for word in text.split()], np.int32)


def policy(text: str, *versions: tuple[int, int]) -> Segment:
    """A turn whose tokens are shared equally by (epoch, step) `versions`."""
    given, n = ids(text), len(versions)
    bounds = [len(given) * i // n for i in range(n + 1)]
    return Segment(
        owner=Owner.POLICY,
        ids=given,
        logprobs=np.full(len(given), -0.25, np.float32),
        spans=tuple(
            VersionSpan(epoch=epoch, step=step, start=bounds[i], end=bounds[i + 1])
            for i, (epoch, step) in enumerate(versions)
        ),
        finish_reason="stop",
        engine="engine-1",
    )


def trajectory(reward: float, *versions: tuple[int, int], answer: str = "austen", query: str = "emma") -> Trajectory:
    """A prompt, a search whose passages contain scripts, an answer."""
    passages = f"<information> Doc 1(Title: Jane) austen {EVIL} Doc 2(Title: Emily) {EVIL_IMAGE} novel </information>"
    return Trajectory(
        status=Status.ANSWERED,
        segments=(
            Segment(owner=Owner.PROMPT, ids=ids("who wrote emma ?")),
            policy("<think> maybe </think> <search> emma </search>", *versions),
            Segment(
                owner=Owner.ENVIRONMENT, ids=ids(passages), query=query, passage_ids=("p1", "p<2>"), latency_s=0.01
            ),
            policy(f"<answer> {answer} </answer>", versions[-1]),
        ),
        reward=reward,
        rewards={"em": reward},
        answer=answer,
        turns=2,
        searches=1,
        seconds=1.5,
    )


def group(
    seq: int,
    step: int,
    rewards: Sequence[float] = (1.0, 0.0),
    *,
    epoch: int = 1,
    source: str = "nq",
    text: str = "who wrote emma ?",
    answer: str = "austen",
) -> TrajectoryGroup:
    """A group sampled by the version before the one that step `step` updates, and by that one."""
    versions = ((epoch, max(0, step - 2)), (epoch, step - 1))
    return TrajectoryGroup(
        run="test",
        seq=seq,
        question=Question(id=f"q{seq % 3}", text=text, answers=("austen",), meta={"source": source}),
        trajectories=tuple(trajectory(reward, *versions, answer=answer) for reward in rewards),
        producer="rollout-1",
        template="search_r1",
        seconds=2.0,
    )


def write_journal(directory: Path, groups: Iterable[tuple[int, TrajectoryGroup]], *, epoch: int = 1) -> None:
    """Append (step, group) to the journal of a run as a learner that has just started, in a new file."""
    journal = GroupJournal(directory / "journal")
    for step, one in groups:
        journal.append(step, epoch, [seal(one)])
    journal.close()


def write_run(directory: Path, *, redis_url: str = "") -> Path:
    """Write a finished run: 12 groups in 4 steps, its metrics, a validation."""
    model = write_model(directory / "model")
    write_journal(directory, _groups())
    records = [
        {"step": step, "epoch": 1, "step_s": 2.0, "reward_mean": step / 10, "reward/em": step / 10, "lag_mean": 0.5,
         "tokens_trained": 40, "seqs": [step], "seconds": {"wait": 0.5, "compute": 1.5}}
        for step in range(1, 5)
    ]  # fmt: skip
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    means = {"em": 0.5, "f1": 0.6, "em_stderr": 0.1, "questions": 4.0, "failed": 0.0}
    validation = {"name": "initial", "step": 0, "epoch": 1, "version": "1.0", "checkpoint": "", "seconds": 1.0}
    (directory / "validation.jsonl").write_text(json.dumps(validation | {"suites": {"held_out": means}}) + "\n")
    settings = {"id": "test", "model": str(model), "dir": str(directory), "max_lag": 0, "steps": 4}
    (directory / "resolved.yaml").write_text(json.dumps({"run": settings | {"redis_url": redis_url}}))
    (directory / "run.json").write_text(json.dumps({"id": "test", "state": "done", "redis_url": redis_url}))
    (directory / "logs").mkdir()
    lines = ("00,123 INFO rollout: started", f"01,000 ERROR rollout: {EVIL}", "02,000 INFO rollout: stopped")
    (directory / "logs" / "rollout-1.log").write_text("".join(f"2026-11-27 05:00:{line}\n" for line in lines))
    last = "2026-11-27 05:00:03,000 INFO learner: loading\nerror: no model\n  why: it is https://u:pw@host/x\n"
    (directory / "logs" / "learner.log").write_text(last)
    return directory


def write_stuffed(directory: Path) -> None:
    """Add groups to a run whose answers are stuffed with words, and whose texts contain scripts."""
    answer = f"who wrote emma novel maybe {EVIL_IMAGE}"
    write_journal(directory, ((n, group(n, n, text=f"who {EVIL}\x1b[2J ?", answer=answer)) for n in range(13, 33)))


def write_large_run(directory: Path) -> Path:
    """Write a finished run of more than 100,000 trajectories."""
    write_run(directory)
    base = group(1, 1, [1.0, 0.0] * 4)

    def many() -> Iterator[tuple[int, TrajectoryGroup]]:
        for seq in range(13, 12_600):
            question = base.question.model_copy(update={"id": f"q{seq}", "text": f"who wrote emma {seq} ?"})
            yield 5 + seq // 16, base.model_copy(update={"seq": seq, "question": question})

    write_journal(directory, many())
    return directory


def _groups() -> list[tuple[int, TrajectoryGroup]]:
    found = []
    for seq in range(1, 13):
        step = 1 + (seq - 1) // 3
        rewards = (1.0, 0.0) if seq % 2 else (0.0, 0.0)
        found.append((step, group(seq, step, rewards, source="hotpot" if seq > 9 else "nq")))
    return found


def located(directory: Path) -> Located:
    tree = read_configuration(directory / "resolved.yaml", directory)
    run = section(tree, "run", RunSettings)
    return Located(run, run.redis_url, directory, json.loads((directory / "run.json").read_text()))


def read_all(data: RunData) -> RunData:
    """Bring the index up to date."""
    while data.index.update():
        pass
    return data


@asynccontextmanager
async def dashboard(directory: Path, access: Access | None = None, chat: ChatProxy | None = None) -> AsyncIterator[str]:
    """Serve a run on a free port; yields its URL."""
    data = read_all(RunData(located(directory)))
    access = access or Access()
    app = build_app(data, access, chat)
    async with listening(app, "127.0.0.1", 0, access=access, setting="--host", todo="") as server:
        yield server.url


async def events(response: Any, number: int) -> list[dict[str, Any]]:
    """Read events of a stream until there are `number`; comments are events without a kind."""
    found: list[dict[str, Any]] = []
    while len(found) < number:
        block = (await response.content.readuntil(b"\n\n")).decode()
        fields = dict(line.split(": ", 1) for line in block.strip().split("\n") if not line.startswith(":"))
        found.append({"id": fields.get("id", ""), "event": fields.get("event", ""), "data": fields.get("data", "")})
    return found
