r"""ReSearch's reward on policy-owned text (`src/verl/utils/reward_score/re_search.py` of Agent-RL/ReSearch at 4bdb872).

A whole reward by itself, so it usually stands alone with weight 1, with a template whose answers are boxed:

    ill-formed, or over length   0
    well-formed, F1 > 0          F1 of the boxed text against the best gold answer
    well-formed, F1 = 0          floor, 0.1

Well-formed: as many <think> as </think>, at least one; exactly one <answer> and one </answer>, in the last turn, with a
\boxed{} in between whose braces close; every turn before it ends in a search, or in a call of a tool, that was
answered, and the last leaves no search open; no <result> that the policy wrote itself. Over length: a limit ended the
last turn, not the policy.

ReSearch looks at the whole text after "Assistant:" (base) or "<|im_start|>assistant" (instruct), documents included,
wants the tokenizer's end-of-sequence token there, and takes a <result> that the policy invented for a real one. Here
owners and finish reasons are known, so both kinds of model have the same rule. With `metric: em` it is the reward of
its preview (12f6cb1): 1, 0.1, 0. An F1 below the floor earns less than a wrong answer: so it is in ReSearch.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from pydantic import Field

from protocol.messages import Status
from rollout_server.environment.actions import boxed
from rollout_server.rewards.base import RewardInput, RewardSettingsBase, TurnText
from rollout_server.rewards.text_match import answers_match, f1

_ANSWER = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
_SEARCH = re.compile(r"<search>.*?</search>", re.DOTALL)
_FOREIGN = re.compile(r"</?result>")
_SEARCHING = re.compile(r"</?search>")


@lru_cache
def _call(tool: str) -> re.Pattern[str]:
    return re.compile(rf"<{tool}>.*?</{tool}>", re.DOTALL)


def boxed_answer(turns: tuple[TurnText, ...]) -> str | None:
    """The boxed text of a well-formed trajectory, None of any other; see the module."""
    if not turns:
        return None
    searches = []
    for turn in turns[:-1]:
        found = (_call(turn.tool) if turn.tool else _SEARCH).search(turn.policy)
        if found is None:
            return None
        # A token may reach past the tag that ended the turn: what stands there was not acted upon.
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
    """The table of the module."""

    name = "research"

    def __init__(self, settings: ReSearchSettings) -> None:
        self._settings = settings

    async def __call__(self, outcome: RewardInput) -> float:
        answer = boxed_answer(outcome.turns)
        if answer is None or outcome.status is not Status.ANSWERED or outcome.turns[-1].finish == "length":
            return 0.0
        return max((self._compare(answer, gold) for gold in outcome.question.answers), default=0.0) or (
            self._settings.floor
        )

    def _compare(self, answer: str, gold: str) -> float:
        if self._settings.metric == "em":
            return float(answers_match(answer, gold))
        return f1(answer, gold)


class ReSearchSettings(RewardSettingsBase):
    """ReSearch's reward: format first, then F1 of the boxed answer."""

    type: Literal["research"] = "research"
    metric: Literal["f1", "em"] = "f1"
    """f1 as in ReSearch, em as in its preview."""
    floor: float = Field(default=0.1, ge=0)
    """A wrong answer in a well-formed trajectory."""
