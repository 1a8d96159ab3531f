"""`POST /v1/episodes`: questions in, finished episodes out, through the running engines. Evaluation, chat and demo.

These episodes have no seq and never reach the ledger or the learner.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from protocol.messages import Name, Question, Sampling, Segment, Status, Text
from rollout_server.engine.base import Generate
from rollout_server.episode import Episode
from rollout_server.fleet import Fleet
from rollout_server.group import EpisodeResult, run_episode
from rollout_server.metrics import Stats
from rollout_server.redis_client import Outage, RedisClient, RedisDown, RedisFull
from rollout_server.search.base import Search
from rollout_server.search.none import NoSearch

log = logging.getLogger(__name__)

PIN_MS = 10_000
"""The pin outlives a server that dies by so much. Renewed five times as often."""
SETTLE_S = 0.3
"""A node may just have looked for the pin and begun a swap: so long until it says that it is loading."""

EPISODE_LIMIT = 100_000
"""Most episodes of one request."""


class Asked(BaseModel):
    """A question of the request. Its text is called `question`, as in data sets, or `text`, as in our messages."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Name
    question: Annotated[Text, Field(validation_alias=AliasChoices("question", "text"))]
    answers: tuple[Text, ...] = ()

    def as_message(self) -> Question:
        return Question(id=self.id, text=self.question, answers=self.answers)


class EpisodesRequest(BaseModel):
    """Body of the request. Unknown keys are refused: a misspelt `pin` would silently mix policy versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: tuple[Asked, ...] = Field(min_length=1, max_length=EPISODE_LIMIT)
    n: Annotated[int, Field(ge=1, le=512)] = 1
    """Episodes of each question."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that make up this probability; 1: from all."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Draw from this many of the likeliest tokens; -1 (or 0): from all."""
    search: bool = True
    """False: every search finds nothing, and no tool brings a document."""
    pin: bool = False
    """True: engines hold their versions until the last episode has ended, and any READY engine serves."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Episodes in flight at once."""
    stream: bool = False
    """True: server-sent events, one for each episode as it ends."""

    @model_validator(mode="after")
    def _not_too_many(self) -> EpisodesRequest:
        if len(self.questions) * self.n > EPISODE_LIMIT:
            raise ValueError(
                f"{len(self.questions)} questions times n = {self.n} are more than {EPISODE_LIMIT} episodes"
            )
        return self


class Episodes:
    """Runs requests. `RedisDown` and `RedisFull` are raised only for a request that wants the pin."""

    def __init__(
        self, episode: Episode, generate: Generate, search: Search, fleet: Fleet, redis: RedisClient, stats: Stats
    ) -> None:
        self._episode, self._generate, self._search, self._stats = episode, generate, search, stats
        self._closed_book = episode.without_documents()
        self._pin = Pin(redis, fleet, stats)

    async def run(self, request: EpisodesRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Finished episodes, as they end. Closing the iterator cancels those in flight and lets go of the pin."""
        async with self._pin.held() if request.pin else nullcontext(), aclosing(self._all(request)) as finished:
            async for one in finished:
                yield one

    async def _all(self, request: EpisodesRequest) -> AsyncGenerator[dict[str, Any], None]:
        places = asyncio.Semaphore(request.concurrency)
        tasks = [
            asyncio.create_task(self._one(request, question, index, places), name=f"episode-{question.id}-{index}")
            for question in (asked.as_message() for asked in request.questions)
            for index in range(request.n)
        ]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(
        self, request: EpisodesRequest, question: Question, index: int, places: asyncio.Semaphore
    ) -> dict[str, Any]:
        async with places:
            result = await run_episode(
                self._episode if request.search else self._closed_book,
                question,
                self._generate,
                self._search if request.search else NoSearch(),
                Sampling(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or -1),
                group=f"{id(request)}-{question.id}",
                pinned=request.pin,
            )
        self._stats.counts["episodes"] += 1
        self._stats.counts["episode_tokens"] += result.trajectory.num_sampled
        return self._describe(question, index, result)

    def _describe(self, question: Question, index: int, result: EpisodeResult) -> dict[str, Any]:
        trajectory = result.trajectory
        return {
            "question_id": question.id,
            "index": index,
            "status": str(trajectory.status),
            "cause": trajectory.cause,
            "answer": trajectory.answer,
            "reward": trajectory.reward,
            "rewards": dict(trajectory.rewards),
            "searches": trajectory.searches,
            "tool_calls": dict(Counter(segment.tool for segment in trajectory.segments if segment.tool)),
            "turns": trajectory.turns,
            "tokens": len(trajectory.ids),
            "tokens_generated": trajectory.num_sampled,
            "seconds": trajectory.seconds,
            "text": result.text,
            "segments": [self._segment(segment) for segment in trajectory.segments],
        }

    def _segment(self, segment: Segment) -> dict[str, Any]:
        versions = list(dict.fromkeys(span.version.label for span in segment.spans))
        return {
            "owner": str(segment.owner),
            "text": self._episode.tokens.decode(segment.ids.tolist()),
            "tokens": len(segment.ids),
            # two versions: the weights changed while the turn was sampled
            "version": "+".join(versions),
            "tool": segment.tool,
            "query": segment.query,
            "passage_ids": list(segment.passage_ids),
            "error": segment.error,
        }


def summarise(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the episodes that say something about the policy; `failed` counts the others.

    em is None when the settings measure no exact match.
    """
    valid = [e for e in episodes if Status(e["status"]).votes]
    scored = [e["rewards"]["em"] for e in valid if "em" in e["rewards"]]
    return {
        "em": sum(scored) / len(scored) if scored else None,
        "count": len(episodes),
        "failed": len(episodes) - len(valid),
        "searches_mean": sum(e["searches"] for e in valid) / len(valid) if valid else 0.0,
        "tokens_generated": sum(e["tokens_generated"] for e in episodes),
    }


class Pin:
    """The key that makes nodes put off weight swaps, while at least one request here holds it."""

    def __init__(self, redis: RedisClient, fleet: Fleet, stats: Stats) -> None:
        self._redis, self._fleet, self._stats = redis, fleet, stats
        self._holders = 0
        self._renewing: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()  # the last to leave must not remove what the next has just set

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Raises RedisDown or RedisFull when the pin cannot be set."""
        self._holders += 1
        try:
            async with self._changing:
                if self._renewing is None:
                    await self._set()
                    self._renewing = asyncio.create_task(self._renew(), name="evaluation-pin")
            await asyncio.sleep(SETTLE_S)
            self._fleet.install(await self._fleet.read())
            yield
        finally:
            self._holders -= 1
            async with self._changing:
                if not self._holders and self._renewing is not None:
                    self._renewing.cancel()
                    self._renewing = None
                    await self._remove()

    async def _set(self) -> None:
        await self._redis.batch(("SET", self._redis.keys.evaluation, self._stats.id, "PX", PIN_MS))

    async def _renew(self) -> None:
        """Consumes time; produces a pin that does not lapse; waits a fifth of its life; ended by cancellation."""
        outage = Outage("pinning the versions for an evaluation", self._stats.waits, longest_s=PIN_MS / 5000)
        while True:
            await asyncio.sleep(PIN_MS / 5000)
            try:
                await self._set()
            except (RedisDown, RedisFull) as error:
                await outage.wait(error)
            else:
                outage.over()

    async def _remove(self) -> None:
        key = self._redis.keys.evaluation
        try:
            (holder,) = await self._redis.batch(("GET", key))
            if holder == self._stats.id.encode():
                await self._redis.batch(("DEL", key))
        except RedisDown as error:
            log.info("the evaluation pin is left to lapse: %s", error)
