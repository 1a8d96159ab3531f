"""What usually goes wrong in a run, found in its files: `foray diagnose`, and the first page of the dashboard."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deploy.run.run_dir import Located
from foray.watch.findings.base import MOST_SHOWN, Evidence, Found, SeenTrajectory, read_config, read_evidence
from foray.watch.findings.behaviour import answers_without_search, copied_titles, keyword_stuffing, yes_no_bias
from foray.watch.findings.retrieval import corpus_of, retriever
from foray.watch.findings.training import collapse, no_signal, prompts, stale_gradient, unequal_logprobs

REGISTRY: Mapping[str, Callable[[Evidence], Found | None]] = {
    "collapse": collapse,
    "unequal-logprobs": unequal_logprobs,
    "retriever": retriever,
    "no-signal": no_signal,
    "prompts": prompts,
    "no-search": answers_without_search,
    "keyword-stuffing": keyword_stuffing,
    "yes-no-bias": yes_no_bias,
    "copied-titles": copied_titles,
    "stale-gradient": stale_gradient,
}
"""Name -> function, the worst first. To add one, write it in a module here and one line."""


def findings(run: Evidence) -> dict[str, Found]:
    """Return name -> finding, of those that speak."""
    return {name: found for name, check in REGISTRY.items() if (found := check(run)) is not None}


def diagnose(found: Located, *, corpus: bool = False) -> dict[str, Any]:
    """Return the findings of a run as JSON values. corpus: open the run's corpus if the searches do not find."""
    run = read_evidence(found)
    if corpus:
        run = replace(run, ask=corpus_of(read_config(found.directory)))
    return {
        "run": found.run.id,
        "steps": len(run.steps),
        "trajectories": len(run.plays),
        "checked": list(REGISTRY),
        "findings": [
            {
                "name": name,
                "what": one.what,
                "rule": one.rule,
                "todo": list(one.todo),
                "trajectories": [_shown(found, play) for play in _distinct(one.plays)],
            }
            for name, one in findings(run).items()
        ],
    }


def _distinct(plays: tuple[SeenTrajectory, ...]) -> list[SeenTrajectory]:
    """Return the first trajectory of each of the first few groups."""
    return list({play.shown.group.seq: play for play in reversed(plays)}.values())[::-1][:MOST_SHOWN]


def _shown(found: Located, play: SeenTrajectory) -> dict[str, Any]:
    seq, trajectory = play.shown.group.seq, play.trajectory
    return {
        "seq": seq,
        "index": play.shown.index,
        "step": play.shown.step,
        "question": play.question.text,
        "gold": list(play.question.answers),
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "searches": trajectory.searches,
        "status": str(trajectory.status),
        "replay": shlex.join(["foray", "replay", str(found.directory), "--seq", str(seq), "--all"]),
        "dashboard": f"#/group/{seq}/{play.shown.index}?epoch={play.shown.epoch}",
    }
