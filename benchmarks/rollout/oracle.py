"""A schedule with complete knowledge, and a lower bound for any schedule. Pure: virtual time.

`bound_s` is a lower bound: the longest trajectory on the fastest engine, or all work at the best rate of all engines,
whichever takes longer. `oracle_s` is a schedule: turns wait in one queue, the trajectory with most work left goes
first, to the engine that is fastest at its present load, with the same model of an engine. It knows every length,
speed and fault, and pays for prefill only of tokens that no engine has computed yet and of turns that a fault ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.rollout.batching import BatchingEngine, BlockCache, Decoding, Speed
from benchmarks.rollout.script import Draws, Faults

NO_FAULTS = Faults()


def bound_s(
    draws: Draws, seed: int, speeds: Sequence[Speed], observation_tokens: int, faults: Faults = NO_FAULTS
) -> float:
    """Return a lower bound in seconds for any schedule."""
    alone = min(speed.alone_s for speed in speeds)
    longest, tokens = 0.0, 0
    for trajectory in range(draws.trajectories):
        own = sum(draws.tokens(seed, trajectory, turn) for turn in range(draws.turns))
        searches = sum(draws.search_s(seed, trajectory, turn) for turn in range(draws.turns - 1))
        longest, tokens = max(longest, own * alone + searches), tokens + own
    observed = draws.trajectories * (draws.turns - 1) * observation_tokens
    # engine seconds at slowness 1, and the equivalent number of engines with slowness 1
    work = tokens * speeds[0].token_s / speeds[0].slowness + observed * speeds[0].prefill_s
    rate = sum(1 / speed.slowness for speed in speeds)
    lost = sum(faults.lost_s(i) / speed.slowness for i, speed in enumerate(speeds))
    return max(longest, (work + lost) / rate)


@dataclass
class _Turn:
    trajectory: int
    turn: int = 0
    written: int = 0
    context: int = 0
    """Number of tokens before the output."""
    fresh: int = 1
    """Number of those that must be computed."""


class _ScheduledTurn(Decoding):
    def __init__(self, turn: _Turn, tokens: int) -> None:
        super().__init__(range(turn.fresh), range(tokens - turn.written))
        self.turn = turn


class _Engine(BatchingEngine):
    """An engine of the schedule: `life` increases when it dies, `until` is the end of its downtime."""

    def __init__(self, speed: Speed) -> None:
        super().__init__(speed, BlockCache(0))
        self.life, self.until, self.stepping = 0, 0.0, False


def oracle_s(
    draws: Draws,
    seed: int,
    speeds: Sequence[Speed],
    observation_tokens: int,
    faults: Faults = NO_FAULTS,
    *,
    question_tokens: int = 8,
) -> float:
    """Return the duration of the schedule in seconds (see the module)."""
    return _Schedule(draws, seed, speeds, observation_tokens, faults, question_tokens).seconds()


class _Schedule:
    def __init__(
        self, draws: Draws, seed: int, speeds: Sequence[Speed], observation: int, faults: Faults, question: int
    ) -> None:
        self._draws, self._seed, self._faults, self._observation = draws, seed, faults, observation
        self._engines = [_Engine(speed) for speed in speeds]
        self._ready = [_Turn(t, context=question, fresh=question) for t in range(draws.trajectories)]
        self._left = [sum(self._tokens(t, u) for u in range(draws.turns)) for t in range(draws.trajectories)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def seconds(self) -> float:
        if self._faults.down >= 0:
            self._at(self._faults.down_s, self._fail)
        self._at(0.0, lambda now: None)
        open_, last = self._draws.trajectories, 0.0
        while self._events and open_:
            now, _, act = heapq.heappop(self._events)
            act(now)
            self._dispatch(now)
            last, open_ = now, sum(left > 0 for left in self._left)
        return last

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _tokens(self, trajectory: int, turn: int) -> int:
        return self._draws.tokens(self._seed, trajectory, turn)

    def _dispatch(self, now: float) -> None:
        self._ready.sort(key=lambda turn: self._left[turn.trajectory])
        while self._ready:
            free = [e for e in self._engines if e.until <= now and _load(e) < e.speed.max_running]
            if not free:
                return
            best = min(free, key=lambda e: e.speed.slowness * (e.speed.step_s + e.speed.request_s * _load(e)))
            turn = self._ready.pop()
            best.add(_ScheduledTurn(turn, self._tokens(turn.trajectory, turn.turn)))
            self._step(best, now)

    def _step(self, engine: _Engine, now: float) -> None:
        if engine.stepping or not engine.busy:
            return
        pauses = self._faults.pauses(self._engines.index(engine))
        begin = max([now, *(end for start, end in pauses if start <= now < end)])
        seconds, advanced = engine.step()
        engine.stepping, life = True, engine.life
        self._at(begin + seconds, lambda done: self._stepped(engine, life, advanced, done))

    def _stepped(self, engine: _Engine, life: int, advanced: list[Decoding], now: float) -> None:
        if engine.life != life:
            return
        engine.stepping = False
        for request in advanced:
            assert isinstance(request, _ScheduledTurn)
            self._left[request.turn.trajectory] -= 1
            if request.done:
                self._ended(request.turn, now)
        self._step(engine, now)

    def _ended(self, turn: _Turn, now: float) -> None:
        if turn.turn == self._draws.turns - 1:
            return
        written = self._tokens(turn.trajectory, turn.turn)
        context = turn.context + written + self._observation
        following = _Turn(turn.trajectory, turn.turn + 1, 0, context, self._observation)
        search = self._draws.search_s(self._seed, turn.trajectory, turn.turn)
        self._at(now + search, lambda _: self._ready.append(following))

    def _fail(self, now: float) -> None:
        engine = self._engines[self._faults.down]
        engine.life, engine.stepping, engine.until = engine.life + 1, False, now + self._faults.away_s
        for request in [*engine.running, *engine.waiting]:
            assert isinstance(request, _ScheduledTurn)
            engine.drop(request)
            turn = request.turn
            # tokens of an unfinished step do not count: they count when `_stepped` sees them
            seen = self._tokens(turn.trajectory, turn.turn) - self._open_tokens(turn)
            whole = turn.context + seen
            self._ready.append(_Turn(turn.trajectory, turn.turn, seen, turn.context, max(1, whole)))
        self._at(engine.until, lambda _: None)

    def _open_tokens(self, turn: _Turn) -> int:
        later = sum(self._tokens(turn.trajectory, u) for u in range(turn.turn + 1, self._draws.turns))
        return self._left[turn.trajectory] - later


def _load(engine: BatchingEngine) -> int:
    return len(engine.running) + len(engine.waiting)
