"""What a person reads when something has gone wrong: `python tests/chaos/messages.py [SITUATION ...]`.

Each situation is made with real processes (the learner's own `main`, the node's, `foray status`; a real Redis; a disk
that is really full) on a model of four numbers and a scripted engine, and what they print is printed here, with their
exit codes. Nothing is invented: a line without a `$` was written by the process of the line above it. Times of day are
cut from log lines. Exit code: 1 when a process ended otherwise than it should have.

Processes are forked from this one, which has imported everything and has no threads.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import redis
import yaml

import learner.loop
import learner.serve
import learner.source
from deploy import cli as foray
from deploy.redis_child import find_server
from learner import cli as learner_cli
from learner.entry import Entry
from protocol.keys import Keys
from protocol.messages import NodeState
from rollout_server.node import cli as node_cli
from rollout_server.node.config import NodeSettings  # noqa: F401 - imported before the forks
from rollout_server.testing import write_tokenizer

RUN = "demo"
LEASE_S = 1.0
PATIENCE_S = 60.0
PR_SET_PDEATHSIG = 1
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ", re.M)


def beside_the_learners_tests(name: str) -> ModuleType:
    """The module `tests/learner/NAME.py`."""
    path = Path(__file__).parent.parent / "learner" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"foray_tests_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tiny = beside_the_learners_tests("tiny")


@dataclass
class Process:
    """A fork that runs `call` and ends with what it returns; `log`: what it prints."""

    call: Callable[[], int | None]
    log: Path
    status: int | None = None
    pid: int = 0

    def start(self) -> Process:
        self.pid = os.fork()
        if self.pid == 0:
            self._become()
        return self

    def _become(self) -> None:
        """In the fork. Never returns."""
        status: int | None = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            status = self.call()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status or 0)

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it lives."""
        if self.status is None:
            pid, raw = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(raw) if pid else None
        return self.status

    def wait(self) -> int:
        """Until it ends; fails loudly when it does not."""
        until(lambda: self.poll() is not None, f"the end of {self.log.name}:\n{self.text}")
        assert self.status is not None
        return self.status

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def until(true: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Polls; raises AssertionError with the description."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"within {seconds:g} s: {what}"
        time.sleep(0.02)


@dataclass
class Stage:
    """One run in a directory of its own, which is the current one: paths in messages are short."""

    db: redis.Redis
    processes: list[Process] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def keys(self) -> Keys:
        return Keys(RUN)

    @property
    def run_dir(self) -> Path:
        return Path("runs") / RUN

    def fork(self, name: str, call: Callable[[], int | None]) -> Process:
        self.processes.append(Process(call, Path(f"{name}-{len(self.processes)}.log").absolute()).start())
        return self.processes[-1]

    def learner(self, *argv: str, prepare: Callable[[], None] = lambda: None, **engine: Any) -> Process:
        """A learner with the engine of four numbers. prepare: called in its process before it begins"""

        def call() -> int:
            prepare()
            make = partial(tiny.TinyEngine, **{"pace_s": 0.05, **engine})
            learner.serve.serve.__kwdefaults__["make_engine"] = make
            learner.loop.RETRY_CHECKPOINT_S = 1.0
            return learner_cli.main(["--config", "run.yaml", *argv])

        return self.fork("learner", call)

    def player(self) -> Process:
        """A rollout server that makes up its groups."""

        def call() -> int:
            address = self.db.connection_pool.connection_kwargs["path"]
            with tiny.Player({"unix_socket_path": address}, RUN):
                signal.pause()
            return 0

        return self.fork("player", call)

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def reaches(self, step: int) -> None:
        until(lambda: self.step() >= step, f"step {step}; the learner said:\n{self.processes[-1].text[-3000:]}")

    # --- what is printed ---

    def tell(self, command: str, text: str, status: int | None = None, expected: int | None = None) -> None:
        """The command, what its process said, and how it ended."""
        print(f"$ {command}\n{_STAMP.sub('', text).rstrip()}")
        if status is not None:
            print(f"[exit code {status}]")
        print()
        if status != expected:
            self.failures.append(f"{command}: exit code {status}, not {expected}")

    def status(self) -> None:
        """`foray status`, as it is now."""
        asked = self.fork("status", lambda: foray.main(["status", "--config", "run.yaml"]))
        code = asked.wait()
        self.tell("foray status --config run.yaml", asked.text, code, 1)

    def clear(self) -> None:
        """Ends every process of this situation."""
        for process in self.processes:
            if process.poll() is None:
                process.send(signal.SIGCONT)
                process.send(signal.SIGKILL)
                process.wait()


def last_words(text: str, *words: str) -> str:
    """The warnings, errors and final message of a log; only lines with one of `words`, where any are given."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("error:")), len(lines))
    told = [line for line in lines[:end] if re.search(r" (WARNING|ERROR) ", line)]
    if words:
        told = [line for line in told if any(word in line for word in words)]
    return "\n".join([*dict.fromkeys(told), *lines[end:]])


LEARN = "python -m learner --config run.yaml"


def two_learners(stage: Stage) -> None:
    """Somebody starts a second learner while the first one trains; then means it."""
    stage.player()
    first = stage.learner()
    stage.reaches(2)
    second = stage.learner()
    code = second.wait()
    stage.tell(
        f"{LEARN}                # process {first.pid} trains this run already", last_words(second.text), code, 2
    )
    third = stage.learner("--takeover")
    code = first.wait()
    stage.tell(f"{LEARN}                # process {first.pid}, after {third.pid} was started with --takeover",
               last_words(first.text), code, 75)  # fmt: skip


def woken(stage: Stage) -> None:
    """A learner is stopped for longer than its lease lives; a successor takes its place; the first one wakes up."""
    stage.player()
    first = stage.learner()
    stage.reaches(3)
    first.send(signal.SIGSTOP)
    second = stage.learner()
    until(lambda: stage.db.get(stage.keys.epoch) == b"2", f"the successor begins:\n{second.text[-2000:]}")
    before = stage.step()
    stage.reaches(before + 3)
    checkpoints = stage.run_dir / "checkpoints"
    until(lambda: ".e2" in (checkpoints / "CURRENT").read_text(), "the successor commits a checkpoint")
    first.send(signal.SIGCONT)
    code = first.wait()
    why = f"stopped for longer than learner.lease_s={LEASE_S:g}, then woken"
    stage.tell(f"{LEARN}                # process {first.pid}, {why}", last_words(first.text), code, 75)
    litter = [p.name for p in checkpoints.glob(".step_*.e1.tmp")]
    if ".e2" not in (checkpoints / "CURRENT").read_text() or litter or second.poll() is not None:
        stage.failures.append(f"the woken learner touched the disk: {litter}, or ended its successor: {second.status}")


def half_loaded_engine(stage: Stage) -> None:
    """An engine fails in the middle of loading a version."""
    import asyncio

    from rollout_server.engine.fake_server import FakeServer, Fault

    async def engine(path: Path) -> None:
        async with FakeServer() as server:
            why = "CUDA out of memory. Tried to allocate 1.02 GiB while loading model-00002-of-00004.safetensors"
            server.faults["/update_weights_from_disk"] = Fault(body={"success": False, "message": why})
            path.write_text(server.url)
            await asyncio.Event().wait()

    url = Path("engine.url").absolute()
    stage.fork("engine", lambda: asyncio.run(engine(url)))
    until(lambda: url.exists() and url.read_text(), "the engine listens")
    stage.learner()
    stage.player()
    stage.reaches(1)
    argv = ["--config", "run.yaml", "engine.id=gpu-0", "engine.kind.type=attach", f"engine.kind.url={url.read_text()}"]
    node = stage.fork("node", lambda: node_cli.main([*argv, "engine.probe_s=0.2", "engine.drain_s=0.1"]))

    def quarantined() -> bool:
        from protocol.codec import decode

        raw = stage.db.hget(stage.keys.engine("gpu-0"), "b")
        return raw is not None and decode(raw).state is NodeState.QUARANTINED  # type: ignore[union-attr]

    until(quarantined, f"QUARANTINED; the node said:\n{node.text[-3000:]}")
    stage.status()


def poisoned_group(stage: Stage) -> None:
    """One trajectory group kills the learner each time it reads it, as a fault in a decoder would."""
    whole = learner.source.read_entry

    def deadly(id_: bytes, fields: dict[bytes, bytes], run: str) -> Entry:
        if fields[b"seq"] == b"9":
            os.kill(os.getpid(), signal.SIGSEGV)
            signal.pause()
        return whole(id_, fields, run)

    def fragile() -> None:
        learner.source.read_entry = deadly
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    stage.player()
    codes: list[int] = []
    while True:
        life = stage.learner(prepare=fragile)
        until(
            lambda life=life: life.poll() is not None or "9) is unusable" in life.text, f"an end:\n{life.text[-2000:]}"
        )
        if life.status is None:
            break
        codes.append(life.status)
        assert codes == [-signal.SIGSEGV] * len(codes) and len(codes) < 9, life.text
    print(f"(the launcher has started the learner {len(codes) + 1} times; it ended with {codes})\n")
    stage.tell(LEARN, last_words(life.text, "unusable"))
    letters = stage.fork("dlq", lambda: foray.main(["dlq", "list", "--config", "run.yaml"]))
    code = letters.wait()
    stage.tell("foray dlq list --config run.yaml", letters.text, code, 0)


def nan_step(stage: Stage) -> None:
    """The loss or a gradient is not finite: once, and then three times in a row."""
    calls: list[int] = []

    def verdict(updates: int) -> str:
        calls.append(updates)
        return "not finite" if len(calls) == 3 or updates >= 5 else ""

    stage.player()
    trains = stage.learner("learner.checkpoint_every=2", verdict=verdict)
    code = trains.wait()
    stage.tell(LEARN, last_words(trains.text), code, 2)
    kept = sorted(p.name for p in (stage.run_dir / "skipped").iterdir())
    goes_on_from = (stage.run_dir / "checkpoints" / "CURRENT").read_text()
    command = "ls runs/demo/skipped; cat runs/demo/checkpoints/CURRENT     # the evidence; what a start goes on from"
    stage.tell(command, f"{'  '.join(kept)}\n{goes_on_from}")


def redis_full(stage: Stage) -> None:
    """Redis reaches maxmemory: nothing is lost, and everybody waits until there is room."""
    stage.player()
    trains = stage.learner()
    stage.reaches(2)
    used = int(stage.db.info("memory")["used_memory"])
    stage.db.config_set("maxmemory", used // 2)
    until(lambda: "Redis is full" in last_words(trains.text), f"the learner says so:\n{trains.text[-3000:]}")
    stage.tell(f"{LEARN}                # maxmemory is reached", last_words(trains.text))
    stage.status()
    stage.db.config_set("maxmemory", 0)
    before = stage.step()
    stage.reaches(before + 2)
    print(f"(with room again it went on by itself: step {stage.step()})\n")


def disk_full(stage: Stage) -> None:
    """No room for checkpoints: training goes on, then no more tasks are issued. No room for weights: it stops."""
    with small_disk(stage.run_dir / "checkpoints") as fill:
        stage.player()
        trains = stage.learner("learner.checkpoint_every=1", prepare=heavy, before=lambda n: n != 3 or fill())
        until(lambda: "3 checkpoints failed" in trains.text, "three failures")
        until(lambda: _failures(stage) >= 3, "they are reported")
        stage.tell(f"{LEARN}                # the disk of runs/demo/checkpoints is full", last_words(trains.text))
        stage.status()
        stage.clear()
    stage.db.flushall()
    subprocess.run(["rm", "-rf", str(stage.run_dir)], check=True)
    with small_disk(stage.run_dir / "weights") as fill:
        stage.player()
        trains = stage.learner(prepare=heavy, before=lambda n: n != 3 or fill())
        code = trains.wait()
        stage.tell(f"{LEARN}                # the disk of runs/demo/weights is full", last_words(trains.text), code, 2)


def _failures(stage: Stage) -> float:
    from protocol.codec import decode

    raw = stage.db.get(stage.keys.metrics("learner", "0"))
    return float(decode(raw).values.get("checkpoint_failures", 0)) if raw else 0.0  # type: ignore[union-attr]


PADDING = 300_000


def heavy() -> None:
    """Checkpoints and versions of a third of a megabyte."""
    import torch

    save, weights = tiny.TinyEngine.save_state, tiny.TinyEngine.iter_weights

    def padded(self: Any, directory: Path) -> None:
        save(self, directory)
        (directory / "padding").write_bytes(b"s" * PADDING)

    def large(self: Any, device: str = "cpu") -> Iterator[Any]:
        yield from weights(self, device)
        yield "padding", torch.ones(PADDING // 4)

    tiny.TinyEngine.save_state, tiny.TinyEngine.iter_weights = padded, large


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A file system of its own for `folder`, and what fills it; where none may be mounted, a limit on files."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def fill() -> None:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (PADDING // 2, resource.RLIM_INFINITY))
            return
        try:
            with (folder / ".filler").open("wb", buffering=0) as file:
                while True:
                    file.write(b"f" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC

    try:
        yield fill
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


SITUATIONS: dict[str, Callable[[Stage], None]] = {
    "two-learners": two_learners,
    "woken": woken,
    "half-loaded-engine": half_loaded_engine,
    "poisoned-group": poisoned_group,
    "nan-step": nan_step,
    "redis-full": redis_full,
    "disk-full": disk_full,
}


@contextmanager
def redis_in(folder: Path) -> Iterator[redis.Redis]:
    """A Redis on `folder/s`."""
    argv = [
        str(find_server().path),
        "--unixsocket",
        str(folder / "s"),
        "--dir",
        str(folder),
        "--port",
        "0",
        "--save",
        "",
    ]
    child = subprocess.Popen([*argv, "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL, cwd=folder)
    try:
        until((folder / "s").exists, "Redis listens")
        client = redis.Redis(unix_socket_path=str(folder / "s"))
        until(lambda: _answers(client), "Redis answers")
        yield client
        client.close()
    finally:
        child.terminate()
        child.wait(10)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def prepare(folder: Path) -> None:
    """The run's configuration, model and questions in the current directory."""
    model = write_tokenizer(folder / "model", "words")
    (model / "config.json").write_text('{"model_type": "tiny"}')
    lines = (json.dumps({"id": f"q{i}", "question": f"what is {i} ?", "answers": [str(i)]}) for i in range(7))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    run = {"id": RUN, "dir": f"runs/{RUN}", "model": "model", "group_size": 4, "groups_per_step": 4, "steps": 100_000}
    how = {"questions": "questions.jsonl", "checkpoint_every": 2, "reconcile_s": 0.5, "lease_s": LEASE_S}
    (folder / "run.yaml").write_text(yaml.safe_dump({"run": run, "learner": how}))


def play(names: list[str]) -> int:
    """The situations, one after the other; 1 when one of them went otherwise."""
    home, failures = Path.cwd(), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foray-")))
        client = stack.enter_context(redis_in(folder))
        stack.callback(os.chdir, home)
        os.environ |= {"FORAY_REDIS_URL": f"unix://{folder / 's'}", "OMP_NUM_THREADS": "1"}
        for name in names:
            place = folder / name
            place.mkdir()
            prepare(place)
            os.chdir(place)
            client.flushall()
            stage = Stage(client)
            print(f"=== {name}: {(SITUATIONS[name].__doc__ or '').splitlines()[0]}\n", flush=True)
            try:
                SITUATIONS[name](stage)
            except AssertionError as error:
                stage.failures.append(str(error))
            finally:
                stage.clear()
            failures += [f"{name}: {failure}" for failure in stage.failures]
            sys.stdout.flush()
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *SITUATIONS], metavar="SITUATION", help=", ".join(SITUATIONS))
    return play(parser.parse_args().names or list(SITUATIONS))


if __name__ == "__main__":
    sys.exit(main())
