"""The service of the retriever benchmark: a real process, measured from outside.

loop    consumes    produces                        waits for        unblocked by
Watch   -           health latencies, memory peaks  `EVERY_S`        the end of its block
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from benchmarks.base import Say, cpu_seconds
from benchmarks.retriever.load import percentile
from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.supervisor import Readiness, Supervisor
from protocol.runtime.net import free_port
from retriever.config import RetrieverSettings

READY_S = 600.0
"""Timeout for the start, in seconds: an index of many GB is verified first."""
EVERY_S = 0.25
HEALTH_S = 5.0
"""Timeout for GET /health, in seconds."""


@dataclass(frozen=True)
class RetrieverProcess:
    """A retriever at `url`."""

    url: str
    pid: int

    def counters(self) -> dict[str, float]:
        """Return every series of its GET /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("foray_retriever_"): float(value) for name, _, value in lines}

    def memory_mib(self) -> dict[str, float]:
        """Return `VmHWM` (peak resident) and `RssAnon` (present, anonymous); only the first includes mapped files."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return {name: int(found[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon")}


@contextmanager
def serving(settings: RetrieverSettings, directory: Path, name: str, say: Say) -> Iterator[RetrieverProcess]:
    """Run the service as a process while the block runs. Raises ProcessFailed if it does not start."""
    url = f"http://127.0.0.1:{free_port()}"
    chosen = settings.model_dump(mode="json") | {"port": urlsplit(url).port}
    config = directory / f"{name}.yaml"
    config.write_text(json.dumps({"retriever": chosen}))  # JSON is valid YAML
    argv = (sys.executable, "-m", "retriever", "--config", str(config))
    env = {"OMP_NUM_THREADS": str(settings.threads)}
    supervisor = Supervisor(is_ready=Readiness("", "bench"), ready_s=READY_S, shutdown_s=10.0, say=say)
    try:
        spec = ProcessSpec(name, "retriever", argv, directory / f"{name}.log", Ready.HTTP, url, env)
        child = supervisor.spawn(spec)
        supervisor.await_ready([name])
        yield RetrieverProcess(url, child.pid)
    finally:
        supervisor.stop()


@dataclass
class Watch:
    """Monitor a service in a thread while the block runs: latency of /health, and peak memory."""

    service: RetrieverProcess
    latencies_s: list[float] = field(default_factory=list)
    failed: int = 0
    anon_mib: list[float] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            begun = time.perf_counter()
            if self._answers():
                self.latencies_s.append(time.perf_counter() - begun)
            else:
                self.failed += 1
            self.anon_mib.append(self.service.memory_mib()["RssAnon"])
            self._over.wait(EVERY_S)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(urlsplit(self.service.url).netloc, timeout=HEALTH_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def figures(self) -> dict[str, Any]:
        """Return the probes of /health, and memory in MiB."""
        answered = self.latencies_s or [float("inf")]
        return {
            "health_probes": len(self.latencies_s) + self.failed,
            "health_failed": self.failed,
            "health_p99_s": percentile(answered, 0.99),
            "health_max_s": max(answered),
            "anon_peak_mib": max(self.anon_mib),
            "resident_peak_mib": self.service.memory_mib()["VmHWM"],
        }


class ServiceMeter:
    """Counters and CPU time of a service during a block."""

    def __init__(self, service: RetrieverProcess) -> None:
        self._service = service

    def __enter__(self) -> ServiceMeter:
        self._counters, self._cpu = self._service.counters(), cpu_seconds(self._service.pid)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cpu = cpu_seconds(self._service.pid) - self._cpu
        after = self._service.counters()
        self._counters = {name: value - self._counters.get(name, 0.0) for name, value in after.items()}

    def figures(self, queries: int) -> dict[str, Any]:
        """Return the figures of a block with `queries` queries."""
        calls = self._counters["index_calls_total"]
        return {
            "searched": round(self._counters["searched_total"]),
            "index_calls": round(calls),
            "mean_batch": self._counters["searched_total"] / calls if calls else 0.0,
            "refused_429": round(self._counters["rejected_total"]),
            "cpu_s": self._cpu,
            "cpu_ms_per_query": 1000 * self._cpu / queries,
        }
