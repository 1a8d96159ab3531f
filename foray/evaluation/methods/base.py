"""The interface of methods, and what a method may do in an episode: generate and search. Everything is recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import Field

from foray.evaluation.models import EpisodeFailed, Generated, LanguageModel, ModelPrompt
from protocol.messages import Sampling
from protocol.search import Passage
from protocol.settings import Settings
from rollout_server.search.base import Search


class MethodSettingsBase(Settings):
    """Base of the settings of a method. A member of the union adds its `type` and its options."""

    searches: ClassVar[bool] = True
    """Whether the method needs a retriever."""
    prompts: ClassVar[tuple[str, ...]] = ()
    """Prompts that it uses (fields of `Prompts`)."""
    logprobs: ClassVar[bool] = False
    """Whether it needs token log-probs, and a model that continues its own reply."""

    type: str
    max_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of each generation."""


@dataclass
class Episode:
    """One question to one method, while it runs. Records segments, searches, tokens and versions."""

    model: LanguageModel
    search_for: Search
    sampling: Sampling
    segments: list[dict[str, Any]] = field(default_factory=list)
    searches: int = 0
    turns: int = 0
    tokens_generated: int = 0
    tokens_read: int = 0
    versions: dict[str, None] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return the time since the episode began."""
        return time.monotonic() - self.began

    async def generate(self, prompt: ModelPrompt, *, max_tokens: int, stop: Sequence[str] = ()) -> Generated:
        """Continue `prompt`. Raises EpisodeFailed."""
        return self.record(
            prompt.text, await self.model.complete(prompt, max_tokens=max_tokens, stop=stop, sampling=self.sampling)
        )

    def record(self, asked: str, said: Generated) -> Generated:
        """Record a generation that the text `asked` led to, and return it."""
        self.turns += 1
        self.tokens_generated += said.num_tokens
        self.tokens_read += said.num_read
        if said.version:
            self.versions[said.version] = None
        self.segments.append({"owner": "prompt", "text": asked, "tokens": said.num_read})
        self.segments.append({"owner": "policy", "text": said.text, "tokens": said.num_tokens})
        return said

    async def search(self, query: str) -> tuple[Passage, ...]:
        """Return the passages for a query, best first. Raises EpisodeFailed if the search failed."""
        result = await self.search_for(query)
        self.searches += 1
        if result.error:
            raise EpisodeFailed(f"search_{result.error}")
        self.segments.append(
            {
                "owner": "environment",
                "text": "\n".join(passage.contents for passage in result.passages) + "\n",
                "query": query,
                "passage_ids": [passage.id for passage in result.passages],
                "titles": [passage.title for passage in result.passages],
            }
        )
        return result.passages


class Method(Protocol):
    """A way to answer a question. Built once, used for many episodes at the same time: it has no state."""

    async def __call__(self, question: str, episode: Episode) -> str | None:
        """Return the answer, None if the model gave none in the expected form. Raises EpisodeFailed."""
