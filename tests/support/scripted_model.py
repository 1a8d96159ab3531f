"""A language model that answers from a script, and a search over a few passages, for tests of methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from foray.evaluation.models import Generated, ModelPrompt, cut_at_stop
from protocol.messages import Sampling
from protocol.search import Passage
from rollout_server.search.base import SearchResult

Reply = str | Sequence[tuple[str, float]]
"""A text, whose words are certain, or (text, probability) of each token."""


class ScriptedModel:
    """Answers with `reply(prompt, number of the call)`. `asked`: the prompts, with the reply that they continue."""

    has_logprobs = True

    def __init__(self, reply: Callable[[ModelPrompt, int], Reply]) -> None:
        self._reply = reply
        self.asked: list[ModelPrompt] = []

    async def complete(
        self, prompt: ModelPrompt, *, max_tokens: int, stop: Sequence[str], sampling: Sampling
    ) -> Generated:
        self.asked.append(prompt)
        said = self._reply(prompt, len(self.asked) - 1)
        tokens = [(said, 1.0)] if isinstance(said, str) else list(said)
        text, cut = cut_at_stop("".join(token for token, _ in tokens), stop)
        logs = tuple((token, math.log(probability)) for token, probability in tokens)
        return Generated(text, logs, len(tokens), len(prompt.text.split()), cut, "1.0")


class ScriptedSearch:
    """Finds the passages whose title occurs in the query; `asked` are the queries. `error`: every search fails."""

    def __init__(self, passages: dict[str, str], error: str = "") -> None:
        self._passages, self._error = passages, error
        self.asked: list[str] = []

    async def __call__(self, query: str) -> SearchResult:
        self.asked.append(query)
        if self._error:
            return SearchResult((), 0.0, self._error)
        hits = (
            Passage(id=f"p-{title}", contents=f'"{title}"\n{text}')
            for title, text in self._passages.items()
            if title.lower() in query.lower()
        )
        return SearchResult(tuple(hits), 0.0)
