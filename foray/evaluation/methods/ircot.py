"""IRCoT: retrieval interleaved with a chain of thought. Trivedi et al., ACL 2023, arXiv:2212.10509."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from foray.evaluation.methods.base import Episode, MethodSettingsBase
from foray.evaluation.methods.prompts import Prompts, final_answer, first_sentence


class IRCoTSettings(MethodSettingsBase):
    """Each sentence of the reasoning is the next query; its passages join those found before (arXiv:2212.10509)."""

    prompts: ClassVar[tuple[str, ...]] = ("next_step",)
    type: Literal["ircot"] = "ircot"
    max_tokens: int = Field(default=100, ge=1)
    """Maximum tokens of a sentence."""
    steps: int = Field(default=8, ge=1)
    """Maximum sentences of the reasoning (the paper's 8)."""
    passages: int = Field(default=15, ge=1)
    """Maximum passages collected (the paper's 15)."""


class IRCoT:
    """Retrieves with the question, then alternates: one sentence of reasoning, one search with it.

    The reasoning ends with "the answer is", or after `steps` sentences: then there is no answer. The paper's separate
    reader, which answers once more from the collected passages, is not used.
    """

    def __init__(self, settings: IRCoTSettings, prompts: Prompts) -> None:
        self._settings, self._prompts = settings, prompts

    async def __call__(self, question: str, episode: Episode) -> str | None:
        collected = {passage.id: passage for passage in await episode.search(question)}
        thoughts: list[str] = []
        for step in range(self._settings.steps):
            prompt = self._prompts.fill("next_step", question, list(collected.values()), " ".join(thoughts))
            said = await episode.generate(prompt, max_tokens=self._settings.max_tokens, stop=self._prompts.stops)
            thought = first_sentence(said.text)[0].strip()
            # the abbreviation in "So the answer is: J. Austen." is no end of a sentence
            answer = final_answer(said.text if final_answer(thought) else thought)
            if answer or not thought:
                return answer
            thoughts.append(thought)
            if step + 1 < self._settings.steps:
                for passage in await episode.search(thought):
                    if len(collected) < self._settings.passages:
                        collected.setdefault(passage.id, passage)
        return None
