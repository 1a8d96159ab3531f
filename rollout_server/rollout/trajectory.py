"""The multi-turn loop: one trajectory from a question to its end.

    generate -> parse -> answer?  done
                      -> search?  search -> observe -> generate ...
                      -> a tool?  call it -> observe -> generate ...
                      -> none?    observe the hint of the template -> generate ...

At most `max_turns` actions get an observation; then the policy writes one more turn, and a search in that turn is
ignored (Search-R1's loop). If the template has no hint for a turn without an action, such a turn ends the trajectory
(ReSearch's loop). External failures become a status with a cause, never an exception, so the rest of the group
continues. Cancellation is safe at every await: a trajectory owns no resources but memory.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from protocol.messages import Owner, Question, Sampling, Segment, Status, Trajectory
from protocol.runtime.tracing import NoSpan, span
from protocol.search import Passage
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, EngineError, Generate, GenerateRequest
from rollout_server.environment.actions import Action, AnswerAction, InvalidAction, SearchAction, ToolAction, parse
from rollout_server.environment.environment import Environment
from rollout_server.rewards.base import RewardError, RewardInput, TurnText
from rollout_server.rewards.composite import TrajectoryReward
from rollout_server.rollout.live import LiveTrajectory
from rollout_server.rollout.transcript import Transcript
from rollout_server.search.base import Search
from rollout_server.tools.base import ToolResult

log = logging.getLogger(__name__)

ShouldStop = Callable[[PolicyVersion], bool]
"""Returns whether a trajectory (in a group: the group) with this first version is too old to continue."""
OnProgress = Callable[[Segment | Trajectory], None]
"""Called with each appended segment and each finished trajectory, for metrics. Must not raise."""


def never_stop(first_version: PolicyVersion) -> bool:
    """Return False: no trajectory is too old. For evaluation and tests."""
    return False


def ignore_progress(event: Segment | Trajectory) -> None:
    """Ignore the event."""


@dataclass(frozen=True)
class _End:
    status: Status
    cause: str = ""


@dataclass
class _Rollout:
    """One trajectory in progress."""

    environment: Environment
    generate: Generate
    search: Search
    sampling: Sampling
    session: str
    group: str
    pinned: bool
    should_stop: ShouldStop
    on_progress: OnProgress
    transcript: Transcript
    turns: list[TurnText] = field(default_factory=list)
    answer: str | None = None
    searches: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    async def run(self) -> _End:
        """Run until the trajectory ends. Waits only for completions, searches and tools."""
        limits = self.environment.settings
        if self.transcript.remaining < limits.reserve_tokens:
            return _End(Status.FAILED, "prompt_too_long")
        for turn in range(limits.max_turns + 1):
            first = self.transcript.first_version
            if first is not None and self.should_stop(first):
                return _End(Status.STALE, "max_lag")
            with span("turn", turn=turn) as traced:
                end = await self._turn(traced, last=turn == limits.max_turns)
            if end is not None:
                return end
        raise AssertionError("the last turn always ends a trajectory")

    async def _turn(self, traced: NoSpan, *, last: bool) -> _End | None:
        """Run one turn and its action. Return an _End if the trajectory is over. Raises EngineError."""
        completion = await self._write()
        traced.set(tokens=len(completion.ids), version=completion.spans[-1].version.label)
        if completion.finish_reason == "abort":
            return _End(Status.FAILED, "aborted")
        text = self.environment.tokenizer.decode_turn(completion.ids)
        self.turns.append(TurnText(text, tokens=len(completion.ids), finish=completion.finish_reason))
        action = parse(text, box=self.environment.template.boxed, tools=self.environment.tags)
        return await self._act(action, last=last)

    async def _write(self) -> Completion:
        """Generate one turn of the policy and append it. Raises EngineError."""
        limit = min(self.environment.settings.max_new_tokens, self.transcript.remaining)
        request = GenerateRequest(
            ids=self.transcript.ids,
            session=self.session,
            group=self.group,
            max_new_tokens=limit,
            sampling=self.sampling,
            stop=self.environment.template.stops,
            pinned=self.pinned,
        )
        completion = await self.generate(request)
        if not 0 < len(completion.ids) <= limit:
            detail = f"{len(completion.ids)} tokens, but at most {limit} were requested"
            raise EngineError("bad_output", completion.engine, detail)
        try:
            segment = self.transcript.write(completion)
        except ValueError as error:
            raise EngineError("bad_output", completion.engine, str(error)[:500]) from error
        self.on_progress(segment)
        return completion

    async def _act(self, action: Action, *, last: bool) -> _End | None:
        """Execute a turn's action and append the observation. Return an _End if the trajectory is over."""
        if isinstance(action, AnswerAction):
            self.answer = action.text
            return _End(Status.ANSWERED)
        remaining = self.transcript.remaining - self.environment.settings.reserve_tokens
        cut = self.turns[-1].finish == "length"
        if last and cut:
            return _End(Status.TRUNCATED, "turn" if self.transcript.remaining else "context")
        if last:
            return _End(Status.OUT_OF_TURNS)
        if isinstance(action, InvalidAction):
            if not self.environment.invalid:
                return _End(Status.TRUNCATED, "turn") if cut else _End(Status.OUT_OF_TURNS, action.reason)
            if remaining < len(self.environment.invalid):
                return _End(Status.TRUNCATED, "context")
            self.on_progress(self.transcript.observe(self.environment.invalid))
            return None
        if remaining < self.environment.min_observation_tokens:
            return _End(Status.TRUNCATED, "context")
        limit = min(remaining, self.environment.settings.max_obs_tokens)
        return await (
            self._call_tool(action, limit) if isinstance(action, ToolAction) else self._run_search(action, limit)
        )

    async def _run_search(self, action: SearchAction, limit: int) -> _End | None:
        """Search, and append the observation in at most `limit` tokens."""
        result = await self.search(action.query)
        self.searches += 1
        reported = not result.error or self.environment.settings.on_search_error == "observe"
        # A failed search that ends the trajectory is recorded as an observation without tokens.
        ids = self.environment.observation(result.passages, limit, failed=bool(result.error)) if reported else []
        segment = self.transcript.observe(
            ids,
            query=action.query,
            passage_ids=[passage.id for passage in result.passages],
            latency_s=result.latency_s,
            error=result.error,
        )
        self.on_progress(segment)
        if not reported:
            return _End(Status.FAILED, f"search_{result.error}"[:256])
        self.turns[-1] = replace(self.turns[-1], query=action.query)
        # The environment's text for a search without passages is not evidence.
        self._show(result.passages if not result.error else (), limit, ids)
        return None

    async def _call_tool(self, call: ToolAction, limit: int) -> _End | None:
        """Call a tool, and append its result in at most `limit` tokens."""
        environment, name = self.environment, call.tool
        self.turns[-1] = replace(self.turns[-1], tool=name)
        most = environment.max_calls_of(name)
        if most is not None and self.calls[name] >= most:
            result = ToolResult(f"No more than {most} calls of {name} are allowed.", mistake="too_many")
        else:
            self.calls[name] += 1
            result = await environment.tools[name](call.argument)
        error = f"tool_{name}_{result.error}" if result.error else ""
        passages = () if error else result.passages
        reported = not error or environment.settings.on_search_error == "observe"
        if error:
            ids = environment.tool_failed(limit) if reported else []
        else:
            words = result.text and not passages
            ids = (
                environment.text_observation(result.text, limit) if words else environment.observation(passages, limit)
            )
        segment = self.transcript.observe(
            ids,
            query=call.argument.strip(),
            passage_ids=[passage.id for passage in passages],
            latency_s=result.latency_s,
            error=error,
            tool=name,
        )
        self.on_progress(segment)
        if not reported:
            return _End(Status.FAILED, error[:256])
        self._show(passages, limit, ids)
        return None

    def _show(self, passages: Sequence[Passage], limit: int, ids: Sequence[int]) -> None:
        """Record in the last turn which passages the observation `ids` shows, and its text. Rewards read both."""
        shown = self.environment.visible_passages(passages, limit, ids)
        self.turns[-1] = replace(
            self.turns[-1],
            observation=self.environment.observation_text(ids) if shown else "",
            passage_ids=tuple(passage.id for passage in shown),
            titles=tuple(passage.title[:256] for passage in shown),
        )

    def segments(self, earned: Sequence[float]) -> tuple[Segment, ...]:
        """Return all segments, with the reward of each turn on the policy's segment of that turn."""
        left = iter(earned)
        rewards = [next(left, 0.0) if s.owner is Owner.POLICY else 0.0 for s in self.transcript.segments]
        return tuple(
            segment.model_copy(update={"reward": reward}) if reward else segment
            for segment, reward in zip(self.transcript.segments, rewards, strict=True)
        )


async def run_trajectory(
    environment: Environment,
    question: Question,
    generate: Generate,
    search: Search,
    sampling: Sampling,
    *,
    session: str,
    group: str,
    pinned: bool = False,
    should_stop: ShouldStop = never_stop,
    on_progress: OnProgress = ignore_progress,
    live: LiveTrajectory | None = None,
) -> Trajectory:
    """Run one trajectory to its end, and score it if it is valid.

    session      id of this trajectory, of fixed length (engines match ids by prefix): the hex of a UUID
    group        id shared by the trajectories of one question
    pinned       evaluation: use any READY engine
    should_stop  called before every turn but the first
    live         what watchers read

    Raises only CancelledError. An error becomes status FAILED with its cause: a cause of EngineError,
    `search_<cause>`, `tool_<name>_<cause>`, `prompt_too_long`, `reward`, or `error_<type>` for a bug, which is logged
    with its traceback.
    """
    started, live = time.monotonic(), live or LiveTrajectory(session)
    play: _Rollout | None = None
    score = TrajectoryReward(0.0, {}, ())
    try:
        live.transcript = transcript = Transcript(environment.prompt(question.text), environment.settings.max_context)
        play = _Rollout(
            environment, generate, search, sampling, session, group, pinned, should_stop, on_progress, transcript
        )
        end = await play.run()
        if end.status.is_valid:
            outcome = RewardInput(question, end.status, play.answer, tuple(play.turns), play.searches)
            with span("reward"):
                score = await environment.score(outcome)
    except (EngineError, RewardError) as error:
        log.warning("trajectory %s: %s", session, error)
        end = _End(Status.FAILED, error.cause if isinstance(error, EngineError) else "reward")
    except Exception as error:
        # a bug triggered by one question must not end its group or the server: it is counted as FAILED
        log.exception("unexpected error in trajectory %s", session)
        end = _End(Status.FAILED, f"error_{type(error).__name__}")
    trajectory = Trajectory(
        status=end.status,
        cause=end.cause[:256],
        segments=play.segments(score.turns) if play else (),
        reward=score.reward,
        rewards=score.parts,
        answer=(play.answer or "") if play else "",
        turns=len(play.turns) if play else 0,
        searches=play.searches if play else 0,
        seconds=time.monotonic() - started,
    )
    live.ended = trajectory
    on_progress(trajectory)
    return trajectory
