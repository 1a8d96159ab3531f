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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

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
from rollout_server.rollout.transcript import Transcript, policy_segment
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
class End:
    """How a trajectory ended. `cause`: of a failure, "" for none."""

    status: Status
    cause: str = ""


async def sample(generate: Generate, request: GenerateRequest) -> tuple[Completion, Segment]:
    """Generate one turn. Return it, and its segment. Raises EngineError."""
    completion = await generate(request)
    if not 0 < len(completion.ids) <= request.max_new_tokens:
        detail = f"{len(completion.ids)} tokens, but at most {request.max_new_tokens} were requested"
        raise EngineError("bad_output", completion.engine, detail)
    try:
        return completion, policy_segment(completion)
    except ValueError as error:
        raise EngineError("bad_output", completion.engine, str(error)[:500]) from error


@dataclass
class Play(ABC):
    """One trajectory in progress: the arguments of `run_trajectory`, and what every kind of loop has in common."""

    environment: Environment
    question: Question
    generate: Generate
    search: Search
    sampling: Sampling
    _: KW_ONLY
    session: str
    group: str
    pinned: bool = False
    should_stop: ShouldStop = never_stop
    on_progress: OnProgress = ignore_progress
    live: LiveTrajectory
    answer: str | None = None
    searches: int = 0

    @abstractmethod
    async def run(self) -> End:
        """Play until the trajectory ends. Raises EngineError or RewardError if it fails."""

    @abstractmethod
    def recorded(self) -> tuple[Sequence[Segment], Sequence[TurnText]]:
        """Return all segments, and the turns of the policy in the same order."""

    async def score(self, status: Status) -> TrajectoryReward:
        """Return the reward of a valid trajectory. Raises RewardError."""
        turns = tuple(self.recorded()[1])
        return await self.environment.score(RewardInput(self.question, status, self.answer, turns, self.searches))

    async def finish(self) -> Trajectory:
        """Run the trajectory to its end, and score it if it is valid. Raises only CancelledError."""
        started, score = time.monotonic(), TrajectoryReward(0.0, {}, ())
        try:
            end = await self.run()
            if end.status.is_valid:
                with span("reward"):
                    score = await self.score(end.status)
        except (EngineError, RewardError) as error:
            log.warning("trajectory %s: %s", self.session, error)
            end = End(Status.FAILED, error.cause if isinstance(error, EngineError) else "reward")
        except Exception as error:
            # a bug triggered by one question must not end its group or the server: it is counted as FAILED
            log.exception("unexpected error in trajectory %s", self.session)
            end = End(Status.FAILED, f"error_{type(error).__name__}")
        segments, turns = self.recorded()
        trajectory = Trajectory(
            status=end.status,
            cause=end.cause[:256],
            segments=_rewarded(segments, score.turns),
            reward=score.reward,
            rewards=score.parts,
            answer=self.answer or "",
            turns=len(turns),
            searches=self.searches,
            seconds=time.monotonic() - started,
        )
        self.live.ended = trajectory
        self.on_progress(trajectory)
        return trajectory


def _rewarded(segments: Sequence[Segment], earned: Sequence[float]) -> tuple[Segment, ...]:
    """Return the segments with the reward of each turn on the policy's segment of that turn."""
    left = iter(earned)
    rewards = [next(left, 0.0) if s.owner is Owner.POLICY else 0.0 for s in segments]
    return tuple(
        segment.model_copy(update={"reward": reward}) if reward else segment
        for segment, reward in zip(segments, rewards, strict=True)
    )


@dataclass(kw_only=True)
class _Rollout(Play):
    """The multi-turn loop."""

    turns: list[TurnText] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    transcript: Transcript = field(init=False)

    def recorded(self) -> tuple[Sequence[Segment], Sequence[TurnText]]:
        return self.live.transcript.segments if self.live.transcript else (), self.turns

    async def run(self) -> End:
        """Run until the trajectory ends. Waits only for completions, searches and tools."""
        limits = self.environment.settings
        self.transcript = Transcript(self.environment.prompt(self.question.text), limits.max_context)
        self.live.transcript = self.transcript
        if self.transcript.remaining < limits.reserve_tokens:
            return End(Status.FAILED, "prompt_too_long")
        for turn in range(limits.max_turns + 1):
            first = self.transcript.first_version
            if first is not None and self.should_stop(first):
                return End(Status.STALE, "max_lag")
            with span("turn", turn=turn) as traced:
                end = await self._turn(traced, last=turn == limits.max_turns)
            if end is not None:
                return end
        raise AssertionError("the last turn always ends a trajectory")

    async def _turn(self, traced: NoSpan, *, last: bool) -> End | None:
        """Run one turn and its action. Return an End if the trajectory is over. Raises EngineError."""
        completion = await self._write()
        traced.set(tokens=len(completion.ids), version=completion.spans[-1].version.label)
        if completion.finish_reason == "abort":
            return End(Status.FAILED, "aborted")
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
        completion, segment = await sample(self.generate, request)
        self.on_progress(self.transcript.append(segment))
        return completion

    async def _act(self, action: Action, *, last: bool) -> End | None:
        """Execute a turn's action and append the observation. Return an End if the trajectory is over."""
        if isinstance(action, AnswerAction):
            self.answer = action.text
            return End(Status.ANSWERED)
        remaining = self.transcript.remaining - self.environment.settings.reserve_tokens
        cut = self.turns[-1].finish == "length"
        if last and cut:
            return End(Status.TRUNCATED, "turn" if self.transcript.remaining else "context")
        if last:
            return End(Status.OUT_OF_TURNS)
        if isinstance(action, InvalidAction):
            if not self.environment.invalid:
                return End(Status.TRUNCATED, "turn") if cut else End(Status.OUT_OF_TURNS, action.reason)
            if remaining < len(self.environment.invalid):
                return End(Status.TRUNCATED, "context")
            self.on_progress(self.transcript.observe(self.environment.invalid))
            return None
        if remaining < self.environment.min_observation_tokens:
            return End(Status.TRUNCATED, "context")
        limit = min(remaining, self.environment.settings.max_obs_tokens)
        return await (
            self._call_tool(action, limit) if isinstance(action, ToolAction) else self._run_search(action, limit)
        )

    async def _run_search(self, action: SearchAction, limit: int) -> End | None:
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
            return End(Status.FAILED, f"search_{result.error}"[:256])
        self.turns[-1] = replace(self.turns[-1], query=action.query)
        # The environment's text for a search without passages is not evidence.
        self._show(result.passages if not result.error else (), limit, ids)
        return None

    async def _call_tool(self, call: ToolAction, limit: int) -> End | None:
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
            return End(Status.FAILED, error[:256])
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

    environment  template, tokenizer, limits, tools and rewards of the process
    question     its gold answers are read by rewards only
    generate     one turn: token ids in, token ids with log-probs and versions out, e.g. a `Router`
    search       one query: passages or a cause out
    sampling     temperature, top-p and top-k of every turn
    session      id of this trajectory, of fixed length (engines match ids by prefix): the hex of a UUID
    group        id shared by the trajectories of one question
    pinned       evaluation: use any READY engine
    should_stop  called with the first version before every turn but the first; True ends it with status STALE
    on_progress  called with each segment and with the trajectory, for metrics; must not raise
    live         what watchers read

    Raises only CancelledError. An error becomes status FAILED with its cause: a cause of EngineError,
    `search_<cause>`, `tool_<name>_<cause>`, `prompt_too_long`, `reward`, or `error_<type>` for a bug, which is logged
    with its traceback.
    """
    return await _Rollout(
        *(environment, question, generate, search, sampling),
        session=session,
        group=group,
        pinned=pinned,
        should_stop=should_stop,
        on_progress=on_progress,
        live=live or LiveTrajectory(session),
    ).finish()
