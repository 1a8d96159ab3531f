"""Methods that search before they generate: naive RAG, and Iter-RetGen."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from foray.evaluation.methods.base import Episode, MethodSettingsBase
from foray.evaluation.methods.prompts import Prompts


class NaiveRAGSettings(MethodSettingsBase):
    """One search with the question, then an answer from its passages (arXiv:2005.11401)."""

    prompts: ClassVar[tuple[str, ...]] = ("rag",)
    type: Literal["rag"] = "rag"
    max_tokens: int = Field(default=64, ge=1)
    """Maximum tokens of the answer."""


class NaiveRAG:
    """Searches once, answers once."""

    def __init__(self, settings: NaiveRAGSettings, prompts: Prompts) -> None:
        self._settings, self._prompts = settings, prompts

    async def __call__(self, question: str, episode: Episode) -> str | None:
        prompt = self._prompts.fill("rag", question, await episode.search(question))
        said = await episode.generate(prompt, max_tokens=self._settings.max_tokens, stop=self._prompts.stops)
        return self._prompts.answer_in(said.text)


class IterRetGenSettings(MethodSettingsBase):
    """Alternate retrieval and generation: each search is the question with the last generation (arXiv:2305.15294)."""

    prompts: ClassVar[tuple[str, ...]] = ("rag_cot",)
    type: Literal["iter_retgen"] = "iter_retgen"
    iterations: int = Field(default=3, ge=1)
    """Rounds of a search and a generation. 3: the default of FlashRAG, with which ReSearch's baselines were run."""


class IterRetGen:
    """Iter-RetGen: y_t = LM(D_t, q) with D_t = R(y_{t-1} || q) and D_1 = R(q), as in section 3.2 of the paper."""

    def __init__(self, settings: IterRetGenSettings, prompts: Prompts) -> None:
        self._settings, self._prompts = settings, prompts

    async def __call__(self, question: str, episode: Episode) -> str | None:
        text = ""
        for _ in range(self._settings.iterations):
            passages = await episode.search(f"{text.strip()} {question}".strip())
            prompt = self._prompts.fill("rag_cot", question, passages)
            text = (await episode.generate(prompt, max_tokens=self._settings.max_tokens, stop=self._prompts.stops)).text
        return self._prompts.answer_in(text)
