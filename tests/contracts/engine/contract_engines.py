"""The three engines of the contract, each behind a real socket, and their known differences."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from protocol.runtime.net import free_port
from tests.support.fake_engine import FakeServer, next_ids
from tests.support.forks import Zygote

Kind = Literal["fake", "cpu", "sglang"]
LAUNCHER = Path(__file__).parents[3] / "requirements" / "sglang_cpu_launch.py"
USER_KEY, ADMIN_KEY = "user-key", "admin-key"
START_S = 240.0
"""SGLang imports for half a minute when it is alone, and for minutes when it is not: this long without a line."""
PATIENCE_S = 100.0
"""Timeout of a call. A machine may be five times slower than the one that these tests were written on."""
HEALTH_S = 4
HEALTH = {"SGLANG_HEALTH_CHECK_TIMEOUT": str(HEALTH_S)}
"""How long /health of SGLang waits for the token that it generates: 20 s by default."""
PR_SET_PDEATHSIG = 1
LOGS: list[Path] = []
"""Of every SGLang that was started; pytest keeps its folders of the last runs."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Server:
    """A running engine, the model it serves as version 1.0 (`first`), and one of other weights (`second`)."""

    url: str
    kind: Kind
    first: Path
    second: Path
    scratch: Path
    log: Path | None = None
    policies: dict[Path, Any] = field(default_factory=dict)

    @property
    def real(self) -> bool:
        return self.kind == "sglang"

    def policy(self, path: Path) -> Any:
        """The model in `path` by transformers, in float32."""
        if path not in self.policies:
            self.policies[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return self.policies[path]

    def policy_of(self, weights: dict[str, torch.Tensor]) -> Any:
        """The same architecture with other weights."""
        like = self.policy(self.first)
        policy = type(like)(like.config).eval()
        policy.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
        policy.tie_weights()
        return policy

    def logprobs(self, path: Path, ids: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of ids[start:] by transformers with the weights in `path`."""
        with torch.inference_mode():
            logits = self.policy(path)(torch.tensor([ids])).logits[0]
        return picked(logits[start - 1 : -1], ids[start:], temperature)


def picked(logits: torch.Tensor, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of each id under the row of logits [len(ids), vocab] that belongs to it."""
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@contextlib.contextmanager
def scripted() -> Iterator[str]:
    """The fake in a thread with a separate event loop, since each test has a different one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake engine", daemon=True)
    thread.start()
    # slow enough that a pause meets a generation that runs
    fake = FakeServer(_as_many_as_asked, version="1.0", pace_s=0.001)
    try:
        asyncio.run_coroutine_threadsafe(fake.start(), loop).result(10)
        yield fake.url
        asyncio.run_coroutine_threadsafe(fake.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _as_many_as_asked(body: dict[str, Any]) -> list[int]:
    return next_ids(body["input_ids"], body["sampling_params"]["max_new_tokens"])


@contextlib.contextmanager
def cpu_engine(zygote: Zygote, model: Path, log: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """The CPU engine as a separate process, which must exit with code 0 on SIGTERM."""
    log.touch()
    argv = ["--model-path", str(model), "--port", "0", *flags]
    pid = zygote.start("rollout_server.cpu_engine", argv, log, env or {}, model.parent)
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"^listening on (http://127.0.0.1:\d+)$", log.read_text(), re.M)):
            assert zygote.ended(pid) is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield found[1]
        os.kill(pid, signal.SIGTERM)
        assert zygote.wait(pid, 60) == 0
    finally:
        zygote.kill(pid)


@contextlib.contextmanager
def sglang(python: Path, model: Path, log: Path, *flags: str, ranks: int = 1) -> Iterator[str]:
    """Real SGLang on the CPU in a separate process group, with its output in `log`. Killed on exit."""
    port = free_port("127.0.0.1")
    command = [str(python), str(LAUNCHER), "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    # without a limit the cache takes most of the machine's memory
    command += ["--max-total-tokens", "65536", "--skip-server-warmup", "--enable-metrics", "--tp", str(ranks), *flags]
    LOGS.append(log)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=model.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **HEALTH, **_cores(ranks)},
            start_new_session=True,
            preexec_fn=_die_with_us,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield url
    finally:
        _end_group(process)


def _cores(ranks: int) -> dict[str, str]:
    """One core for each of several ranks: by default SGLang requires a NUMA node for each."""
    allowed = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(allowed[rank % len(allowed)]) for rank in range(ranks))
    return {"SGLANG_CPU_OMP_THREADS_BIND": bind} if ranks > 1 else {}


def _die_with_us() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    size, deadline = -1, 0.0
    while True:
        assert process.poll() is None, f"SGLang ended with {process.returncode}:\n{tail(log)}"
        if log.stat().st_size != size:
            size, deadline = log.stat().st_size, time.monotonic() + START_S
        assert time.monotonic() < deadline, f"SGLang is not up, and silent for {START_S:g} s:\n{tail(log)}"
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url + "/health", timeout=30):
            return
        time.sleep(0.5)


def _end_group(process: subprocess.Popen[bytes], patience_s: float = 15.0) -> None:
    """SIGTERM, and SIGKILL for what is left; its last process tidies the semaphores up once the others are gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience_s
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            break
    process.wait()


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
