"""The processes of a run, each started manually with its command line, as from separate shells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import redis

from deploy.run.redis_server import connect
from protocol.codec import decode_as
from protocol.keys import Keys
from protocol.messages import EngineInfo
from protocol.runtime.net import free_port


class Shells:
    """Start processes, and end those that it started, by pid."""

    def __init__(self, directory: Path, config: Path) -> None:
        self.directory, self.config = directory, config
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.redis_url = f"redis://127.0.0.1:{free_port()}/0"

    def start(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        """Run `python argv`, its output in NAME.log."""
        env = {**os.environ, "FORAY_REDIS_URL": self.redis_url, "OMP_NUM_THREADS": "1"}
        with (self.directory / f"{name}.log").open("ab") as log:
            child = subprocess.Popen([sys.executable, *argv], stdout=log, stderr=log, env=env, cwd=self.directory)
        self.children[name] = child
        return child

    def process(self, name: str, module: str, *overrides: str) -> subprocess.Popen[bytes]:
        """Run `python -m module --config ...`."""
        return self.start(name, "-m", module, "--config", str(self.config), "retriever.port=0", *overrides)

    def log(self, name: str) -> str:
        """What a process has printed."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def client(self) -> redis.Redis:
        """A client of the run's Redis."""
        return connect(self.redis_url)

    def engines(self, keys: Keys) -> dict[str, EngineInfo]:
        """The engines that are registered."""
        with self.client() as client:
            names = [raw.decode() for raw in client.zrange(keys.engines, 0, -1)]
            found = {name: client.hget(keys.engine(name), "b") for name in names}
        return {name: decode_as(EngineInfo, raw) for name, raw in found.items() if raw}

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.children[name].kill()
        self.children[name].wait(10)

    def __enter__(self) -> Shells:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for child in reversed(self.children.values()):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for child in self.children.values():
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)
