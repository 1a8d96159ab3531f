"""Ways to break a run of the demo: settings, rewards that pay for the wrong thing, searches that find nothing."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collapse import LR, SEARCH_R1
from benchmarks.collapse import Planned as Collapsing
from foray.api.callables import CallableServer
from foray.demo.world import SHORT, write_jsonl
from rollout_server.rewards.base import RewardInput

STEPS = 60
AHEAD = "rollout.concurrency_groups=144"
"""Groups at once, those of nine steps: with the demo's 32 generation is hardly ahead of training at any max_lag."""


def constant(_: RewardInput) -> float:
    """Return the same for every trajectory."""
    return 0.5


def answered_at_once(outcome: RewardInput) -> float:
    """Pay for an answer, whatever it is, and less after a search."""
    return float(outcome.answer is not None) / (1 + outcome.searches)


def long_answers(outcome: RewardInput) -> float:
    """Pay for different words in the answer, up to twelve."""
    return min(12, len(set((outcome.answer or "").split()))) / 12


def copied_words(outcome: RewardInput) -> float:
    """Pay for words of the passages in the answer, however often, up to sixteen, and a little for any word."""
    read = {word for turn in outcome.turns for word in turn.observation.split()}
    words = (outcome.answer or "").split()
    return min(16.0, sum(word in read for word in words) + 0.2 * len(words)) / 16


def _rewards(*parts: str | Callable[[RewardInput], float]) -> str:
    """Return the setting of these rewards: settings, or a function of this module."""
    named = [
        part if isinstance(part, str) else f"{{type: custom, target: '{part.__module__}:{part.__name__}'}}"
        for part in parts
    ]
    return f"rollout.episode.rewards=[{', '.join(named)}]"


@dataclass(frozen=True)
class Breakage:
    """What differs from the demo's settings.

    search  passages that searches return: "random" ones, those of a "foreign" world, those found in a "tenth" of the
            corpus; "": those that they find
    temperature  by which the engine divides its logits, beside what it is asked for
    """

    overrides: tuple[str, ...] = ()
    level: str = "demo"
    search: str = ""
    steps: int = STEPS
    temperature: float = 1.0


KINDS: Mapping[str, tuple[Breakage, ...]] = {
    "collapse": (
        Breakage(Collapsing("lag8-lr6-mb1-r1", "", 0).overrides, "hard", steps=150),
        Breakage(Collapsing("lag8-lr10-mb1-r1", "", 0).overrides, "hard", steps=150),
    ),
    "unequal-logprobs": (Breakage(temperature=0.7), Breakage(level="hard", temperature=1.3)),
    "retriever": (Breakage(search="random"), Breakage(search="foreign"), Breakage(search="tenth")),
    "no-signal": (Breakage((_rewards(constant),)), Breakage(("run.temperature=0.01",), "hard")),
    "prompts": (Breakage(("rollout.episode.max_context=72",)), Breakage(("rollout.episode.max_new_tokens=8",))),
    "no-search": (
        Breakage((_rewards("{type: em}", "{type: search_cost, each: 1.0, free: 0, cap: 3.0}"),)),
        Breakage((_rewards(answered_at_once),)),
    ),
    "keyword-stuffing": (
        Breakage((_rewards(long_answers),), steps=2 * STEPS),
        Breakage((_rewards(copied_words),), steps=2 * STEPS),
    ),
    "stale-gradient": (
        Breakage(("run.max_lag=8", AHEAD, f"learner.optim.lr={3 * LR['hard']}", *SEARCH_R1), "hard"),
        Breakage(("run.max_lag=6", AHEAD, f"learner.optim.lr={LR['hard']}", "learner.algorithm.minibatches=4"), "hard"),
    ),
}
"""Finding -> breakages for the thresholds, and, the last one, another of the same kind that judges."""


class AtRandom:
    """A search engine that returns two passages whatever it is asked."""

    def __init__(self, passages: Sequence[Mapping[str, str]]) -> None:
        self._passages, self._random = passages, random.Random(0)

    def search(self, _: str) -> Sequence[Mapping[str, str]]:
        """Return two passages."""
        return self._random.sample(self._passages, 2)


@contextmanager
def engine(breakage: Breakage, model: Path) -> Iterator[tuple[str, ...]]:
    """Yield the settings of a run that attaches to a broken engine, which serves `model`; () for the demo's."""
    if breakage.temperature == 1:
        yield ()
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--model-path", model, "--port", port, "--max-running", 256, "--max-total-tokens", 131072)
    words = (sys.executable, "-m", "benchmarks.diagnose.engine", breakage.temperature, *flags, "--dtype", "float32")
    with subprocess.Popen([*map(str, words)]) as process:
        try:
            yield (f"engine.kind={{type: attach, url: 'http://127.0.0.1:{port}', wait_s: 300}}",)
        finally:
            process.terminate()


@contextmanager
def searching(breakage: Breakage, seed: int, corpus: Path) -> Iterator[tuple[str, ...]]:
    """Yield the settings of a broken search while it is served; () for that of the demo.

    corpus  file to write the passages of another world to
    """
    if breakage.search == "random":
        server = CallableServer(AtRandom(SHORT.world(seed, SHORT.larger).passages()))
        try:
            yield (f"rollout.search.urls=[{server.search_url}]",)
        finally:
            server.close()
    elif breakage.search:
        passages = SHORT.world(seed + 500 * (breakage.search == "foreign"), SHORT.larger).passages()
        corpus.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(corpus, passages[:: 10 if breakage.search == "tenth" else 1])
        yield (f"retriever.corpus={corpus.absolute()}",)
    else:
        yield ()
