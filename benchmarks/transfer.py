"""`foray bench transfer`: the learner's weight-update group to one other process, and what happens if that one fails.

The learner's own sender broadcasts buckets of random bytes; the other process receives them as an engine does. Three
runs: all buckets; the receiver is killed in the middle; it hangs in the middle. After each fault the learner must
notice within the stall time, and be able to compute. Baseline: copying the same bytes from buffer to buffer in this
process, on a GPU or in main memory. With one GPU both processes share it: NCCL accepts that only from different
hosts, so the receiver claims to be another one (NCCL_HOSTID).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from benchmarks.base import BenchResult, BenchSettings, Say, Target
from deploy.hardware.gpus import without_cuda
from protocol.errors import UserError
from protocol.runtime.net import free_port
from protocol.runtime.torch_safety import set_nccl_defaults

if TYPE_CHECKING:
    import torch

    from learner.weights.process_group import GroupSender

Fault = Literal["none", "killed", "hangs"]
WAIT_S = 30.0
"""Maximum seconds for the receiver to start and join."""
_RECEIVE = "import json, sys; from benchmarks.transfer import receive; receive(json.loads(sys.argv[1]))"
GRACE_S = 10.0
"""Seconds beyond the stall time after which a learner that has not noticed a fault counts as stuck."""


class TransferBench(BenchSettings):
    """Sizes and the transport."""

    help: ClassVar[str] = "broadcast of weights to one process, and faults of that process"
    quick: ClassVar[dict[str, Any]] = {"buckets": 4, "bucket_mb": 4, "stall_s": 2.0}
    targets: ClassVar[tuple[Target, ...]] = (
        Target("faults.killed.survived", 1, "the learner survives a receiver that is killed in a transfer"),
        Target("faults.hangs.survived", 1, "the learner survives a receiver that hangs in a transfer"),
    )
    modules: ClassVar[tuple[str, ...]] = (
        "benchmarks/transfer.py", "learner/weights/process_group.py", "learner/weights/cuda.py",
    )  # fmt: skip

    backend: Literal["nccl", "gloo"] = "nccl"
    """`nccl` needs a GPU; `gloo` runs anywhere."""
    buckets: int = Field(default=24, ge=2)
    """Broadcasts per run."""
    bucket_mb: int = Field(default=256, ge=1)
    """Size of a broadcast, in MiB."""
    stall_s: float = Field(default=10.0, gt=0)
    """Seconds without progress after which the group is aborted (gloo: after which a broadcast fails)."""

    def measure(self, say: Say) -> BenchResult:
        """Run the benchmark. Raises UserError if `backend` is nccl and there is no GPU."""
        why = without_cuda() if self.backend == "nccl" else ""
        if why:
            raise UserError("NCCL needs a GPU", why=why, todo="run it on a machine with one, or use --backend gloo")
        set_nccl_defaults(os.environ)
        sent = self._run("none")
        say(f"{sent['gb_per_s']:.1f} GB/s, joined in {sent['joined_s']:.2f} s")
        copied = self._copy_rate()
        kinds: tuple[Fault, ...] = ("killed", "hangs")
        faults = {}
        for kind in kinds:
            faults[kind] = self._run(kind)
            say(f"receiver {kind}: {faults[kind]['error'] or 'not noticed'}, after {faults[kind]['noticed_s']:.1f} s")
        return BenchResult(
            value=sent["gb_per_s"],
            unit="GB/s",
            baseline={"name": "a copy from buffer to buffer", "gb_per_s": copied},
            ratio=sent["gb_per_s"] / copied,
            details={"joined_s": sent["joined_s"], "closed_s": sent["closed_s"], "faults": faults},
        )

    def _run(self, fault: Fault) -> dict[str, Any]:
        """Send all buckets, or as many as arrive. `survived`: the fault was noticed in time, and torch still works."""
        from learner.weights.process_group import GroupSender, Rendezvous

        rendezvous = Rendezvous(
            f"transfer {fault}", "127.0.0.1", free_port(), 2, self.backend, WAIT_S, self.stall_s, stall_s=self.stall_s
        )
        bucket, proof = self._buffer(self.bucket_mb << 20), self._buffer(1)
        with self._receiver(rendezvous.port, rendezvous.name, fault):
            began = time.monotonic()
            sender = GroupSender(rendezvous, proof)
            try:
                sender.joined.result(2 * WAIT_S)
                joined = time.monotonic() - began
                seconds, noticed, error = self._send(sender, bucket)
            finally:
                closing = time.monotonic()
                sender.close()
                sender.join()  # before the receiver ends: closing must not need it
                closed = time.monotonic() - closing
        in_time = noticed <= self.stall_s + GRACE_S
        return {
            "gb_per_s": self.buckets * bucket.numel() / seconds / 1e9 if not error else 0.0,
            "joined_s": joined,
            "closed_s": closed,
            "noticed_s": noticed,
            "error": error,
            "survived": int(bool(error) and in_time and self._computes()),
        }

    def _send(self, sender: GroupSender, bucket: torch.Tensor) -> tuple[float, float, str]:
        """Return (seconds, seconds from the last progress to the error, error) of sending every bucket."""
        began = last = time.monotonic()
        for _ in range(self.buckets):
            done = sender.send([bucket])
            try:
                done.result(self.stall_s + 2 * GRACE_S)
            except (RuntimeError, TimeoutError) as error:
                return last - began, time.monotonic() - last, str(error).partition("\n")[0] or "timeout"
            last = time.monotonic()
        return last - began, 0.0, ""

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.ones(num_bytes, dtype=torch.uint8, device="cuda" if self.backend == "nccl" else "cpu")

    def _computes(self) -> bool:
        """Return whether torch can still compute on the device of the buffers."""
        import torch

        try:
            return bool(self._buffer(1000).to(torch.float32).sum().item() == 1000)
        except RuntimeError:
            return False

    def _copy_rate(self) -> float:
        """Return the GB/s of a copy from one buffer to another, the fastest of five."""
        one, other = self._buffer(self.bucket_mb << 20), self._buffer(self.bucket_mb << 20)
        rates = []
        for _ in range(5):
            began = time.monotonic()
            other.copy_(one)
            other[-1].item()  # waits for the GPU
            rates.append(one.numel() / 1e9 / (time.monotonic() - began))
        return max(rates)

    @contextmanager
    def _receiver(self, port: int, group: str, fault: Fault) -> Iterator[None]:
        count = self.buckets if fault == "none" else self.buckets // 2
        spec = {"port": port, "group": group, "backend": self.backend, "fault": fault}
        spec |= {"bytes": self.bucket_mb << 20, "buckets": count}
        child = subprocess.Popen(
            [sys.executable, "-c", _RECEIVE, json.dumps(spec)],
            env=os.environ | {"NCCL_HOSTID": "receiver"},
        )
        try:
            yield
        finally:
            child.kill()
            child.wait()


def receive(spec: dict[str, Any]) -> None:
    """Receive as an engine does, and then fail as `spec` says."""
    import torch
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__
    from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

    device = "cpu"
    if spec["backend"] == "nccl":
        device = f"cuda:{torch.cuda.device_count() - 1}"
        torch.cuda.set_device(device)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=WAIT_S)
    store = TCPStore("127.0.0.1", spec["port"], 2, False, timeout, wait_for_workers=False)
    name, backend = spec["group"], Backend(spec["backend"])
    group, _ = _new_process_group_helper(
        2, 1, [], backend, PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    sizes = [1] if spec["backend"] == "nccl" else []  # the proof
    for size in sizes + [spec["bytes"]] * spec["buckets"]:
        torch.distributed.broadcast(torch.empty(size, dtype=torch.uint8, device=device), src=0, group=group)
    if spec["backend"] == "nccl":
        torch.cuda.synchronize()
    if spec["fault"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10 * WAIT_S)  # the parent ends this process; with "hangs" it waits for buckets that this one ignores
