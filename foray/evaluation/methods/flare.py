"""FLARE: forward-looking active retrieval. Jiang et al., EMNLP 2023, arXiv:2305.06983 (FLARE_direct, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from foray.evaluation.methods.base import Episode, MethodSettingsBase
from foray.evaluation.methods.prompts import Prompts, final_answer, first_sentence
from foray.evaluation.models import Generated, ModelPrompt

MASK = 0.4
"""beta: tokens below this probability are left out of the query, as in the authors' configuration."""


class FlareSettings(MethodSettingsBase):
    """Retrieve when a token of the next sentence is improbable, with that sentence as the query (arXiv:2305.06983).

    Thresholds and look-ahead are those of the authors' configuration for 2WikiMultihopQA.
    """

    prompts: ClassVar[tuple[str, ...]] = ("cot", "rag_cot")
    logprobs: ClassVar[bool] = True
    type: Literal["flare"] = "flare"
    max_tokens: int = Field(default=64, ge=1)
    """Tokens generated to find the next sentence."""
    threshold: float = Field(default=0.8, ge=0, le=1)
    """theta: retrieve if a token's probability is below it. 0: never, 1: always."""
    sentences: int = Field(default=8, ge=1)
    """Maximum sentences of the reply."""


class Flare:
    """For each sentence: s = LM(x, y); if a token of s has a probability below theta, then s = LM(D(q), x, y), where
    the query q is s without its tokens below beta. Then y = y s. The reply ends with "the answer is".
    """

    def __init__(self, settings: FlareSettings, prompts: Prompts) -> None:
        self._settings, self._prompts = settings, prompts

    async def __call__(self, question: str, episode: Episode) -> str | None:
        plain = self._prompts.fill("cot", question)
        reply = ""
        for _ in range(self._settings.sentences):
            said = await self._continue(plain, reply, episode)
            sentence = first_sentence(said.text)[0]
            sure = tokens_within(said.tokens, len(sentence))
            if any(math.exp(logprob) < self._settings.threshold for _, logprob in sure):
                kept = "".join(text for text, logprob in sure if math.exp(logprob) >= MASK)
                passages = await episode.search(kept.strip() or question)
                said = await self._continue(self._prompts.fill("rag_cot", question, passages), reply, episode)
                sentence = first_sentence(said.text)[0]
            reply += sentence
            if (answer := final_answer(sentence)) or not sentence.strip() or (said.stopped and said.text == sentence):
                return answer
        return None

    async def _continue(self, prompt: ModelPrompt, reply: str, episode: Episode) -> Generated:
        prompt = ModelPrompt(prompt.pieces, prompt.chat, reply)
        return await episode.generate(prompt, max_tokens=self._settings.max_tokens, stop=self._prompts.stops)


def tokens_within(tokens: Sequence[tuple[str, float]], length: int) -> list[tuple[str, float]]:
    """Return the tokens that begin within the first `length` characters."""
    found, at = [], 0
    for text, logprob in tokens:
        if at >= length:
            break
        found.append((text, logprob))
        at += len(text)
    return found
