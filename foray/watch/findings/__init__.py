"""What usually goes wrong in a run, found in its files: `foray diagnose`, and the first page of the dashboard."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deploy.run.run_dir import Located
from foray.watch.findings.base import MOST_SHOWN, Evidence, Found, TrainedTrajectory, read_config, read_evidence
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
        "trajectories": len(run.trajectories),
        "checked": list(REGISTRY),
        "findings": [
            {
                "name": name,
                "what": one.what,
                "rule": one.rule,
                "todo": list(one.todo),
                "trajectories": [_shown(found, sample) for sample in _distinct(one.trajectories)],
            }
            for name, one in findings(run).items()
        ],
    }


def _distinct(trajectories: tuple[TrainedTrajectory, ...]) -> list[TrainedTrajectory]:
    """Return the first trajectory of each of the first few groups."""
    return list({sample.shown.group.seq: sample for sample in reversed(trajectories)}.values())[::-1][:MOST_SHOWN]


def _shown(found: Located, sample: TrainedTrajectory) -> dict[str, Any]:
    seq, trajectory = sample.shown.group.seq, sample.trajectory
    return {
        "seq": seq,
        "index": sample.shown.index,
        "step": sample.shown.step,
        "question": sample.question.text,
        "gold": list(sample.question.answers),
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "searches": trajectory.searches,
        "status": str(trajectory.status),
        "replay": shlex.join(["foray", "replay", str(found.directory), "--seq", str(seq), "--all"]),
        "dashboard": f"#/group/{seq}/{sample.shown.index}?epoch={sample.shown.epoch}",
    }
