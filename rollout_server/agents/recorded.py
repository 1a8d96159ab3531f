"""What an agent's calls have recorded: sequences of tokens, and which of them a call continues.

A call continues the longest sequence whose messages are a prefix of the call's, with the same tools, if no message
after the prefix is the assistant's. Then only the tokens of the new messages are added: what the policy sampled is
taken from the record and never tokenised again. Any other call begins a new sequence with a whole prompt. Each sampled
token is in one sequence, so it is trained once, whatever the agent does with its history.

Nothing is recorded before a turn is complete, so a call that fails leaves no trace and may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from protocol.errors import UserError
from protocol.messages import MAX_SEGMENTS, Segment, Status
from protocol.runtime.lifecycle import cancel_all
from protocol.runtime.timing import LoopTimer
from protocol.runtime.tracing import span
from rollout_server.agents.formats import json_or_text
from rollout_server.agents.messages import Ask, CallRefused, Normal, Turn, normalise
from rollout_server.agents.renderer import Call, Message, NotAppendable, Renderer, Said, content_of
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.environment.actions import MAX_CHARS_PER_TOKEN
from rollout_server.rewards.base import TurnText
from rollout_server.rollout.trajectory import End, Play, sample
from rollout_server.rollout.transcript import Transcript
from rollout_server.search.base import SearchResult

log = logging.getLogger(__name__)

MAX_SEARCHES = 256
"""Maximum number of searches of a trajectory through the gateway."""
MAX_ARGUMENT = 1 << 16
"""Length to which arguments of calls are cut in the record."""
LIMIT = "context_length_exceeded"
"""OpenAI's code of an error that no shorter answer can avoid: agents end or answer from what they have."""


@dataclass
class RecordedSequence:
    """One growing sequence of tokens.

    session  its id at the engines
    tools    the tools of its calls, as canonical JSON
    said     its messages, the last one the policy's
    turns    what rewards read
    busy     a call continues it now
    """

    transcript: Transcript
    session: str
    tools: str
    said: list[Normal] = field(default_factory=list)
    turns: list[TurnText] = field(default_factory=list)
    last: tuple[Sequence[int], Said] = ((), Said(""))
    busy: bool = False


@dataclass
class Reply:
    """The answer to a call, now or later. `waiting`: requests that wait for it; `sent`: one has got it."""

    task: asyncio.Task[Turn | CallRefused]
    waiting: int = 0
    sent: bool = False

    @property
    def abandoned(self) -> bool:
        """Whether its client has gone away without it."""
        return not self.waiting and not self.sent

    @property
    def failed(self) -> bool:
        """Whether it is an error, so that a repetition is a new attempt."""
        return self.task.done() and (self.task.cancelled() or isinstance(self.task.result(), CallRefused))


class Recorded:
    """The calls of one trajectory.

    counts   receives `agent_calls`, `agent_retries`, `agent_sequences_<reason>`, `agent_ignored_<parameter>`
    lenient  a text that names the id of a recorded call stands for the message with that call
    ended    why no further call is answered; None while calls are answered
    over     set when the trajectory is invalid, whatever the agent does
    timer    the agent's deadline, which stands still during calls
    items    items of `/v1/responses` by id
    refusal  the last refusal of a request that the agent should not have sent
    """

    def __init__(self, play: Play, renderer: Renderer, counts: Counter[str], *, lenient: bool = False) -> None:
        self._play, self._renderer, self._counts, self._lenient = play, renderer, counts, lenient
        self.ended: End | None = None
        self.over = asyncio.Event()
        self.timer: LoopTimer | None = None
        self.items: dict[str, dict[str, Any]] = {}
        self.refusal = ""
        self.sequences: list[RecordedSequence] = []
        self.last: Turn | None = None
        self._latest: RecordedSequence
        self._segments: list[Segment] = []
        self._replies: dict[bytes, Reply] = {}
        self._searches: list[tuple[str, SearchResult]] = []
        self._searched = self._called = 0
        self._turns = 0
        self._active, self._left_s = 0, 0.0

    @property
    def searches(self) -> int:
        """Number of searches: through the gateway, or else the policy's calls of a tool named `search`."""
        return self._searched or self._called

    @property
    def segments(self) -> Sequence[Segment]:
        """All segments in the order in which they were recorded, for live views."""
        return self._segments

    def reply(self, ask: Ask, digest: bytes, *, retry: bool) -> Reply:
        """Return the reply to a call: the one to an equal body if this is its repetition, else a new one.

        retry  the client says that it repeats a request
        """
        earlier = self._replies.get(digest)
        if earlier is not None and (retry or earlier.abandoned) and not earlier.failed:
            self._counts["agent_retries"] += 1
            return earlier
        self._counts.update(("agent_calls", *(f"agent_ignored_{name}" for name in ask.ignored)))
        reply = self._replies[digest] = Reply(asyncio.create_task(self._answer(ask), name="agent-call"))
        return reply

    async def close(self) -> None:
        """Cancel calls in flight. Later ones change nothing."""
        self.timer = None
        self.end(End(Status.FAILED, "closed"))
        await cancel_all(reply.task for reply in self._replies.values())

    def end(self, end: End) -> None:
        """Answer no further call. The first end counts."""
        self.ended = self.ended or end
        if not self.ended.status.is_valid:
            self.over.set()

    async def search(self, query: str) -> SearchResult:
        """Search, and record it with the next turn. Raises CallRefused."""
        self._admit()
        if self._searched >= MAX_SEARCHES:
            raise CallRefused(f"this trajectory has searched {MAX_SEARCHES} times", code=LIMIT)
        self._searched += 1
        with self._clock_stopped():
            result = await self._play.search(query)
        if result.error and self._play.environment.settings.on_search_error != "observe":
            self.end(End(Status.FAILED, f"search_{result.error}"[:256]))
            self._admit()
        self._searches.append((query, result))
        return result

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Stop the agent's deadline while a call is in flight: waiting for engines is not its fault."""
        self._active += 1
        if self.timer and self._active == 1:
            self._left_s = self.timer.left_s
            self.timer.cancel()
        try:
            yield
        finally:
            self._active -= 1
            if self.timer and not self._active:
                self.timer.arm(self._left_s)

    def _admit(self) -> None:
        """Raise CallRefused if the trajectory answers no further call."""
        if self.ended is None:
            return
        status, cause = self.ended.status, self.ended.cause
        if status is Status.STALE:
            raise CallRefused(f"the trajectory is too old: {cause}", status=409, code="stale")
        if status is Status.FAILED:
            raise CallRefused(f"the trajectory has failed: {cause}", status=503, code=cause)
        raise CallRefused(f"the trajectory has reached its limit: {status}", code=LIMIT)

    async def _answer(self, ask: Ask) -> Turn | CallRefused:
        try:
            with self._clock_stopped(), span("turn", turn=self._turns):
                return await self._turn(ask)
        except CallRefused as error:
            return error
        except UserError as error:  # the template rejects the conversation
            return CallRefused(str(error), field="messages")
        except EngineError as error:
            self.end(End(Status.FAILED, error.cause))
            return CallRefused(str(error), status=503, code=error.cause)
        except Exception as error:  # a bug: it is counted as FAILED and must not end the server
            log.exception("unexpected error in a call of trajectory %s", self._play.session)
            self.end(End(Status.FAILED, f"error_{type(error).__name__}"))
            return CallRefused("internal error", status=500, code="internal_error")

    async def _turn(self, ask: Ask) -> Turn:
        """Generate the turn of a call and record it. Raises CallRefused, EngineError or UserError."""
        play, limits = self._play, self._play.environment.settings
        firsts = [v for s in self.sequences if (v := s.transcript.first_version) is not None]
        if firsts and play.should_stop(min(firsts)):
            self.end(End(Status.STALE, "max_lag"))
        if self._turns > limits.max_turns:
            self.end(End(Status.OUT_OF_TURNS))
        self._admit()
        sequence, tail, new = self._place(ask)
        room = sequence.transcript.remaining - len(tail)
        if room < limits.reserve_tokens:
            self._refuse_length()
        request = GenerateRequest(
            ids=[*sequence.transcript.ids, *tail],
            session=sequence.session,
            group=play.group,
            max_new_tokens=min(room, limits.max_new_tokens, ask.limit or room),
            sampling=play.sampling,
            stop=(*self._renderer.stops(ask.tools), *ask.stop),
            pinned=play.pinned,
        )
        play.live.session, sequence.busy = sequence.session, True
        self._turns += 1
        try:
            completion, segment = await sample(play.generate, request)
            if completion.finish_reason == "abort":
                raise EngineError("aborted", completion.engine)
        except BaseException:
            self._turns -= 1
            raise
        finally:
            sequence.busy = False
        return self._record(ask, sequence, (tail, new), completion, segment)

    def _refuse_length(self) -> NoReturn:
        """End the trajectory: the context is full. Raises CallRefused."""
        self.end(End(Status.TRUNCATED, "context") if self.last else End(Status.FAILED, "prompt_too_long"))
        self._admit()
        raise AssertionError("an ended trajectory admits no call")

    def _check_length(self, messages: Sequence[Message]) -> None:
        """Raise CallRefused for texts that cannot fit: tokenising megabytes would block the event loop."""
        chars = sum(len(content_of(message)) for message in messages)
        if chars > MAX_CHARS_PER_TOKEN * self._play.environment.settings.max_context:
            self._refuse_length()

    def _place(self, ask: Ask) -> tuple[RecordedSequence, list[int], Sequence[Message]]:
        """Return the sequence that a call continues, and the ids and messages to add; or a new sequence."""
        tools = json.dumps(ask.tools, sort_keys=True)
        found, label, reason = self._match([normalise(message) for message in ask.messages], tools)
        if found is not None:
            new = ask.messages[len(found.said) :]
            self._check_length(new)
            try:
                return found, self._renderer.go_on(new, ask.tools, *found.last), new
            except NotAppendable as error:
                label, reason = "template", f"template: {error}"
        if label:
            self._counts[f"agent_sequences_{label}"] += 1
        self._check_length(ask.messages)
        prompt = self._renderer.begin(ask.messages, ask.tools)
        transcript = Transcript(prompt, self._play.environment.settings.max_context, reason=reason)
        session = uuid.uuid4().hex if reason else self._play.session
        return RecordedSequence(transcript, session, tools), [], ()

    def _match(self, given: Sequence[Normal], tools: str) -> tuple[RecordedSequence | None, str, str]:
        """Return the sequence that the messages continue; or None, with the reason's label and text."""
        label, reason = ("in_use", "parallel to another call") if self._turns else ("", "")
        agreed = -1
        for one in sorted(self.sequences, key=lambda one: -len(one.said)):
            pairs = zip(one.said, given, strict=False)
            common = next(
                (i for i, (a, b) in enumerate(pairs) if not self._equal(a, b)), min(len(one.said), len(given))
            )
            if common == len(given):
                why = "same_prompt", "same prompt again"
            elif common < len(one.said):
                why = "message_differs", f"message {common} differs"
            elif one.tools != tools:
                why = "other_tools", "other tools"
            elif one.busy:
                why = "in_use", "in use by another call"
            elif any(message.role == "assistant" for message in given[common:]):
                why = "assistant_text", "assistant's text by the agent"
            else:
                return one, "", ""
            if common > agreed:
                agreed, (label, reason) = common, why
        return None, label, reason

    def _equal(self, recorded: Normal, given: Normal) -> bool:
        if recorded == given:
            return True
        named = self._lenient and recorded.role == given.role == "assistant" and not given.calls
        return named and any(name in given.content for name, _, _ in recorded.calls)

    def _record(
        self,
        ask: Ask,
        sequence: RecordedSequence,
        added: tuple[list[int], Sequence[Message]],
        completion: Completion,
        segment: Segment,
    ) -> Turn:
        """Append a turn, and before it what the call added, to its sequence. Does not await: all of it or nothing."""
        play, transcript, (tail, new) = self._play, sequence.transcript, added
        said = until_stop(self._renderer.read(completion.ids, ask.tools), ask.stop)
        length, written = completion.finish_reason == "length", len(completion.ids)
        read = len(transcript.ids) + len(tail)
        turn = Turn(uuid.uuid4().hex, said, length, read, written, int(time.time()))
        messages = [*map(normalise, ask.messages), normalise(turn.as_message())]
        text = play.environment.tokenizer.decode_turn(completion.ids)
        queries = [_query(call) for call in said.calls if call.name == "search"]
        tool = next((call.name for call in said.calls if not queries), "")
        if sequence.turns:
            self._observe(sequence, new, tail)
        else:
            if self._searches and self.sequences:
                self._observe(self._latest, ask.messages[_after_assistant(ask.messages) :])
            self.sequences.append(sequence)
            self._segments.append(transcript.segments[0])
        self._segments.append(transcript.append(segment))
        play.on_progress(segment)
        sequence.said, sequence.last = messages, (completion.ids, said)
        query = "\n".join(queries)
        sequence.turns.append(TurnText(text, query=query, tokens=written, finish=completion.finish_reason, tool=tool))
        self.last, self._latest, self._called = turn, sequence, self._called + len(queries)
        return turn

    def _observe(self, sequence: RecordedSequence, new: Sequence[Message], tail: Sequence[int] | None = None) -> None:
        """Append what the new messages tell about the searches and calls since the last turn, for rewards too.

        tail  their tokens; None: they are in another sequence
        """
        found, self._searches = self._searches, []
        facts: list[dict[str, Any]] = [
            {"query": query, "passage_ids": [p.id for p in r.passages], "latency_s": r.latency_s, "error": r.error}
            for query, r in found
        ]
        if tail is not None:
            for call in sequence.last[1].calls:
                if call.name != "search":
                    facts.append({"query": call.arguments[:MAX_ARGUMENT], "tool": call.name})
                elif not found:
                    facts.append({"query": _query(call)[:MAX_ARGUMENT]})
        passages, turn = [passage for _, r in found for passage in r.passages], sequence.turns[-1]
        sequence.turns[-1] = replace(
            turn,
            query="\n".join(query for query, _ in found) or turn.query,
            tool="" if found else turn.tool,
            observation="\n".join(map(content_of, new)) if found or turn.query else "",
            passage_ids=turn.passage_ids + tuple(passage.id for passage in passages),
            titles=turn.titles + tuple(passage.title[:256] for passage in passages),
        )
        turns_left = self._play.environment.settings.max_turns + 1 - self._turns
        facts = facts[-max(1, MAX_SEGMENTS - len(self._segments) - 2 * turns_left - 2) :]
        if tail is not None:
            facts = facts or [{}]
        for left, one in zip(reversed(range(len(facts))), facts, strict=True):
            segment = sequence.transcript.observe((tail or ()) if not left else (), **one)
            self._segments.append(segment)
            self._play.on_progress(segment)


def _after_assistant(messages: Sequence[Message]) -> int:
    """Return the position after the last message of the assistant."""
    return max((i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)


def _query(call: Call) -> str:
    """Return the query of a call of `search`."""
    given = json_or_text(call.arguments)
    values = list(given.values()) if isinstance(given, dict) else []
    query = given.get("query", values[0] if len(values) == 1 else None) if values else None
    return query if isinstance(query, str) else call.arguments


def until_stop(said: Said, stops: Sequence[str]) -> Said:
    """Return what was said before the first of the agent's stop strings, which an answer does not contain."""
    ends = [at for stop in stops if (at := said.content.find(stop)) >= 0]
    return replace(said, content=said.content[: min(ends)]) if ends else said
