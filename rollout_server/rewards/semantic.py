"""Semantic similarity: the best cosine of the answer and a gold answer, embedded by an OpenAI-compatible service.

    score = clip((cosine - floor) / (1 - floor), 0, 1)

Sentence encoders rarely give a cosine below about 0.5, even for unrelated texts; `floor` is the cosine that scores 0.
Texts of trajectories that end at about the same time are sent as one `POST /embeddings`. A vector that is missing, not
finite, zero or of a different length is a failure, never a score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rollout_server.rewards.base import RewardInput
from rollout_server.rewards.remote import BatchLoader, EndpointSettings, JsonEndpoint
from rollout_server.rewards.resources import RewardResources

MAX_CHARS = 2000
"""Maximum characters of a text, as many as encoders of 512 tokens read; longer ones are cut."""
BATCH_SIZE = 64
"""Maximum texts per request."""
WINDOW_S = 0.01
"""Seconds that a text waits for others, to share a request."""
Vector = npt.NDArray[np.float64]


class Semantic:
    """Scores the cosine. Without an answer or gold answers, it returns 0 without a request."""

    name = "semantic"

    def __init__(self, settings: SemanticSettings, resources: RewardResources) -> None:
        self._settings, self._endpoint = settings, JsonEndpoint(settings, "/embeddings", resources)
        self._embed: BatchLoader[str, Vector] = BatchLoader(
            resources,
            self._fetch,
            window_s=WINDOW_S,
            batch_size=BATCH_SIZE,
            name="semantic",
        )

    async def __call__(self, outcome: RewardInput) -> float:
        golds = [gold for gold in outcome.question.answers if gold.strip()]
        if outcome.answer is None or not outcome.answer.strip() or not golds:
            return 0.0
        answer, *others = await asyncio.gather(*(self._embed(self._text(text)) for text in (outcome.answer, *golds)))
        cosine = max(float(answer @ other) for other in others)
        floor = self._settings.floor
        return min(1.0, max(0.0, (cosine - floor) / (1 - floor)))

    def _text(self, text: str) -> str:
        return self._settings.prefix + text.strip()[:MAX_CHARS]

    async def _fetch(self, texts: Sequence[str]) -> list[Vector]:
        body = {"model": self._settings.model, "input": list(texts), "encoding_format": "float"}
        return await self._endpoint.ask(body, lambda reply: read_vectors(reply, len(texts)))


def read_vectors(reply: Any, count: int) -> list[Vector]:
    """Return [count] unit vectors in the order of the input. Raises ValueError, KeyError or TypeError otherwise."""
    data = reply["data"]
    if len(data) != count or {int(item["index"]) for item in data} != set(range(count)):
        raise ValueError(f"{len(data)} embeddings for {count} texts, or duplicate indices")
    rows = np.asarray([item["embedding"] for item in sorted(data, key=lambda item: int(item["index"]))], np.float64)
    if rows.ndim != 2 or not rows.size:
        raise ValueError("the embeddings are not vectors of equal length")
    with np.errstate(over="ignore", invalid="ignore"):  # they give non-finite values, which are checked below
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all() or not norms.all():
        raise ValueError("an embedding is zero or not finite")
    return list(rows / norms)


class SemanticSettings(EndpointSettings):
    """Cosine of the embeddings of the answer and the nearest gold answer."""

    type: Literal["semantic"] = "semantic"
    floor: float = Field(default=0.0, ge=-1, lt=1)
    """Cosine that scores 0. The score grows linearly to 1 at a cosine of 1."""
    prefix: str = ""
    """Prefix of every text, e.g. `query: ` for E5."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Timeout of one answer in seconds: queueing, attempts and back-off."""
