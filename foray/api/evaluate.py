"""`foray.evaluate`: what `foray eval` measures, as values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any

from foray.api.callables import RewardFunction, SearchEngine
from foray.api.inputs import Example, reward_setting, search_overrides, server_of, write_dataset
from foray.api.run import run_command
from foray.api.searcher import Searcher


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation.

    directory  where they are stored: `foray eval --against DIR` compares another evaluation with them
    rows       one mapping per episode: question, answer, metrics, rewards, searches, segments, failure
    """

    directory: Path
    rows: Sequence[dict[str, Any]]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean of em, f1 and the others, of all episodes; those that failed count 0."""
        names = sorted({name for row in self.rows for name in row["metrics"]})
        return {name: fmean(row["metrics"].get(name, 0.0) for row in self.rows) for name in names}

    @property
    def rewards(self) -> dict[str, float]:
        """Return the mean of each reward of the policy's episodes."""
        names = sorted({name for row in self.rows for name in row.get("rewards", {})})
        return {name: fmean(row.get("rewards", {}).get(name, 0.0) for row in self.rows) for name in names}


def evaluate(
    policy: str | Path,
    dataset: str | Path | Iterable[Example],
    *,
    search_engine: str | Path | Searcher | SearchEngine | None = None,
    reward: str | RewardFunction | None = None,
    n: int = 1,
    temperature: float = 0.0,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Evaluation:
    """Ask a policy every question and return scores and episodes.

    policy         run directory, checkpoint, folder in Hugging Face layout, or URL (`foray eval` says more)
    dataset        file of questions in any format of docs/data.md, or examples
    search_engine  as of `foray.train_grpo`; None: the run's own
    reward         a further score, by name or function
    n, temperature attempts per question, and their sampling; 0 is greedy
    out            directory of the results; None: a temporary one
    overrides      settings, e.g. ["rollout.episode.max_turns=3"]

    Raises ForayError with the reason.
    """
    directory = Path(out) if out is not None else Path(mkdtemp(prefix="foray-eval-"))
    directory.mkdir(parents=True, exist_ok=True)
    path, _ = write_dataset(dataset, directory / "inputs")
    server = server_of(search_engine, reward or "em")
    given = [*(search_overrides(search_engine, server) if search_engine is not None else ()), *overrides]
    if reward is not None:
        given.append(f"rollout.episode.rewards={json.dumps([reward_setting(reward, server)])}")
    try:
        run_command(
            *("eval", str(policy), "--suite", f"data={path}", "--out", str(directory / "result")),
            *("--n", str(n), "--temperature", f"{temperature:g}"),
            *given,
        )
    finally:
        if server is not None:
            server.close()
    from foray.evaluation.store import read_rows

    return Evaluation(directory / "result", read_rows(directory / "result"))
