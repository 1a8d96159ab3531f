"""What a finding reads, `Evidence`, and what it returns, `Found`. Only files of the run directory are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from deploy.config import RunConfig, from_tree
from deploy.run.history import RunHistory, read_steps
from deploy.run.run_dir import Located, configuration_of, read_configuration
from deploy.run.snapshot import read_ledger
from foray.watch.dead_letters import Fates
from foray.watch.records import RECENT_GROUPS, find_tokenizer, trained_groups
from foray.watch.transcript import Decoder, Shown, choose
from protocol.errors import UserError
from protocol.messages import Owner, Question, Status, Trajectory
from rollout_server.environment.prompts import TEMPLATES
from rollout_server.environment.prompts.base import PromptTemplate
from rollout_server.rewards.base import TurnText
from rollout_server.rewards.text_match import answers_match

ENOUGH = 32
"""Trajectories that a share needs: fewer are chance."""
WINDOW = 20
"""Steps whose mean is judged."""
MOST_SHOWN, MOST_READ = 3, 1024
"""Trajectories that a finding names, and the newest ones that are read."""


@dataclass(frozen=True)
class TrainedTrajectory:
    """A trajectory of the groups trained last. `turns`: its observations; none without a tokenizer."""

    shown: Shown
    turns: tuple[TurnText, ...]

    @property
    def trajectory(self) -> Trajectory:
        """Return the trajectory."""
        return self.shown.trajectory

    @property
    def question(self) -> Question:
        """Return its question."""
        return self.shown.group.question

    @property
    def is_right(self) -> bool:
        """Return whether the answer is a gold answer."""
        return any(answers_match(self.trajectory.answer, gold) for gold in self.question.answers)

    @property
    def lag(self) -> int:
        """Return the lag of its oldest token."""
        return max((self.shown.lag(span) for s in self.trajectory.segments for span in s.spans), default=0)


@dataclass(frozen=True)
class Found:
    """What was seen, with its number; the rule that decided; what to try; the trajectories that show it."""

    what: str
    rule: str
    todo: tuple[str, ...]
    trajectories: tuple[TrainedTrajectory, ...] = ()


AskCorpus = Callable[[Sequence[TrainedTrajectory]], tuple[str, ...]]
"""Returns what the run's corpus says about the questions of trajectories, as advice."""


@dataclass(frozen=True)
class Evidence:
    """A run as the findings see it.

    steps         records of `metrics.jsonl`, the newest last
    trajectories  the valid ones of the groups trained last, the newest first
    first         those of the groups trained first, if hardly any of `trajectories` searched
    dead          seq -> reason, of questions that failed
    settled       outcome -> number of questions
    ask           None: the run's corpus cannot be asked
    searches      whether the policy can search
    updates       optimiser updates of a step: after the first, log-probs differ from the engines' by training
    max_turns, max_context   rollout.episode's; 0: unknown
    """

    steps: Sequence[Mapping[str, Any]] = ()
    trajectories: tuple[TrainedTrajectory, ...] = ()
    first: tuple[TrainedTrajectory, ...] = ()
    dead: Mapping[int, str] | None = None
    settled: Mapping[str, int] | None = None
    ask: AskCorpus | None = None
    searches: bool = True
    updates: int = 1
    max_turns: int = 0
    max_context: int = 0

    @cached_property
    def answered(self) -> list[TrainedTrajectory]:
        """Return the trajectories that ended with an answer."""
        return [sample for sample in self.trajectories if sample.trajectory.status is Status.ANSWERED]

    @property
    def recent(self) -> RunHistory:
        """Return the last WINDOW steps."""
        return RunHistory(recent=tuple(self.steps[-WINDOW:]))

    def windows(self) -> Iterator[RunHistory]:
        """Yield every WINDOW steps, the newest first; the oldest may be shorter."""
        for end in range(len(self.steps), 0, -WINDOW):
            yield RunHistory(recent=tuple(self.steps[max(0, end - WINDOW) : end]))


def read_evidence(found: Located) -> Evidence:
    """Read the files of a run."""
    try:
        tokens = find_tokenizer(found.directory, None, found.run)
    except UserError:
        tokens = None
    ledger = read_ledger(found.directory)
    config = read_config(found.directory)

    def read(groups: Iterable[Any]) -> tuple[TrainedTrajectory, ...]:
        entries = islice(choose(groups, every=True, max_lag=found.run.max_lag), MOST_READ)
        return tuple(TrainedTrajectory(s, tuple(_turns(s, tokens))) for s in entries if s.trajectory.status.is_valid)

    newest = read(reversed(list(trained_groups(found.directory, last=RECENT_GROUPS))))
    few = tokens is not None and sum(bool(sample.turns) for sample in newest) < ENOUGH
    return Evidence(
        steps=tuple(read_steps(found.directory / "metrics.jsonl").values()),
        trajectories=newest,
        first=read(islice(trained_groups(found.directory), RECENT_GROUPS)) if few else (),
        dead=Fates(ledger).dead,
        settled={str(outcome): number for outcome, number in ledger.counts.items()} if ledger else None,
        searches=config is None or config.rollout.search.type != "none",
        updates=config.learner.algorithm.minibatches * config.learner.algorithm.epochs if config else 1,
        max_turns=config.rollout.episode.max_turns if config else 0,
        max_context=config.rollout.episode.max_context if config else 0,
    )


def read_config(directory: Path) -> RunConfig | None:
    """Return the run's configuration; None if it has none that this version reads."""
    path = configuration_of(directory)
    try:
        return from_tree(read_configuration(path, directory)) if path is not None else None
    except UserError:
        return None


def _turns(shown: Shown, tokens: Decoder | None) -> Iterator[TurnText]:
    """Yield the searches of a trajectory, with the titles of their passages."""
    template = TEMPLATES.get(shown.group.template)
    for segment in shown.trajectory.segments if tokens is not None else ():
        if segment.owner is Owner.ENVIRONMENT and segment.query and not segment.tool and tokens is not None:
            text = tokens.decode(segment.ids.tolist())
            titles = tuple(_title_of(template).findall(text)) if template is not None else ()
            yield TurnText("", text, segment.query, segment.passage_ids, titles)


def _title_of(template: PromptTemplate) -> re.Pattern[str]:
    """Return a pattern whose group is the title of a passage, as the template writes it."""
    before, name, after = re.split(r"\{(heading|title|contents)\}", template.passage, maxsplit=1)
    ended = r"\s*$" if name == "contents" else re.escape(after.partition("{")[0])
    return re.compile(re.escape(before).replace(r"\{i\}", r"\d+") + r"\s*(.{1,200}?)\s*" + ended, re.MULTILINE)
