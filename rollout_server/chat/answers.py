"""Answers to calls, as they are made: texts, searches, and the end.

The loop plays the last message of the user as a question, as a trajectory does; bare is one turn of the policy. Both
yield a batch of events at the end, and if the call streams one every POLL_S before, which may be empty. What has been
yielded is never taken back: the deltas of a field joined are its final text. So a text that may still turn out to be a
mark, a call or an action is held back.

Closing a generator cancels its trajectory, and with it the request at the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from protocol.errors import UserError
from protocol.messages import Owner, Question, Sampling, Segment, Status, Trajectory
from protocol.search import Passage
from protocol.versions import PolicyVersion
from rollout_server.agents.formats import without_start_of
from rollout_server.agents.messages import Ask, CallRefused, Turn
from rollout_server.agents.recorded import LIMIT, until_stop
from rollout_server.agents.renderer import Message, Renderer, Said, content_of
from rollout_server.agents.tagged import thoughts_before, thoughts_so_far
from rollout_server.engine.base import Completion, EngineError, Generate, GenerateRequest
from rollout_server.environment.actions import MAX_CHARS_PER_TOKEN, parse
from rollout_server.environment.environment import Environment
from rollout_server.rollout.group import PlayOne
from rollout_server.rollout.live import LiveTrajectory
from rollout_server.rollout.trajectory import run_trajectory, sample
from rollout_server.search.base import NoSearch, Search, SearchResult

POLL_S = 0.05
"""Interval at which a text in progress is read."""
OUT_OF_TOKENS = "max_tokens"
"""Cause of an answer that ended at the limit of its call."""
T = TypeVar("T")
TurnSoFar = Callable[[str], tuple[str, Sequence[int]] | None]
"""Returns engine and tokens of the turn in progress of a session (`Router.turn_so_far`)."""


class Delta(NamedTuple):
    """More text of a field of the message."""

    field: Literal["reasoning_content", "content"]
    text: str


class Searched(NamedTuple):
    """A search that has ended: query, passages (title, text, score) and error."""

    search: dict[str, Any]


class Finished(NamedTuple):
    """The end of an answer. `facts`: the field `foray` of the response."""

    turn: Turn
    facts: dict[str, Any]


Event = Delta | Searched | Finished


@dataclass(frozen=True)
class Wanted:
    """What a call wants besides its messages. search: False plays the loop without documents."""

    sampling: Sampling
    seed: int | None = None
    search: bool = True


@dataclass(frozen=True)
class Answers:
    """What answers calls: the parts of a rollout server.

    renderer     of the policy alone
    turn_so_far  the text in progress of a session; without it texts come at their end
    version      returns the version to report for that of sampled tokens, or for None: that of the newest weights
    """

    environment: Environment
    renderer: Renderer
    generate: Generate
    search: Search
    turn_so_far: TurnSoFar = lambda session: None
    version: Callable[[PolicyVersion | None], int | None] = lambda sampled: sampled.step if sampled else None
    play_one: PlayOne = run_trajectory

    async def loop(self, ask: Ask, wanted: Wanted) -> AsyncGenerator[list[Event], None]:
        """Play the question of a call with searches. Raises CallRefused."""
        question, session = self._question(ask), uuid.uuid4().hex
        environment = self.environment if wanted.search else self.environment.without_documents()
        live, heard = LiveTrajectory(session), _Heard(self.search if wanted.search else NoSearch())
        limited = _Limited(self.generate, wanted.seed, ask.limit)
        playing = self.play_one(
            *(environment, question, limited, heard, wanted.sampling),
            session=session,
            group=session,
            pinned=True,
            should_stop=lambda first: limited.left == 0,
            live=live,
        )
        view = _LoopView(environment, live, self.turn_so_far, heard)
        async for found in _following(playing, view.new if ask.stream else None):
            if isinstance(found, list):
                yield found
                continue
            _check(found)
            answer = until_stop(Said(found.answer), ask.stop).content
            events = [*view.new(), *view.sent.deltas(content=answer)]
            yield [*events, self._finished(found, view, answer)]

    def _question(self, ask: Ask) -> Question:
        if ask.tools:
            raise CallRefused("tools: this model runs its own search; the bare one takes tools", field="tools")
        text = next((content_of(m) for m in reversed(ask.messages) if m["role"] == "user"), "")
        if not text.strip():
            raise CallRefused("messages: there is no text of a user, who asks the question", field="messages")
        self._check_length(ask.messages)
        return Question(id=uuid.uuid4().hex, text=text)

    def _check_length(self, messages: Sequence[Message]) -> None:
        """Raise CallRefused for texts that cannot fit: tokenising megabytes would block the event loop."""
        limit = MAX_CHARS_PER_TOKEN * self.environment.settings.max_context
        if sum(len(content_of(message)) for message in messages) > limit:
            _too_long(self.environment)

    def _finished(self, played: Trajectory, view: _LoopView, answer: str) -> Finished:
        status, sampled = played.status, played.num_sampled
        cause = "" if status is Status.ANSWERED else OUT_OF_TOKENS if status is Status.STALE else played.cause
        length = status in (Status.TRUNCATED, Status.STALE) or (status is Status.OUT_OF_TURNS and not cause)
        said = Said(answer, view.sent.texts["reasoning_content"])
        turn = Turn(uuid.uuid4().hex, said, length, len(played.ids) - sampled, sampled, int(time.time()))
        version = self.version(_version(played.segments))
        facts = {"searches": view.searches, "version": version, "turns": played.turns}
        return Finished(turn, facts | {"cause": cause or ("" if status is Status.ANSWERED else str(status))})

    async def bare(self, ask: Ask, wanted: Wanted) -> AsyncGenerator[list[Event], None]:
        """Generate one turn after the messages of a call. Raises CallRefused."""
        self._check_length(ask.messages)
        renderer, session, sent = self.renderer, uuid.uuid4().hex, _Sent()
        try:
            ids = renderer.begin(ask.messages, ask.tools)
        except UserError as error:  # the template rejects the conversation
            raise CallRefused(str(error), field="messages") from None
        room = self.environment.settings.max_context - len(ids)
        if room < self.environment.settings.reserve_tokens:
            _too_long(self.environment)
        request = GenerateRequest(
            *(ids, session, session, min(room, ask.limit or room), wanted.sampling),
            stop=(*renderer.stops(ask.tools), *ask.stop),
            pinned=True,
            seed=wanted.seed,
        )

        def new() -> Iterator[Event]:
            _, so_far = self.turn_so_far(session) or ("", ())
            if so_far and sent.grows(len(so_far)):
                said = until_stop(renderer.so_far(so_far, ask.tools), ask.stop)
                content = without_start_of(said.content, ask.stop)
                yield from sent.deltas(over=False, reasoning_content=said.reasoning, content=content)

        async for found in _following(sample(self.generate, request), new if ask.stream else None):
            if isinstance(found, list):
                yield found
                continue
            completion, segment = found
            if completion.finish_reason == "abort":
                raise CallRefused("the engine ended the turn", status=503, code="aborted")
            said, length = until_stop(renderer.read(completion.ids, ask.tools), ask.stop), len(completion.ids)
            cut = completion.finish_reason == "length"
            turn = Turn(uuid.uuid4().hex, said, cut, len(ids), length, int(time.time()))
            facts = {"searches": [], "version": self.version(_version((segment,))), "turns": 1, "cause": ""}
            yield [*sent.deltas(reasoning_content=said.reasoning, content=said.content), Finished(turn, facts)]


async def _following(
    work: Coroutine[Any, Any, T] | Any, new: Callable[[], Iterator[Event]] | None
) -> AsyncGenerator[list[Event] | T, None]:
    """Yield what is `new` while `work` runs, and at last its result. Raises CallRefused for an error of the engine.

    new  None: nothing before the result
    """
    task: asyncio.Task[T] = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL_S if new else None))[0]:
            yield list(new()) if new else []
        yield task.result()
    except EngineError as error:
        raise CallRefused(str(error), status=400 if error.cause == "refused" else 503, code=error.cause) from None
    finally:
        task.cancel()
        await asyncio.wait({task})


@dataclass
class _Sent:
    """What a client has of each field."""

    texts: dict[str, str] = field(default_factory=lambda: {"reasoning_content": "", "content": ""})
    tokens: int = 0

    def grows(self, tokens: int) -> bool:
        """Return whether there are other tokens than at the last look."""
        before, self.tokens = self.tokens, tokens
        return before != tokens

    def deltas(self, *, over: bool = True, **now: str) -> Iterator[Delta]:
        """Yield what the client lacks. Tokens of an engine that failed may be sampled again, until a text is `over`.

        Raises CallRefused if the client has text that is not in the final one.
        """
        for name, text in now.items():
            have = self.texts[name]
            if text.startswith(have):
                self.texts[name] = text
                if text != have:
                    yield Delta(name, text[len(have) :])  # type: ignore[arg-type]
            elif over:
                why = "the text was generated again after a failure of an engine, and begins in another way"
                raise CallRefused(why, status=503, code="regenerated")


@dataclass
class _Heard:
    """A search that keeps what was found, for the client."""

    search: Search
    found: list[tuple[Passage, ...]] = field(default_factory=list)

    async def __call__(self, query: str) -> SearchResult:
        result = await self.search(query)
        self.found.append(result.passages)
        return result


@dataclass
class _Limited:
    """A `Generate` that samples at most `left` tokens in all (None: no limit), from `seed`."""

    generate: Generate
    seed: int | None
    left: int | None

    async def __call__(self, request: GenerateRequest) -> Completion:
        most = request.max_new_tokens if self.left is None else min(request.max_new_tokens, self.left)
        completion = await self.generate(replace(request, max_new_tokens=most, seed=self.seed))
        if self.left is not None:
            self.left -= len(completion.ids)
        return completion


class _LoopView:
    """What a client has of a trajectory: the thoughts of its turns, and its searches."""

    def __init__(self, environment: Environment, live: LiveTrajectory, turn_so_far: TurnSoFar, heard: _Heard) -> None:
        self._environment, self._live, self._turn_so_far, self._heard = environment, live, turn_so_far, heard
        self.sent = _Sent()
        self.searches: list[dict[str, Any]] = []
        self._thoughts: list[str] = []
        self._seen = 0

    def new(self) -> Iterator[Event]:
        """Yield what is new since the last call."""
        segments = self._live.transcript.segments if self._live.transcript else ()
        for segment in segments[self._seen :]:
            self._seen += 1
            if segment.owner is Owner.POLICY:
                text = self._environment.tokenizer.decode_turn(segment.ids.tolist())
                action = parse(text, box=self._environment.template.boxed, tools=self._environment.tags)
                self._thoughts.append(thoughts_before(text, action))
                self.sent.tokens = 0
                yield from self.sent.deltas(reasoning_content=_joined(self._thoughts))
            elif segment.owner is Owner.ENVIRONMENT and segment.query and not segment.tool:
                yield self._search(segment)
        _, ids = self._turn_so_far(self._live.session) or ("", ())
        if ids and self.sent.grows(len(ids)):
            text = thoughts_so_far(self._environment.tokenizer.decode_turn(ids), self._environment.tags)
            yield from self.sent.deltas(over=False, reasoning_content=_joined([*self._thoughts, text]))

    def _search(self, segment: Segment) -> Searched:
        passages = self._heard.found.pop(0) if self._heard.found else ()  # an agent may search elsewhere
        shown = [{"title": p.title, "text": p.text, "score": (p.model_extra or {}).get("score")} for p in passages]
        self.searches.append({"query": segment.query, "passages": shown, "error": segment.error or None})
        return Searched(self.searches[-1])


def _joined(thoughts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, thoughts))


def _version(segments: Sequence[Segment]) -> PolicyVersion | None:
    """Return the last version that sampled."""
    return next((span.version for segment in reversed(segments) for span in reversed(segment.spans)), None)


def _check(played: Trajectory) -> None:
    """Raise CallRefused for a trajectory that failed."""
    if played.status is not Status.FAILED:
        return
    if played.cause == "prompt_too_long":
        raise CallRefused("messages: the question leaves no room in the context", code=LIMIT, field="messages")
    raise CallRefused(f"the answer failed: {played.cause}", status=503, code=played.cause)


def _too_long(environment: Environment) -> NoReturn:
    most = environment.settings.max_context
    raise CallRefused(f"messages: more than fit into the context of {most} tokens", code=LIMIT, field="messages")
