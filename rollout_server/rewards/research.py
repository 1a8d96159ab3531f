r"""ReSearch's reward on policy-owned text (`src/verl/utils/reward_score/re_search.py` of Agent-RL/ReSearch at 4bdb872).

Usually the only reward, with weight 1, and a template with boxed answers:

    ill-formed, or over length   0
    well-formed, F1 > 0          F1 of the boxed text against the best gold answer
    well-formed, F1 = 0          0.1

Well-formed: as many <think> as </think>, at least one; exactly one <answer> and one </answer>, in the last turn, with a
\boxed{} with closed braces in between; every earlier turn ends with a search or tool call that got an observation, and
the last one has no unfinished search; no <result> written by the policy. Over length: the last turn was ended by a
limit and not by the policy.

ReSearch checks the whole text after "Assistant:" (base) or "<|im_start|>assistant" (instruct), with the documents,
requires the tokenizer's end-of-sequence token there, and accepts a <result> invented by the policy. Here owners and
finish reasons are known, so base and instruct models have the same rule. With `metric: em` it is the reward of its
preview (12f6cb1): 1, 0.1, 0. As in ReSearch, an F1 below 0.1 scores less than a wrong answer.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from protocol.messages import Status
from rollout_server.environment.actions import boxed
from rollout_server.rewards.base import RewardInput, RewardSettingsBase, TurnText
from rollout_server.rewards.text_match import answers_match, f1

FLOOR = 0.1
"""Score of a wrong answer in a well-formed trajectory."""
_ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
_SEARCH = re.compile(r"<search>.*?</search>", re.DOTALL)
_FOREIGN = re.compile(r"</?result>")
_SEARCHING = re.compile(r"</?search>")


@lru_cache
def _call(tool: str) -> re.Pattern[str]:
    return re.compile(rf"<{tool}>.*?</{tool}>", re.DOTALL)


def boxed_answer(turns: tuple[TurnText, ...]) -> str | None:
    """Return the boxed text of a well-formed trajectory (see the module docstring), else None."""
    if not turns:
        return None
    searches = []
    for turn in turns[:-1]:
        found = (_call(turn.tool) if turn.tool else _SEARCH).search(turn.policy)
        if found is None:
            return None
        # A token may extend beyond the tag that ended the turn: text after it had no effect.
        searches.append(turn.policy[: found.end()])
    last = turns[-1].policy
    whole = "".join([*searches, last])
    thoughts = whole.count("<think>")
    if not thoughts or thoughts != whole.count("</think>") or _FOREIGN.search(whole) or _SEARCHING.search(last):
        return None
    if whole.count("<answer>") != 1 or whole.count("</answer>") != 1:
        return None
    answer = _ANSWER.search(last)
    return None if answer is None else boxed(answer[1])


class ReSearch:
    """Scores a trajectory by the table in the module docstring."""

    name = "research"

    def __init__(self, settings: ReSearchSettings) -> None:
        self._settings = settings

    async def __call__(self, outcome: RewardInput) -> float:
        answer = boxed_answer(outcome.turns)
        if answer is None or outcome.status is not Status.ANSWERED or outcome.turns[-1].finish == "length":
            return 0.0
        return max((self._compare(answer, gold) for gold in outcome.question.answers), default=0.0) or FLOOR

    def _compare(self, answer: str, gold: str) -> float:
        if self._settings.metric == "em":
            return float(answers_match(answer, gold))
        return f1(answer, gold)


class ReSearchSettings(RewardSettingsBase):
    """ReSearch's reward: the format, then F1 of the boxed answer."""

    type: Literal["research"] = "research"
    metric: Literal["f1", "em"] = "f1"
    """f1 (as in ReSearch) or em (as in its preview)."""
