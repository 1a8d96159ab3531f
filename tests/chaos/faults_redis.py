"""Faults of Redis itself: full, or emptied."""

from __future__ import annotations

import signal

from faults import Fault


class RedisFull(Fault):
    """Set maxmemory below the memory in use: Redis refuses new data for a while."""

    name = "redis full"
    weight = 2.0
    targets = ("redis",)
    lasts = (1.0, 5.0)
    recovery = ("Redis away and back",)

    def inject(self) -> bool:
        self.before = self._refused()
        return bool(self.before >= 0 and self.ring.ask(lambda db: db.config_set("maxmemory", "600kb")))

    def heal(self) -> None:
        self.seen = self._refused()
        self.ring.ask(lambda db: db.config_set("maxmemory", f"{self.ring.maxmemory_mb}mb"))

    def happened(self) -> str:
        refused = getattr(self, "seen", 0) - self.before
        return f"{refused} commands refused with OOM" if refused > 0 else ""

    def _refused(self) -> int:
        stats = self.ring.ask(lambda db: db.info("errorstats"))
        return -1 if stats is None else int(stats.get("errorstat_OOM", {}).get("count", 0))


class Wipe(Fault):
    """SIGKILL and delete its files: it restarts empty."""

    name = "wipe redis"
    weight = 1.5
    targets = ("redis",)
    recovery = ("state made again",)

    def inject(self) -> bool:
        ward = self.ring.wards["redis"]
        self.keys = int(self.ring.ask(lambda db: db.dbsize()) or 0)
        if not ward.alive or not self.keys:
            return False
        self.life = ward.life
        self.life.doomed = self.name
        self.ring.lose_redis = True
        return self.life.send(signal.SIGKILL)

    def happened(self) -> str:
        gone = self.life.status == -signal.SIGKILL and not self.ring.lose_redis
        return f"exit status -9, {self.keys} keys and the append-only file gone" if gone else ""


class Flush(Fault):
    """FLUSHALL and, half the time, FUNCTION FLUSH too: a user at the wrong prompt."""

    name = "flushall"
    weight = 2.0
    targets = ("redis",)
    recovery = ("state made again",)
    seen = ""

    def inject(self) -> bool:
        keys = self.ring.ask(lambda db: db.dbsize())
        if not keys or not self.ring.ask(lambda db: db.flushall()):
            return False
        also = self.rng.random() < 0.5 and bool(self.ring.ask(lambda db: db.function_flush()))
        self.seen = f"{keys} keys gone{', and the functions' if also else ''}"
        return True

    def happened(self) -> str:
        return self.seen
