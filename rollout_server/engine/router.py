"""Which engine generates a turn, and what happens when it does not: the real `Generate`.

A turn is one request. An engine that dies, stalls or babbles costs that turn and nothing else: everything before it
(prompt, finished turns, observations) is here as token ids, so another engine goes on from exactly these tokens and
only the unfinished turn is sampled again.

Who gets a turn:
  1. a trajectory stays with its engine, whose prefix cache holds its earlier turns;
  2. a new trajectory goes where its group started, so that the prompt is computed once;
  3. a new group goes to the engine with the fewest tokens in flight from here.
Rules 1 and 2 give way when that engine is much busier than the idlest one: an engine that joins late is given work
at once, and not only when the old ones run dry.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from protocol.messages import EngineInfo
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.engine.health import Health
from rollout_server.fleet import Fleet
from rollout_server.waits import Waits

REMEMBERED = 65_536
"""Sessions and groups whose engine is remembered; forgetting one costs a prefill."""
BUSIER_RATIO, BUSIER_REQUESTS = 2.0, 4
"""An engine is much busier at twice the idlest one's tokens in flight and four requests of this size more."""
RECHECK_S = 0.5
"""How often one who waits looks again: an engine may end its rest without any change in Redis."""


class EngineClient(Protocol):
    """What the router needs of an engine's client."""

    async def generate(
        self, request: GenerateRequest, *, version: str, timeout_s: float, vocab_size: int | None
    ) -> Completion: ...


class Router:
    """`await router(request)`; raises EngineError when no engine could, after every retry that makes sense."""

    def __init__(
        self,
        fleet: Fleet,
        connect: Callable[[EngineInfo], EngineClient],
        waits: Waits,
        *,
        max_lag: int,
        timeout_s: float,
        attempts: int,
        wait_s: float,
        vocab_size: int | None = None,
        tokenizer: str = "",
    ) -> None:
        self._fleet, self._connect, self._waits = fleet, connect, waits
        self._max_lag, self._timeout_s, self._attempts, self._wait_s = max_lag, timeout_s, attempts, wait_s
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self.health = Health()
        self.tokens_in_flight: dict[str, int] = {}
        """engine id -> tokens of its requests from here, prompt and allowance for the answer"""
        self.failovers = 0
        self._engine_of: OrderedDict[str, str] = OrderedDict()
        """s:<session> or g:<group> -> engine id, least recently used first"""

    async def __call__(self, request: GenerateRequest) -> Completion:
        failures: dict[str, int] = {}
        attempts = 0
        deadline = time.monotonic() + self._wait_s
        while True:
            engine = await self._next_engine(request, failures, deadline)
            try:
                completion = await self._attempt(engine, request)
            except EngineError as error:
                if error.cause == "refused":
                    raise  # the request itself is wrong: every engine would say so
                self._blame(engine, error)
                attempts += error.cause not in ("unreachable", "aborted")
                if attempts >= self._attempts:
                    raise
                failures[engine.id] = failures.get(engine.id, 0) + 1
                self.failovers += 1
            else:
                self.health.praise(incarnation_key(engine))
                return completion

    def candidates(self, *, pinned: bool) -> list[EngineInfo]:
        """Engines that may be given a request now."""
        table = self._fleet.table
        if pinned:
            allowed = table.pinned(self._tokenizer)
        else:
            allowed = [
                e for e in table.engines.values() if table.routable(e, max_lag=self._max_lag, tokenizer=self._tokenizer)
            ]
        return [e for e in allowed if self.health.usable(incarnation_key(e))]

    async def _next_engine(self, request: GenerateRequest, failures: dict[str, int], deadline: float) -> EngineInfo:
        """Waits for an engine that may take the request; raises EngineError("no_engine") at the deadline."""
        found = self.candidates(pinned=request.pinned)
        if not found:
            with self._waits.during("engine"):
                while not found:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise EngineError("no_engine", detail=f"none may take a request for {self._wait_s:g} s")
                    await self._fleet.changed(min(left, RECHECK_S))
                    found = self.candidates(pinned=request.pinned)
        return self._choose(found, request, failures)

    def _choose(self, found: list[EngineInfo], request: GenerateRequest, failures: dict[str, int]) -> EngineInfo:
        # the engines that failed this very turn come last
        fewest = min(failures.get(e.id, 0) for e in found)
        found = [e for e in found if failures.get(e.id, 0) == fewest]
        idlest = min(found, key=lambda e: (self._load(e), e.running + e.waiting, e.id))
        by_id = {e.id: e for e in found}
        size = len(request.ids) + request.max_new_tokens
        for name in (f"s:{request.session}", f"g:{request.group}"):
            usual = by_id.get(self._engine_of.get(name, ""))
            if usual is not None:
                busy = self._load(usual) > BUSIER_RATIO * self._load(idlest) + BUSIER_REQUESTS * size
                chosen = idlest if busy else usual
                break
        else:
            chosen = idlest
        self._remember(f"s:{request.session}", chosen.id)
        self._remember(f"g:{request.group}", chosen.id)
        return chosen

    async def _attempt(self, engine: EngineInfo, request: GenerateRequest) -> Completion:
        size = len(request.ids) + request.max_new_tokens
        self.tokens_in_flight[engine.id] = self._load(engine) + size
        try:
            return await self._connect(engine).generate(
                request, version=engine.version.label, timeout_s=self._timeout_s, vocab_size=self._vocab_size
            )
        finally:
            left = self.tokens_in_flight[engine.id] - size
            if left:
                self.tokens_in_flight[engine.id] = left
            else:
                del self.tokens_in_flight[engine.id]

    def _blame(self, engine: EngineInfo, error: EngineError) -> None:
        if error.cause in ("unreachable", "aborted"):
            self.health.unreachable(incarnation_key(engine))
        else:
            self.health.strike(incarnation_key(engine))
        self.health.forget_all_but(
            {incarnation_key(e) for e in self._fleet.table.engines.values()} | {incarnation_key(engine)}
        )

    def _load(self, engine: EngineInfo) -> int:
        return self.tokens_in_flight.get(engine.id, 0)

    def _remember(self, name: str, engine_id: str) -> None:
        self._engine_of[name] = engine_id
        self._engine_of.move_to_end(name)
        if len(self._engine_of) > REMEMBERED:
            self._engine_of.popitem(last=False)


def incarnation_key(engine: EngineInfo) -> str:
    """What strikes are booked under: a restarted engine starts with none."""
    return f"{engine.id}/{engine.incarnation}"
