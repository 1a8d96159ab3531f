"""`POST /v1/episodes`: run episodes on the running engines, for evaluation, chat and the demo.

These episodes have no seq and never reach the ledger or the learner. A request holds O(concurrency) episodes, besides
those that its caller keeps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, nullcontext
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from protocol.arrays import MAX_NAME, MAX_TEXT
from protocol.errors import ForayError
from protocol.messages import Question, Sampling, Scalar, Segment, Status
from protocol.runtime.lifecycle import cancel_all
from protocol.versions import PolicyVersion
from rollout_server.api.evaluation_pin import LOOK_S, EvaluationPin
from rollout_server.dispatch.fleet import Fleet
from rollout_server.engine.base import Generate
from rollout_server.environment.environment import Environment
from rollout_server.metrics import Stats
from rollout_server.rewards.text_match import score
from rollout_server.rollout.group import EpisodeResult, PlayOne, run_episode
from rollout_server.rollout.trajectory import run_trajectory
from rollout_server.search.base import NoSearch, Search

Name = Annotated[str, Field(max_length=MAX_NAME)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]

REPEATS = 3
"""Times to repeat an episode that was sampled at another version than the pinned one. After that it is returned as it
is: an engine whose version label differs from its node's will always differ."""
OF_TRAJECTORY = {"status", "cause", "reward", "rewards", "answer", "turns", "searches", "seconds"}
"""Fields of a trajectory that an episode has under the same name."""
EPISODE_LIMIT = 100_000
"""Maximum number of episodes in one request."""


class EpisodeQuestion(BaseModel):
    """A question of the request. The text is in `question` (as in data sets) or `text` (as in the message schema)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Name
    question: Annotated[Text, Field(validation_alias=AliasChoices("question", "text"))]
    answers: tuple[Text, ...] = ()
    meta: dict[Name, Scalar] = Field(default_factory=dict, max_length=64)
    """Metadata for rewards: `source` (the data set), `supporting_ids`."""

    def as_message(self) -> Question:
        return Question(id=self.id, text=self.question, answers=self.answers, meta=self.meta)


class EpisodesRequest(BaseModel):
    """Body of the request. Unknown keys are rejected: a misspelt `pin` would silently mix policy versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: tuple[EpisodeQuestion, ...] = Field(min_length=1, max_length=EPISODE_LIMIT)
    n: Annotated[int, Field(ge=1, le=512)] = 1
    """Episodes per question."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: keep the most likely tokens with this total probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Keep this many of the most likely tokens; -1 (or 0) keeps all."""
    search: bool = True
    """False: every search returns no passages, and no tool returns a document."""
    pin: bool = False
    """True: all episodes use one policy version, and engines keep it until the last episode has ended. False: the
    newest weights are used, as in training; without a learner, any READY engine."""
    version: Annotated[str, Field(pattern=r"^([0-9]+\.[0-9]+)?$")] = ""
    """With `pin`: the policy version to use, e.g. "1.25"; engines load it, and none after it. "": the one that most
    engines have."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum number of episodes in flight. Without `pin` and during training, all requests together run at most half
    as many as the training engines accept from this server (at least one each), so that training goes on."""
    stream: bool = False
    """True: reply with server-sent events, one for each finished episode."""

    @model_validator(mode="after")
    def _is_possible(self) -> EpisodesRequest:
        if self.version and not self.pin:
            raise ValueError("version needs pin: true")
        if len(self.questions) * self.n > EPISODE_LIMIT:
            raise ValueError(
                f"{len(self.questions)} questions times n = {self.n} exceed the limit of {EPISODE_LIMIT} episodes"
            )
        return self


class FleetUnknown(ForayError):
    """Redis has not answered yet, so the engines are unknown."""


class Episodes:
    """Runs requests. Raises `RedisUnavailable`, `RedisFull` and `PinLost` only for a request with `pin`, `FleetUnknown`
    only for one without.

    policy  fields that describe the policy in each episode, besides its version: run, lineage_id, digest of the
            initial model
    wait_s  timeout for the first engine table from Redis
    places  returns the number of requests that training engines accept from this server, None for no limit
    play_one  runs one trajectory
    """

    def __init__(
        self,
        environment: Environment,
        generate: Generate,
        search: Search,
        fleet: Fleet,
        pin: EvaluationPin,
        stats: Stats,
        *,
        policy: Callable[[], dict[str, str]],
        wait_s: float,
        places: Callable[[], int | None],
        play_one: PlayOne = run_trajectory,
    ) -> None:
        self._policy, self._wait_s, self._places, self._play_one = policy, wait_s, places, play_one
        self._environment, self._generate, self._search = environment, generate, search
        self._fleet, self._pin, self._stats = fleet, pin, stats
        self._closed_book = environment.without_documents()
        self._requests = 0
        self._unpinned = 0
        """Episodes in flight of requests without `pin`."""
        stats.gauges["evaluations"] = lambda: self._requests

    async def run(self, request: EpisodesRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Yield episodes as they end. Closing the iterator cancels those in flight and releases the pin."""
        self._requests += 1
        try:
            if not request.pin:
                await self._look()
            async with (
                self._pin.hold(PolicyVersion.parse(request.version)) if request.pin else nullcontext() as lost,
                aclosing(self._all(request, lost)) as finished,
            ):
                async for one in finished:
                    yield one
        finally:
            self._requests -= 1

    async def _look(self) -> None:
        """Wait for the first engine table from Redis: until then it is unknown whether there is a learner."""
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._fleet.looked:
                    await self._fleet.changed(timeout_s=LOOK_S)
        except TimeoutError:
            raise FleetUnknown(f"Redis did not return the list of engines within {self._wait_s:g} s") from None

    async def _all(
        self, request: EpisodesRequest, lost: asyncio.Future[None] | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Run the episodes. Raise the error of `lost` when it fails: the version can no longer be held."""
        waiting = ((question, index) for question in request.questions for index in range(request.n))
        running: set[asyncio.Task[dict[str, Any]]] = set()
        ended: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        if lost is not None:
            lost.add_done_callback(ended.put_nowait)
        try:
            while True:
                while self._may_start(request, len(running)) and (one := next(waiting, None)):
                    question = one[0].as_message()
                    name = f"episode-{question.id}-{one[1]}"
                    running.add(task := asyncio.create_task(self._one(request, question, one[1]), name=name))
                    task.add_done_callback(ended.put_nowait)
                    self._unpinned += not request.pin
                if not running:
                    return
                done = await ended.get()
                self._unpinned -= not request.pin
                running.discard(done)
                yield done.result()
        finally:
            if lost is not None:
                lost.remove_done_callback(ended.put_nowait)
            self._unpinned -= len(running) * (not request.pin)
            await cancel_all(running)

    def _may_start(self, request: EpisodesRequest, running: int) -> bool:
        if not running or running >= request.concurrency:
            return not running
        places = None if request.pin or self._fleet.table.target is None else self._places()
        return places is None or self._unpinned < places // 2

    async def _one(self, request: EpisodesRequest, question: Question, index: int) -> dict[str, Any]:
        result = await self._play(request, question)
        for _ in range(REPEATS):
            if not request.pin or self._pin.confirms(_versions(result)):
                break
            self._stats.counts["episodes_repeated"] += 1
            result = await self._play(request, question)
        return self._describe(question, index, result)

    async def _play(self, request: EpisodesRequest, question: Question) -> EpisodeResult:
        result = await run_episode(
            self._environment if request.search else self._closed_book,
            question,
            self._generate,
            self._search if request.search else NoSearch(),
            Sampling(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or -1),
            group=f"{id(request)}-{question.id}",
            # without a learner there is no newest version: use any engine
            pinned=request.pin or self._fleet.table.target is None,
            play_one=self._play_one,
        )
        self._stats.counts["episodes"] += 1
        self._stats.counts["episode_tokens"] += result.trajectory.num_sampled
        return result

    def _describe(self, question: Question, index: int, result: EpisodeResult) -> dict[str, Any]:
        trajectory = result.trajectory
        return {
            "question_id": question.id,
            "index": index,
            **self._policy(),
            "version": "+".join(_versions(result)),
            **trajectory.model_dump(include=OF_TRAJECTORY),
            "metrics": score(trajectory.answer or None, question.answers),
            "tool_calls": dict(Counter(segment.tool for segment in trajectory.segments if segment.tool)),
            "tokens": len(trajectory.ids),
            "tokens_generated": trajectory.num_sampled,
            "text": result.text,
            "segments": [self._segment(segment) for segment in trajectory.segments],
        }

    def _segment(self, segment: Segment) -> dict[str, Any]:
        return {
            "text": self._environment.tokenizer.decode(segment.ids.tolist()),
            "tokens": len(segment.ids),
            # two versions: the weights changed while the turn was sampled
            "version": "+".join(_labels(segment)),
            **segment.model_dump(include={"owner", "tool", "query", "passage_ids", "error"}),
        }


def _labels(segment: Segment) -> list[str]:
    return list(dict.fromkeys(span.version.label for span in segment.spans))


def _versions(result: EpisodeResult) -> list[str]:
    """Return the labels of the versions that sampled an episode, oldest first; empty if no token was sampled."""
    return list(dict.fromkeys(label for segment in result.trajectory.segments for label in _labels(segment)))


class EpisodesSummary:
    """Means over the valid episodes, without keeping them; `failed` counts the others.

    `em` is None when the settings do not compute exact match. `versions` counts the episodes of each version.
    """

    def __init__(self, episodes: Iterable[dict[str, Any]] = ()) -> None:
        self._sums, self._versions, self._em = Counter[str](), Counter[str](), 0.0
        for episode in episodes:
            self.add(episode)

    def add(self, episode: dict[str, Any]) -> None:
        """Count one episode."""
        self._sums.update(count=1, tokens=episode["tokens_generated"])
        if Status(episode["status"]).is_valid:
            self._sums.update(valid=1, searches=episode["searches"], scored="em" in episode["rewards"])
            self._em += episode["rewards"].get("em", 0.0)
            self._versions[episode["version"]] += 1

    def values(self) -> dict[str, Any]:
        """Return the summary of the episodes so far, as JSON values."""
        sums = self._sums
        return {
            "em": self._em / sums["scored"] if sums["scored"] else None,
            "count": sums["count"],
            "failed": sums["count"] - sums["valid"],
            "versions": dict(self._versions),
            "searches_mean": sums["searches"] / sums["valid"] if sums["valid"] else 0.0,
            "tokens_generated": sums["tokens"],
        }
