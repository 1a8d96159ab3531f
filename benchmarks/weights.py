"""`foray bench weights`: weight updates from the learner's memory to every engine, against moving the bytes only.

This process publishes versions of a random model to CPU engines in separate processes: gather, send or write,
verify, load, until the last engine is READY at the new version. The baselines only move the same bytes: gloo's
broadcast between as many processes, bare and with the copies and checksums of an update, and a copy of the file. Value
and ratio are of `distributed` with the most engines. Engines are idle, so pauses are due to the update alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from benchmarks.base import BenchResult, BenchSettings, Say, Target
from deploy.run.redis_server import child_url, find_server, redis_argv
from protocol.errors import ForayError
from protocol.settings import REDIS_URL_VARIABLE, RunSettings
from protocol.versions import PolicyVersion

if TYPE_CHECKING:
    import torch

    from learner.config.learner import DiskPublishSettings, DistributedPublishSettings
    from learner.weights.base import WeightPublisher
    from protocol.messages import EngineInfo


RUN = "bench"
LEASE_MS = 86_400_000
POLL_S = 0.005
TIMEOUT_S = 120.0


class WeightsFleet:
    """A run whose learner is this process."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        from learner.delivery.store import RunStore

        self.run = RunSettings(id=RUN, dir=directory / "run", redis_url=redis_url, model=directory / "model")
        self.store = RunStore(redis_url, RUN)
        self.store.prepare()
        self.epoch = 0

    def begin(self, settings: DiskPublishSettings | DistributedPublishSettings) -> WeightPublisher:
        """Acquire the lease with a new epoch, and return its publisher."""
        from learner.weights import build_publisher

        epoch = self.store.acquire("bench", self.epoch, LEASE_MS, takeover=True)
        assert isinstance(epoch, int)
        self.store.set_owner(epoch, "bench")
        self.epoch = epoch
        return build_publisher(settings, self.run, sorted(self.run.model.glob("*.json")), self.store)

    def publish(self, publisher: WeightPublisher, step: int, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Return (seconds until the announcement, seconds until every engine was READY at the version)."""
        version = PolicyVersion(self.epoch, step)
        began = time.monotonic()
        # copies, as from a training engine
        update = publisher.publish(version, ((name, tensor.clone()) for name, tensor in weights.items()))
        publisher.announce(update, "ready")
        announced = time.monotonic() - began
        self.await_version(version)
        whole = time.monotonic() - began
        publisher.collect([])
        return announced, whole

    def await_version(self, version: PolicyVersion) -> list[EngineInfo]:
        """Wait until every engine is READY at `version`, and return the engines."""
        from protocol.messages import NodeState

        deadline = time.monotonic() + TIMEOUT_S
        while True:
            engines = self.store.engines()
            if engines and all((e.state, e.version) == (NodeState.READY, version) for e in engines):
                return engines
            if time.monotonic() > deadline:
                states = ", ".join(f"{e.id} is {e.state} at {e.version.label} {e.detail}" for e in engines)
                raise ForayError(f"the engines did not load {version.label} within {TIMEOUT_S:g} s: {states}")
            time.sleep(POLL_S)

    def pauses(self) -> list[float]:
        """Return the pause of each engine in its last update, in seconds."""
        return [engine.pause_s for engine in self.store.engines()]


@contextmanager
def running(directory: Path, *, engines: int, say: Say) -> Iterator[WeightsFleet]:
    """Run Redis and `engines` nodes with CPU engines of `directory`/model while the block runs."""
    from deploy.launch.plan import ProcessSpec, Ready
    from deploy.launch.supervisor import Readiness, Supervisor

    redis_url = child_url(directory)
    supervisor = Supervisor(is_ready=Readiness(redis_url, RUN), ready_s=TIMEOUT_S, shutdown_s=15.0, say=say)

    def spawn(name: str, kind: str, argv: Sequence[str], ready: Ready) -> None:
        env = {"OMP_NUM_THREADS": "1", REDIS_URL_VARIABLE: redis_url}
        supervisor.spawn(ProcessSpec(name, kind, tuple(argv), directory / f"{name}.log", ready, redis_url, env))

    try:
        spawn("redis", "redis", redis_argv(find_server().path, directory, redis_url, maxmemory_mb=128), Ready.PING)
        supervisor.await_ready(["redis"])
        fleet = WeightsFleet(directory, redis_url)
        config = directory / "nodes.json"
        config.write_text(json.dumps({"run": fleet.run.model_dump(mode="json"), "engine": {"drain_s": 0.1}}))
        for number in range(engines):
            argv = [sys.executable, "-m", "rollout_server.node", "--config", str(config), f"engine.id=engine-{number}"]
            spawn(f"engine-{number}", "engine", argv, Ready.ENGINE)
        supervisor.await_ready([f"engine-{number}" for number in range(engines)])
        yield fleet
        supervisor.check()
        fleet.store.close()
    finally:
        supervisor.stop()


PHASES = ("gather", "prepare", "transfer", "verify", "commit")


class WeightsBench(BenchSettings):
    """Settings of `foray bench weights`."""

    help: ClassVar[str] = "publishing a policy version into engines, against raw broadcast and raw file copy"
    quick: ClassVar[dict[str, Any]] = {"megabytes": 8, "engines": (1,), "rounds": 2}
    targets: ClassVar[tuple[Target, ...]] = (Target("ratio", 0.7, "bytes a second over gloo's broadcast"),)
    modules: ClassVar[tuple[str, ...]] = (
        "protocol",
        "learner/weights",
        "rollout_server/node",
        "rollout_server/cpu_engine",
        "benchmarks/weights.py",
        "benchmarks/raw_broadcast.py",
    )

    megabytes: int = Field(default=100, ge=1, le=4096)
    """Approximate size of the weights, in MB."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the weights and of the engines' tensors."""
    engines: tuple[int, ...] = Field(default=(1, 2), min_length=1)
    """Numbers of engines to measure with: 1,2."""
    rounds: int = Field(default=5, ge=1)
    """Versions per transport, of which the median counts, after one warm-up version."""
    bucket_mb: int = Field(default=256, ge=1)
    """Size of one broadcast in MiB, as `learner.publish.bucket_mb`."""
    fsync: bool = True
    """Flush files to the device, for Foray and for the baseline."""

    @field_validator("engines", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    def measure(self, say: Say) -> BenchResult:
        """Measure both transports and both baselines for each number of engines."""
        import torch

        torch.set_num_threads(1)
        rows = []
        for count in self.engines:
            with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
                directory = Path(name)
                weights = _model(directory / "model", self.megabytes, self.dtype)
                say(f"{_bytes(weights) / 1e6:.0f} MB to {count} engine(s)")
                with running(directory, engines=count, say=say) as fleet:
                    rows.append(self._row(fleet, directory, weights, count, say))
        return _summary(rows)

    def _row(
        self, fleet: WeightsFleet, directory: Path, weights: dict[str, torch.Tensor], count: int, say: Say
    ) -> dict[str, Any]:
        from learner.config.learner import DiskPublishSettings, DistributedPublishSettings

        disk = DiskPublishSettings(fsync=self.fsync)
        distributed = DistributedPublishSettings(fsync=self.fsync, bucket_mb=self.bucket_mb)
        raw, sha256, checked = (
            median(_raw_broadcast(directory / f"store-{checks}", count + 1, _bytes(weights), self.rounds, checks))
            for checks in ("none", "sha256", distributed.checksum)
        )
        copied = _raw_copy(fleet.run.model / "model.safetensors", directory / "copy", self.rounds, fsync=self.fsync)
        say(f"raw: broadcast {raw:.3f} s, checked {checked:.3f} s, copy {median(copied):.3f} s")
        row: dict[str, Any] = {"engines": count, "bytes": _bytes(weights)}
        row |= {"raw_broadcast_s": raw, "checked_broadcast_s": checked, "sha256_broadcast_s": sha256}
        row |= {"raw_copy_s": median(copied), "checksum": distributed.checksum}
        for name, settings in (("distributed", distributed), ("disk", disk)):
            figures = self._publish(fleet, settings, weights)
            say(f"{name}: {figures['seconds']:.3f} s until READY, of which paused {figures['pause_s']:.3f} s")
            row[name] = figures
        return row

    def _publish(self, fleet: WeightsFleet, settings: Any, weights: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return medians over the rounds. Raises ForayError if a version did not use the measured transport."""
        publisher = fleet.begin(settings)
        seen, facts = [], dict(publisher.facts())
        try:
            for step in range(
                self.rounds + 2
            ):  # the first version of an epoch uses files, the next one creates the group
                announced, whole = fleet.publish(publisher, step, weights)
                facts = dict(publisher.facts())
                phases = {f"{phase}_s": facts.get(f"publish_{phase}_s", 0.0) for phase in PHASES}
                seen.append({"seconds": whole, "announced_s": announced, "pause_s": max(fleet.pauses()), **phases})
        finally:
            publisher.close()
        if settings.type == "distributed" and facts["publish_distributed"] != self.rounds + 1:
            raise ForayError(
                f"only {facts['publish_distributed']:.0f} of {self.rounds + 1} versions used the transport"
            )
        figures = {name: median(one[name] for one in seen[2:]) for name in seen[0]}
        if settings.type == "disk":
            figures = {name: figures[name] for name in ("seconds", "announced_s", "pause_s")}
        return figures | {"bytes_per_s": _bytes(weights) / figures["seconds"]}


def _summary(rows: list[dict[str, Any]]) -> BenchResult:
    last = rows[-1]
    raw, copy = last["bytes"] / last["raw_broadcast_s"], last["bytes"] / last["raw_copy_s"]
    return BenchResult(
        value=last["distributed"]["bytes_per_s"],
        unit="bytes/s",
        baseline={
            "name": "gloo broadcast of the same bytes",
            "bytes_per_s": raw,
            "checked_bytes_per_s": last["bytes"] / last["checked_broadcast_s"],
            "checked_ratio": last["checked_broadcast_s"] / last["distributed"]["seconds"],
            "checksum": last["checksum"],
            "copy_bytes_per_s": copy,
            "disk_ratio": last["disk"]["bytes_per_s"] / copy,
        },
        ratio=last["distributed"]["bytes_per_s"] / raw,
        details={
            "pause_s": last["distributed"]["pause_s"],
            "disk_pause_s": last["disk"]["pause_s"],
            "by_engines": [
                {key: value for key, value in row.items() if not isinstance(value, dict)}
                | {f"{kind}_{name}": value for kind in ("distributed", "disk") for name, value in row[kind].items()}
                for row in rows
            ],
        },
    )


def _model(directory: Path, megabytes: int, dtype: str) -> dict[str, torch.Tensor]:
    """Return a Qwen2 with random weights of about this size, saved with a small tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from tests.support.environments import write_tokenizer

    disable_progress_bar()
    write_tokenizer(directory, "words")
    hidden, vocab = 512, 4096
    layer = 2 * hidden * hidden + 2 * hidden * 128 + 3 * hidden * 4 * hidden
    number = megabytes * 1_000_000 / (4 if dtype == "float32" else 2)
    layers = max(1, round((number - hidden * vocab) / layer))
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        dtype=dtype,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return weights


def _bytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def _raw_broadcast(store: Path, world: int, num_bytes: int, rounds: int, checksum: str) -> list[float]:
    """Return the seconds of each round; with copies and this checksum as in an update, or "none"."""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.raw_broadcast",
                str(store),
                *map(str, (rank, world, num_bytes, rounds, checksum)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    try:
        out = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise ForayError("the raw broadcast failed")
    seconds: list[float] = json.loads(out[0])
    return seconds


def _raw_copy(source: Path, target: Path, rounds: int, *, fsync: bool) -> list[float]:
    seconds = []
    for _ in range(rounds):
        target.unlink(missing_ok=True)
        began = time.monotonic()
        shutil.copyfile(source, target)
        if fsync:
            with target.open("rb") as file:
                os.fsync(file.fileno())
        seconds.append(time.monotonic() - began)
    return seconds
