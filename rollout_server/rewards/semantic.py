"""Likeness of meaning: the best cosine between the answer and a gold answer, embedded by an OpenAI-compatible service.

    score = clip((cosine - floor) / (1 - floor), 0, 1)

Sentence encoders seldom go below a cosine of 0.5 or so even for unrelated texts: `floor` is where it starts to count.
Texts of all trajectories that end about the same time go out as one `POST /embeddings`. A vector that is missing, not
finite, zero or of another length than its neighbours is a failure, never a score.
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

Vector = npt.NDArray[np.float64]


class Semantic:
    """See the module. Without an answer, or without gold answers, 0 and nothing is asked."""

    name = "semantic"

    def __init__(self, settings: SemanticSettings, resources: RewardResources) -> None:
        self._settings, self._endpoint = settings, JsonEndpoint(settings, "/embeddings", resources)
        self._embed: BatchLoader[str, Vector] = BatchLoader(
            resources,
            self._fetch,
            window_s=settings.window_s,
            batch_size=settings.batch_size,
            cache=settings.cache,
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
        return self._settings.prefix + text.strip()[: self._settings.max_chars]

    async def _fetch(self, texts: Sequence[str]) -> list[Vector]:
        body = {"model": self._settings.model, "input": list(texts), "encoding_format": "float"}
        return await self._endpoint.ask(body, lambda reply: read_vectors(reply, len(texts)))


def read_vectors(reply: Any, count: int) -> list[Vector]:
    """[count] unit vectors in the order of the input. Raises ValueError (or KeyError, TypeError) for anything else."""
    data = reply["data"]
    if len(data) != count or {int(item["index"]) for item in data} != set(range(count)):
        raise ValueError(f"{len(data)} embeddings for {count} texts, or not one of each")
    rows = np.asarray([item["embedding"] for item in sorted(data, key=lambda item: int(item["index"]))], np.float64)
    if rows.ndim != 2 or not rows.size:
        raise ValueError("the embeddings are not vectors of one length")
    with np.errstate(over="ignore", invalid="ignore"):  # they show as not finite
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all() or not norms.all():
        raise ValueError("an embedding is not finite, or zero")
    return list(rows / norms)


class SemanticSettings(EndpointSettings):
    """Cosine of the answer's embedding to the nearest gold answer's."""

    type: Literal["semantic"] = "semantic"
    floor: float = Field(default=0.0, ge=-1, lt=1)
    """Cosine that scores 0; 1 scores 1, and in between it is a straight line."""
    prefix: str = ""
    """Put before every text, e.g. `query: ` for E5."""
    max_chars: int = Field(default=2000, ge=1)
    """Longer texts are cut."""
    batch_size: int = Field(default=64, ge=1)
    """Most texts of one request."""
    window_s: float = Field(default=0.01, ge=0)
    """How long a text waits for others to share its request."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Longest wait for one answer: waiting in line, every attempt and the pauses between them."""
