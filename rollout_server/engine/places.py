"""What this server has in flight at each engine, and whether one more may go there. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.messages import EngineInfo
from rollout_server.engine.choose import foreign_tokens
from rollout_server.engine.window import Window


def incarnation_key(engine: EngineInfo) -> str:
    """What everything that is known of an engine is booked under: a restarted one starts anew."""
    return f"{engine.id}/{engine.incarnation}"


@dataclass
class _Place:
    window: Window
    tokens: int = 0
    foreign: float = 0.0
    """tokens of other rollout servers, by the last heartbeat"""


class Places:
    """By incarnation. `adaptive` False: there is always room."""

    def __init__(self, *, adaptive: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._adaptive, self._clock = adaptive, clock
        self._places: dict[str, _Place] = {}

    def report(self, engines: Iterable[EngineInfo]) -> None:
        """The engine table as of now. Incarnations that are gone are forgotten when their last request is."""
        now = self._clock()
        present = {incarnation_key(engine): engine for engine in engines}
        for engine in present.values():
            place = self._of(engine)
            place.window.observe(engine, now)
            ours = place.window.in_flight
            place.foreign = foreign_tokens(engine, ours, place.tokens // ours if ours else 1)
        for key in [k for k, p in self._places.items() if k not in present and not p.window.in_flight]:
            del self._places[key]

    def room(self, engine: EngineInfo, *, returning: bool = False) -> bool:
        """Whether one more request may go there. `returning`: see `Window.room`."""
        return self._of(engine).window.room(returning=returning) or not self._adaptive

    def load(self, engine: EngineInfo) -> float:
        """Tokens in flight there: ours, prompt and allowance for the answer, and what others seem to have."""
        place = self._of(engine)
        return place.tokens + place.foreign

    def enter(self, engine: EngineInfo, size: int) -> None:
        """A request of `size` tokens goes there."""
        place = self._of(engine)
        place.window.in_flight += 1
        place.tokens += size

    def leave(self, engine: EngineInfo, size: int) -> None:
        """It is over."""
        place = self._of(engine)
        place.window.in_flight -= 1
        place.tokens -= size

    def window(self, engine: EngineInfo) -> int | None:
        """Requests that may be in flight there; None: any number."""
        return self._of(engine).window.size if self._adaptive else None

    def requests(self, engine: EngineInfo) -> int:
        """Requests of ours in flight there."""
        return self._of(engine).window.in_flight

    def tokens(self, engine: EngineInfo) -> int:
        """Tokens of ours in flight there."""
        return self._of(engine).tokens

    @property
    def in_flight(self) -> int:
        """Requests of ours in flight anywhere."""
        return sum(place.window.in_flight for place in self._places.values())

    def _of(self, engine: EngineInfo) -> _Place:
        key = incarnation_key(engine)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(Window(engine, self._clock()))
        return place
