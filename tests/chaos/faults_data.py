"""Faults of data on the wire and on disk: garbage, flipped bits, duplicate publications."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
import time
from pathlib import Path

from faults import Fault


def flip(path: Path, at: int) -> None:
    """Flips one bit of the byte at `at`, from the middle on."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(size // 2 + at % max(1, size // 2))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))


class CorruptGroup(Fault):
    """An entry in the trajectory stream that cannot be used: random bytes, no seq, or a copy with a flipped bit."""

    name = "corrupt group"
    weight = 2.0
    targets = ("garbage", "no seq", "flipped", "cut short")
    recovery = ("dead letters",)
    lasts = (5.0, 5.0)
    patience_s = 90.0  # its reader may be in a long standstill
    entry = b""

    @property
    def held(self) -> frozenset[str]:
        return frozenset({"redis"})  # a wiped Redis removes the garbage too

    @property
    def over(self) -> bool:
        return bool(self.happened())

    def inject(self) -> bool:
        keys, db = self.ring.keys, self.ring.ask
        found = db(lambda c: c.xrevrange(keys.traj, count=1)) or [(b"", {})]
        fields = dict(found[0][1])
        seq = str(self.ring.issued()).encode()
        if self.target in ("flipped", "cut short"):
            if b"b" not in fields:
                return False
            body = bytearray(fields[b"b"])
            body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
            fields[b"b"] = bytes(body if self.target == "flipped" else body[: len(body) // 2])
        else:
            fields = {b"seq": seq, b"h": self.rng.randbytes(90), b"b": self.rng.randbytes(500)}
        if self.target == "no seq":
            del fields[b"seq"]
        fields.pop(
            b"t", None
        )  # Redis did not count these tokens as published, and the learner's cross-check detects it
        self.entry = db(lambda c: c.xadd(keys.traj, fields, nomkstream=True)) or b""
        return bool(self.entry)

    def happened(self) -> str:
        path = self.ring.run_dir / "dead_letters.jsonl"
        if path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if found.get("id") == self.entry.decode():
                        return f"in the dead letters: {found['reason']}"
        return ""


class CorruptTask(Fault):
    """A task that cannot be read."""

    name = "corrupt task"
    weight = 1.0
    targets = ("with a seq", "no seq")
    recovery = ("dead letters",)
    lasts = (5.0, 5.0)
    patience_s = 90.0  # its reader may be in a long standstill
    entry = b""

    @property
    def held(self) -> frozenset[str]:
        return frozenset({"redis"})

    @property
    def over(self) -> bool:
        return bool(self.happened())

    def inject(self) -> bool:
        fields = {b"b": self.rng.randbytes(80)}
        if self.target == "with a seq":
            fields[b"seq"] = str(self.ring.issued()).encode()
        self.entry = self.ring.ask(lambda c: c.xadd(self.ring.keys.tasks, fields, nomkstream=True)) or b""
        return bool(self.entry)

    def happened(self) -> str:
        message = f"task {self.entry.decode()} "
        return next(("a rollout server buried it" for life in self.ring.lives("rollout") if message in life.text), "")


class CorruptWeights(Fault):
    """Flip a bit of each published version before a node reads it, until a node has refused one."""

    name = "corrupt weights"
    weight = 1.5
    targets = ("weights",)
    lasts = (6.0, 6.0)
    lingers_s = 40.0
    recovery = ("weights refused",)

    def inject(self) -> bool:
        self.folder = self.ring.run_dir / "weights"
        self.flipped: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="flipper", daemon=True)
        self._known = {path.name for path in self.folder.glob("v*")}
        self._thread.start()
        return True

    @property
    def over(self) -> bool:
        return bool(self.happened())

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            for path in self.folder.glob("v*"):
                if path.name not in self._known:
                    self._known.add(path.name)
                    with contextlib.suppress(OSError):
                        flip(path / "model.safetensors", self.rng.randrange(1 << 30))
                        self.flipped.append(path.name[1:])

    def heal(self) -> None:
        self._over.set()
        self._thread.join(5)

    def happened(self) -> str:
        for version in self.flipped:
            message = f"{version} cannot be verified"
            if any(message in life.text for life in self.ring.lives("engine")):
                return f"a node refused {version}"
        return ""


class CorruptCheckpoint(Fault):
    """Flip a bit of a checkpoint that is not current: no process needs it, and none may fail because of it."""

    name = "corrupt checkpoint"
    weight = 0.7
    targets = ("checkpoint",)
    recovery = ()
    seen = ""

    def inject(self) -> bool:
        folder = self.ring.run_dir / "checkpoints"
        try:
            current = (folder / "CURRENT").read_text().strip()
            old = [p for p in sorted(folder.glob("step_*")) if p.name != current]
            path = self.rng.choice(old)
            files = json.loads((path / "manifest.json").read_text())["files"]
            name = max(files, key=lambda n: files[n]["bytes"])
            flip(path / name, self.rng.randrange(1 << 30))
            now = hashlib.sha256((path / name).read_bytes()).hexdigest()
        except (OSError, IndexError):
            return False
        self.ring.spoiled.add(path.name)
        self.seen = f"{path.name}/{name}: its sha256 differs" if now != files[name]["sha256"] else ""
        return True

    def happened(self) -> str:
        return self.seen


class PublishTwice(Fault):
    """Send the bytes of an earlier publication again, like a server that missed the reply."""

    name = "publish twice"
    weight = 3.0
    targets = ("rollout-1", "rollout-2")
    recovery = ()
    reply = b""

    @property
    def held(self) -> frozenset[str]:
        return frozenset()

    def inject(self) -> bool:
        command = self.ring.links.last_publish(self.target)
        if not command:
            return False
        time.sleep(0.05)  # its own reply may still be on the way
        try:
            with socket.create_connection(("127.0.0.1", self.ring.redis_port), timeout=3) as redis:
                redis.settimeout(3)
                redis.sendall(command)
                self.reply = redis.recv(200)
        except OSError:
            return False
        return True

    def happened(self) -> str:
        return "answered DUP" if b"DUP" in self.reply else ""


class Burst(Fault):
    """A rollout server publishes its last group 300 times at once (hooks.py), as after a wait for Redis."""

    name = "publish burst"
    weight = 1.5
    targets = ("rollout-1", "rollout-2")
    lasts = (10.0, 10.0)
    recovery = ("duplicate publications refused",)
    count = 300
    words = "groups published at once"

    @property
    def held(self) -> frozenset[str]:
        return frozenset({f"burst {self.target}"})

    def inject(self) -> bool:
        ward = self.ring.wards[self.target]
        if not ward.alive or not self.ring.links.last_publish(self.target):
            return False
        self.life, self.before = ward.life, ward.life.text.count(self.words)
        (self.ring.hooks / f"{self.target}.burst").write_text(str(self.count))
        return self.life.send(signal.SIGUSR2)

    @property
    def over(self) -> bool:
        return bool(self.happened())

    def happened(self) -> str:
        lines = [line for line in self.life.text.splitlines() if self.words in line]
        return lines[-1] if len(lines) > self.before else ""
