"""Methods without a retriever: a direct answer, and chain of thought."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from foray.evaluation.methods.base import Episode, MethodSettingsBase
from foray.evaluation.methods.prompts import Prompts, final_answer


class DirectSettings(MethodSettingsBase):
    """The model answers from its own knowledge."""

    searches: ClassVar[bool] = False
    prompts: ClassVar[tuple[str, ...]] = ("direct",)
    type: Literal["direct"] = "direct"
    max_tokens: int = Field(default=64, ge=1)
    """Maximum tokens of the answer."""


class Direct:
    """Answers at once."""

    def __init__(self, settings: DirectSettings, prompts: Prompts) -> None:
        self._settings, self._prompts = settings, prompts

    async def __call__(self, question: str, episode: Episode) -> str | None:
        prompt = self._prompts.fill("direct", question)
        said = await episode.generate(prompt, max_tokens=self._settings.max_tokens, stop=self._prompts.stops)
        # a tagged prompt ends with the opening tag
        return said.text.strip() or None if self._prompts.tagged else self._prompts.answer_in(said.text)


class ChainOfThoughtSettings(MethodSettingsBase):
    """The model reasons in words before it answers, from its own knowledge (arXiv:2205.11916)."""

    searches: ClassVar[bool] = False
    prompts: ClassVar[tuple[str, ...]] = ("cot",)
    type: Literal["cot"] = "cot"


class ChainOfThought:
    """Reasons, then answers."""

    def __init__(self, settings: ChainOfThoughtSettings, prompts: Prompts) -> None:
        self._settings, self._prompts = settings, prompts

    async def __call__(self, question: str, episode: Episode) -> str | None:
        prompt = self._prompts.fill("cot", question)
        said = await episode.generate(prompt, max_tokens=self._settings.max_tokens, stop=self._prompts.stops)
        return final_answer(said.text)
