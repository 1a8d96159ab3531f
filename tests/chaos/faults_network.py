"""Faults of the links between a process and Redis, and between rollout servers and the retriever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import ClassVar

from faults import Fault
from proxy import FAIR, Weather

TO_REDIS = ("learner", "rollout-1", "rollout-2", "engine-1", "engine-2")
TO_SEARCH = ("rollout-1.search", "rollout-2.search")


class _OfLink(Fault):
    """A fault of a link. `signs`: counters of the link that only this fault increments."""

    targets = (*TO_REDIS, *TO_SEARCH)
    lingers_s = 20.0
    signs: tuple[str, ...] = ()

    @property
    def held(self) -> frozenset[str]:
        return frozenset({f"link {self.target}"})

    def weather(self) -> Weather:
        raise NotImplementedError

    def inject(self) -> bool:
        if self.target not in self.ring.links.links:
            return False
        self.before = self.ring.links.counts(self.target)
        self.ring.links.set(self.target, self.weather())
        return True

    def heal(self) -> None:
        self.ring.links.set(self.target, FAIR)

    def happened(self) -> str:
        now = self.ring.links.counts(self.target)
        moved = Counter({sign: now[sign] - self.before[sign] for sign in self.signs})
        return ", ".join(f"{sign} {n}" for sign, n in moved.items() if n > 0)


class Partition(_OfLink):
    """Drop all traffic silently, for less or more time than the leases."""

    name = "partition"
    weight = 4.0
    lasts = (1.0, 7.0)
    signs = ("held",)
    recovery = ("Redis away and back", "tasks reclaimed", "lease taken again", "searches retried")

    def weather(self) -> Weather:
        return Weather(hole=True)


class Down(_OfLink):
    """Reset and refuse connections."""

    name = "down"
    weight = 3.0
    lasts = (0.5, 5.0)
    signs = ("reset", "refused")
    recovery = ("Redis away and back", "searches retried")

    def weather(self) -> Weather:
        return Weather(down=True)


class Slow(_OfLink):
    """Add latency and limit the bandwidth."""

    name = "slow"
    weight = 2.0
    targets = TO_REDIS
    lasts = (1.0, 5.0)
    signs = ("late",)
    recovery = ()

    def weather(self) -> Weather:
        return replace(FAIR, latency_s=self.rng.uniform(0.02, 0.4), bytes_per_s=self.rng.choice((0.0, 50e3, 500e3)))


class CutReply(_OfLink):
    """Execute a command and lose its reply."""

    name = "cut reply"
    weight = 5.0
    targets = ("learner", "learner", "rollout-1", "rollout-2")
    lasts = (4.0, 4.0)
    signs = ("reply_cut",)
    recovery = ("Redis away and back", "duplicate publications refused", "duplicate groups refused")
    words: ClassVar[dict[str, tuple[bytes, ...]]] = {
        "learner": (b"foray_issue", b"foray_ack", b"foray_target", b"XREADGROUP", b"foray_renew", b"foray_reissue"),
        "rollout": (b"foray_publish", b"foray_publish", b"foray_beat", b"XREADGROUP", b"foray_retry"),
    }

    def weather(self) -> Weather:
        return Weather(cut_reply=self.rng.choice(self.words[self.target.partition("-")[0]]))

    @property
    def over(self) -> bool:
        return bool(self.happened())


class CutInTheMiddle(_OfLink):
    """Break the connection in the middle of a transmission."""

    name = "cut in the middle"
    weight = 2.0
    targets = TO_REDIS
    lasts = (1.0, 3.0)
    signs = ("cut_in_the_middle",)
    recovery = ("Redis away and back",)

    def weather(self) -> Weather:
        return Weather(limit=self.rng.randrange(200, 6000))
