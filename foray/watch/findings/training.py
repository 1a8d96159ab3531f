"""Findings of the steps: collapse, stale tokens, groups without a signal, cut trajectories, unequal log-probs."""

from __future__ import annotations

from collections import Counter

from deploy.run.history import PAST, RunHistory
from deploy.run.learning import ENOUGH as ENOUGH_STEPS
from deploy.run.learning import FEW, MOST_DEAD, PAGE, SOLVED, active_signs, learning_state
from foray.watch.findings.base import ENOUGH, Evidence, Found, TrainedTrajectory
from protocol.messages import Status

LAG, RATIO_LOW, ESS = 1.5, 0.01, 0.9
NO_ADVANTAGE, FILTERED = 0.95, 0.9
CUT, NO_ROOM = 0.3, 0.5
GAP, LATER_KL = 0.01, 0.05
REMEDIES = {
    "reward_mean": "a lower learner.optim.lr or run.max_lag; learner.algorithm.preserve: {coefficient: 0.2}",
    "logprob_right": "right answers become less likely: learner.algorithm.preserve: {coefficient: 0.2}",
    "logprob_change": "each step makes right answers less likely: a lower learner.optim.lr, preserve",
    "fell_turns": "each step makes right answers less likely: a lower learner.optim.lr, preserve",
    "ratio_low": "a lower learner.optim.lr, fewer learner.algorithm.minibatches, a lower run.max_lag",
    "grad_norm": "a lower learner.optim.lr; learner.algorithm.dual_clip 3 and learner.optim.clip_norm 1",
    "entropy": "a lower learner.algorithm.entropy_coefficient and learner.optim.lr",
    "thoughts_empty": "a template without thinking, such as search_r1_fast, or a lower learner.optim.lr",
    "turns_repeated": "{type: repeated_query} in rollout.episode.rewards, or a lower rollout.episode.max_turns",
}
"""Metric of a sign of collapse -> what to try."""


def collapse(run: Evidence) -> Found | None:
    """Find the signs of collapse in the last steps, or a reward that has fallen at any time."""
    history = RunHistory(past=tuple(run.steps[-PAST:]))
    whole = RunHistory(past=tuple({"reward_mean": step.get("reward_mean")} for step in run.steps))
    seen = next((h for h in (history, whole) if learning_state(h).word == "collapsing"), None)
    if seen is None:
        return None
    todo = (REMEDIES[sign.metric] for sign in active_signs(seen) if sign.metric in REMEDIES)
    worst = sorted(run.trajectories, key=lambda sample: sample.trajectory.reward)
    return Found(
        f"the run is collapsing: {learning_state(seen).sign}",
        "the reward, or two other signs, are worse than in the run's best ten steps (deploy/run/learning.py, SIGNS)",
        (*dict.fromkeys(todo), f'go back to an earlier checkpoint with the change ({PAGE}, "The reward collapses")'),
        tuple(worst),
    )


def stale_gradient(run: Evidence) -> Found | None:
    """Find tokens of old versions whose ratios carry the gradient."""
    found = []
    for window in run.windows():
        lag, low, ess = (window.mean(name) for name in ("lag_mean", "ratio_low", "ess"))
        if (lag or 0.0) >= LAG and ((low or 0.0) >= RATIO_LOW or (ess is not None and ess <= ESS)):
            found.append((low or 0.0, lag or 0.0, 1.0 if ess is None else ess, window.recent[-1].get("step", 0)))
    if not found:
        return None
    low, lag, ess, step = max(found)
    return Found(
        f"tokens {lag:.1f} steps old on average carry the gradient, up to step {step}: {low:.1%} of the ratios are "
        f"below 0.5, the effective sample size is {ess:.0%}",
        f"in {len(found)} windows of 20 steps lag_mean is {LAG} or more, and ratio_low {RATIO_LOW:.0%} or more or ess "
        f"{ESS:.0%} or less",
        (
            "a lower run.max_lag",
            "a lower learner.optim.lr: the distance between two versions grows with it",
            "learner.algorithm.old_logprobs: recompute with `correction`, or `rejection` (docs/algorithms.md)",
        ),
        tuple(sorted(run.trajectories, key=lambda sample: -sample.lag)),
    )


def no_signal(run: Evidence) -> Found | None:
    """Find groups whose trajectories all earn the same."""
    recent, settled = run.recent, run.settled or {}
    reward, share = recent.mean("reward_mean"), recent.mean("zero_advantage_share")
    filtered = settled.get("filtered", 0) / max(1, sum(settled.values()))
    equal = recent.mean("reward_std") == 0
    judged = len(recent.recent) >= ENOUGH_STEPS and (reward or 0.0) < SOLVED
    if judged and (equal or (share or 0.0) > NO_ADVANTAGE):
        seen = f"all rewards are {reward:.3f}" if equal else f"{share:.0%} of the trajectories have no advantage"
        what = f"groups without a signal: {seen} in the last {len(recent.recent)} steps"
    elif filtered > FILTERED and sum(settled.values()) >= ENOUGH_STEPS:
        what = f"groups without a signal: {filtered:.0%} of {sum(settled.values())} questions were filtered"
    else:
        return None
    return Found(
        what,
        f"over {NO_ADVANTAGE:.0%} of the trajectories without an advantage, rewards that are all equal below {SOLVED}, "
        f"or over {FILTERED:.0%} of the questions filtered",
        (
            "raise run.group_size, or run.temperature",
            "choose questions that are neither all solved nor all failed; start from a better warm start (`foray sft`)",
            "a reward with steps between right and wrong: f1, retrieval_hit with `share`",
            f'if all rewards are 0: {PAGE}, "The reward stays 0"',
        ),
        tuple(sample for sample in run.trajectories if sample.shown.index == 0),
    )


def prompts(run: Evidence) -> Found | None:
    """Find questions that do not fit, trajectories that reach a limit of tokens, and answers that had no room for
    another search: a policy learns to stay below a limit, so that later none is cut."""
    ended = [sample for sample in run.trajectories if sample.trajectory.status is Status.TRUNCATED]
    cut = len(ended) / len(run.trajectories) if len(run.trajectories) >= ENOUGH else 0.0
    cramped = _cramped(run)
    total, reasons = sum((run.settled or {}).values()), Counter((run.dead or {}).values())
    long = reasons["prompt_too_long"]
    seen = []
    if long >= FEW and long > MOST_DEAD * total:
        seen.append(f"{long} of {total} questions do not fit into rollout.episode.max_context")
    if cut >= CUT:
        seen.append(f"{cut:.0%} of the last {len(run.trajectories)} trajectories are cut at a limit")
    limits = Counter(_limit(sample.trajectory.cause) for sample in ended)
    todo = [f"raise {limit}: it ended {number} of the last trajectories" for limit, number in limits.most_common()]
    if cramped:
        what = f"{len(cramped)} of {len(run.answered)} answers had turns left, but no room for another search in "
        seen.append(f"{what}{run.max_context} tokens")
        if "rollout.episode.max_context" not in limits:
            todo.append("raise rollout.episode.max_context")
    if not seen:
        return None
    return Found(
        "; ".join(seen),
        f"{MOST_DEAD:.0%} of the questions ended as prompt_too_long, at least {FEW}, {CUT:.0%} of the trajectories "
        f"are truncated, or {NO_ROOM:.0%} of the answers had no room for another search",
        (
            *todo,
            "`foray doctor run.yaml` encodes the questions and says how many fit",
            "a lower rollout.search.topk or rollout.episode.max_obs_tokens",
        ),
        tuple(cramped or ended),
    )


def _cramped(run: Evidence) -> list[TrainedTrajectory]:
    """Return the answers that had turns left, but no tokens for one more search as long as theirs, those with the
    lowest reward first; none if they are few, or the run is solved."""
    found = []
    for sample in run.answered:
        done, tokens = sample.trajectory.searches, [len(segment.ids) for segment in sample.trajectory.segments]
        one_sequence = len(sample.trajectory.sequences) == 1
        if one_sequence and 0 < done < run.max_turns and sum(tokens) + sum(tokens[1:-1]) / done > run.max_context:
            found.append(sample)
    solved = (run.recent.mean("reward_mean") or 0.0) >= SOLVED
    if solved or len(run.answered) < ENOUGH or len(found) < NO_ROOM * len(run.answered):
        return []
    return sorted(found, key=lambda sample: sample.trajectory.reward)


def _limit(cause: str) -> str:
    return "rollout.episode.max_context" if "context" in cause else "rollout.episode.max_new_tokens"


def unequal_logprobs(run: Evidence) -> Found | None:
    """Find log-probs of the engines that differ from the learner's for the same weights."""
    same = [step for step in run.steps if step.get("lag_max") == 0 and run.updates == 1]
    gap, todo = RunHistory(recent=tuple(same)).mean("logprob_gap"), list(_UNEQUAL)
    if gap is not None and gap >= GAP:
        at = ", ".join(str(step.get("step")) for step in same[:3])
        what = f"engine and learner disagree: log-probs of the same weights differ by {gap:.3f} on average (step {at})"
    else:
        drift = [w for w in run.windows() if (w.mean("lag_mean") or 0.0) <= 1.1]
        worst = max(drift, key=lambda window: window.mean("kl_behaviour") or 0.0, default=RunHistory())
        if (kl := worst.mean("kl_behaviour") or 0.0) < LATER_KL:
            return None
        what = f"engine and learner disagree: kl_behaviour is {kl:.3f} at a lag of at most one step, up to step "
        what += f"{worst.recent[-1].get('step', 0)}"
        todo.insert(0, "`foray status`: which version has each engine; a node's log says what it loaded")
    return Found(
        what,
        f"logprob_gap {GAP} or more where lag_max is 0 and a step is one update, or kl_behaviour {LATER_KL} or more at "
        "a lag of one step",
        tuple(todo),
        run.trajectories,
    )


_UNEQUAL = (
    "the same dtype on both sides; with bfloat16 learner.model.fp32_lm_head and engine.kind.fp32_lm_head",
    "sampling that changes the distribution: run.temperature of both, run.top_p 1, run.top_k -1, no logit processors",
    "an attached SGLang: --enable-fp32-lm-head, the same model revision and attention backend",
    "until it is repaired: learner.algorithm.rejection masks the outliers",
)
