"""Reward hacking: what the answers of the trained trajectories have in common, and what it earned them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from foray.watch.findings.base import ENOUGH, Evidence, Found, TrainedTrajectory
from rollout_server.rewards.text_match import YES_NO, comparable, is_yes_no

WITHOUT_SEARCH = 0.5
YES_NO_ENOUGH, YES_NO_BIAS, YES_NO_ELSEWHERE = 20, 0.3, 0.2
TITLES = 0.5
STUFFED, TIMES_GOLD, FEWEST_WORDS = 0.3, 3, 6
_REWARD = "a reward that also pays for the evidence: {type: retrieval_hit, by: passage, share: true} with a weight"
_READ = "read the trajectories below: what earns a reward is what is learned"


def answers_without_search(run: Evidence) -> Found | None:
    """Find answers that were given without a search, or a policy that never searches."""
    if (
        run.searches
        and len(run.answered) < ENOUGH <= len(run.trajectories)
        and not any(p.trajectory.searches for p in run.trajectories)
    ):
        return Found(
            f"none of the last {len(run.trajectories)} trajectories searched, and few answered",
            f"no search in any of them, and less than {ENOUGH} answers",
            (
                "read why no search is recognised: rollout.episode.template, or a model that does not know it",
                "a warm start on demonstrations: `foray data demonstrate`, then `foray sft`",
            ),
            run.trajectories,
        )
    without = [sample for sample in run.answered if not sample.trajectory.searches]
    if not run.searches or (share := _share(without, run.answered)) < WITHOUT_SEARCH:
        return None
    others = [sample for sample in run.answered if sample.trajectory.searches]
    with_search = f", with a search {_reward(others):.2f}" if others else ""
    return Found(
        f"{share:.0%} of {len(run.answered)} answers came without a search; mean reward {_reward(without):.2f}"
        f"{with_search}",
        f"{WITHOUT_SEARCH:.0%} or more of the answers have no search before them",
        (
            "{type: missing_action} in rollout.episode.rewards, a penalty without a search; no search_cost meanwhile",
            _REWARD,
            "leave out questions that the model answers by heart: `foray eval --methods direct` finds them",
        ),
        _best(without),
    )


def yes_no_bias(run: Evidence) -> Found | None:
    """Find yes and no as answers where they do not belong, or one of them nearly always."""
    asked = [sample for sample in run.answered if is_yes_no(sample.question.answers)]
    others = [sample for sample in run.answered if not is_yes_no(sample.question.answers)]
    said = [sample for sample in others if comparable(sample.trajectory.answer) in YES_NO]
    rule = (
        f"yes or no in {YES_NO_ELSEWHERE:.0%} or more of other answers, or {YES_NO_BIAS:.0%} more often yes (or no) "
        "than the gold answers"
    )
    todo = (
        "balance yes and no among the questions, or leave them out: `foray data inspect` counts the answers",
        "the reward f1 or em gives a wrong yes or no nothing; a reward of your own may not",
        _READ,
    )
    if (share := _share(said, others)) >= YES_NO_ELSEWHERE:
        what = f"{share:.0%} of {len(others)} answers to questions that ask for something else are yes or no"
        return Found(what, rule, todo, _best(said))
    if len(asked) < YES_NO_ENOUGH:
        return None
    yes = [sample for sample in asked if comparable(sample.trajectory.answer) == "yes"]
    gold = fmean("yes" in map(comparable, sample.question.answers) for sample in asked)
    if abs(len(yes) / len(asked) - gold) < YES_NO_BIAS:
        return None
    what = (
        f"{len(yes) / len(asked):.0%} of {len(asked)} answers to yes-no questions are yes, of the gold ones {gold:.0%}"
    )
    return Found(what, rule, todo, tuple(sample for sample in asked if not sample.is_right))


def copied_titles(run: Evidence) -> Found | None:
    """Find wrong answers that are the title of a passage that the policy was shown."""
    copied = [sample for sample in run.answered if not sample.is_right and _is_title(sample)]
    if (share := _share(copied, run.answered)) < TITLES:
        return None
    return Found(
        f"{share:.0%} of {len(run.answered)} answers are the title of a passage, and wrong; mean reward "
        f"{_reward(copied):.2f}",
        f"{TITLES:.0%} or more of the answers are a shown passage's title and no gold answer",
        (
            "score the answer by em or f1 against the gold answers; lower the weight of rewards for passages",
            "demonstrations whose answer is in the text of a passage: `foray data demonstrate`, then `foray sft`",
            _READ,
        ),
        _best(copied),
    )


def keyword_stuffing(run: Evidence) -> Found | None:
    """Find answers of many words that earn no less than short ones."""
    stuffed = [sample for sample in run.answered if _words(sample.trajectory.answer) >= _most_words(sample)]
    others = [sample for sample in run.answered if _words(sample.trajectory.answer) < _most_words(sample)]
    if (share := _share(stuffed, run.answered)) < STUFFED or (others and _reward(stuffed) < _reward(others)):
        return None
    words = fmean(_words(sample.trajectory.answer) for sample in stuffed)
    short = f", shorter ones {_reward(others):.2f}" if others else ""
    return Found(
        f"{share:.0%} of {len(run.answered)} answers are stuffed: {words:.0f} words on average; mean reward "
        f"{_reward(stuffed):.2f}{short}",
        f"{STUFFED:.0%} or more of the answers have {TIMES_GOLD} times the words of the gold answer, at least "
        f"{FEWEST_WORDS}, and earn no less than the others",
        (
            "a reward that loses by extra words: {type: f1} or {type: em} instead of cover_em or one of your own",
            "{type: length_penalty} in rollout.episode.rewards",
        ),
        _best(stuffed),
    )


def _share(some: Sequence[TrainedTrajectory], of: Sequence[TrainedTrajectory]) -> float:
    """Return the share of `some`, 0 where there are too few to judge."""
    return len(some) / len(of) if len(of) >= ENOUGH else 0.0


def _reward(trajectories: Sequence[TrainedTrajectory]) -> float:
    return fmean(sample.trajectory.reward for sample in trajectories)


def _best(trajectories: Sequence[TrainedTrajectory]) -> tuple[TrainedTrajectory, ...]:
    """Return the trajectories with the highest reward first, of equals the newest."""
    return tuple(sorted(trajectories, key=lambda sample: -sample.trajectory.reward))


def _words(answer: str) -> int:
    return len(comparable(answer).split())


def _most_words(sample: TrainedTrajectory) -> int:
    gold = max((_words(answer) for answer in sample.question.answers), default=0)
    return max(FEWEST_WORDS, TIMES_GOLD * gold)


def _is_title(sample: TrainedTrajectory) -> bool:
    answer = comparable(sample.trajectory.answer)
    return bool(answer) and any(answer == comparable(title) for turn in sample.turns for title in turn.titles)
