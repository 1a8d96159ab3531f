"""The calls into CUDA, recorded: their order, on which stream, and what reaches main memory.

There is no GPU here: `torch.cuda` is a recorder, and the group under NcclGroup is a gloo group of one rank. This shows
that the module runs, and what it asks for, not that a GPU does it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from learner.weights import cuda, process_group, staging
from learner.weights.cuda import CudaStaging, NcclGroup, unwatched
from learner.weights.process_group import Rendezvous, WeightGroup
from learner.weights.staging import Staging
from protocol.runtime.net import free_port


class Recorder:
    """`torch.cuda`, where every event is reached at its `looks`-th query. `calls`: what was asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.looks = 1
        self._threads = threading.local()
        self.streams = 0
        recorder = self

        class Stream:
            def __init__(self) -> None:
                recorder.streams += 1
                self.name = f"side {recorder.streams}"

            def wait_event(self, event: Event) -> None:
                recorder.calls.append(f"{self.name} waits for {event.at}")

        class Event:
            at, seen = "", 0

            def record(self) -> None:
                self.at = recorder.current
                recorder.calls.append(f"event on {self.at}")

            def query(self) -> bool:
                self.seen += 1
                return self.seen >= recorder.looks

        self.Stream, self.Event = Stream, Event

    @property
    def current(self) -> str:
        """The stream of this thread: torch has one current stream for each."""
        return getattr(self._threads, "stream", "default")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._threads.stream = self.current, stream.name
        try:
            yield
        finally:
            self._threads.stream = before

    def set_device(self, device: Any) -> None:
        self.calls.append(f"device {device}")

    def current_device(self) -> int:
        return 0

    def mem_get_info(self) -> tuple[int, int]:
        return 1000, 4000

    def memory_reserved(self) -> int:
        return 700

    def memory_allocated(self) -> int:
        return 500


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder, empty = Recorder(), torch.empty
    monkeypatch.setattr(cuda.torch, "cuda", recorder)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: recorder.calls.append(f"kept for {stream.name}")
    )
    monkeypatch.setattr(cuda.torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    return recorder


@pytest.mark.parametrize("abort", [False, True])
def test_a_broadcast_waits_for_its_tensors_on_a_stream_of_its_own(
    gpu: Recorder, abort: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[dict[str, str | None], timedelta]] = []
    real = cuda.open_group

    def opened(rendezvous: Rendezvous, timeout: timedelta) -> Any:
        asked.append(({name: os.environ.get(name) for name in cuda.UNWATCHED}, timeout))
        return real(rendezvous, timedelta(seconds=20))

    monkeypatch.setattr(cuda, "open_group", opened)
    monkeypatch.setenv("LOCAL_RANK", "3")
    group = NcclGroup(Rendezvous("g", "127.0.0.1", free_port(), 1, "gloo", 20.0, 20.0))
    assert asked == [(dict(cuda.UNWATCHED), cuda.NO_TIMEOUT)], "no watchdog ends the process"
    group._device = torch.device("cpu")
    gpu.looks = 2
    sent = group.start(torch.ones(3), group.mark())
    assert not sent() and sent()
    assert gpu.calls == [
        "device cuda:3", "event on default", "side 1 waits for default", "kept for side 1", "event on side 1",
    ]  # fmt: skip
    if abort:
        group.abort()
    group.close()


def test_the_watchdogs_settings_are_those_of_the_user_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    with pytest.raises(RuntimeError), unwatched():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
        raise RuntimeError
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1" and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


@pytest.mark.parametrize("size", [1, 64, 65, 1000])
def test_a_bucket_of_any_size_reaches_main_memory_over_two_buffers(
    gpu: Recorder, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "PIECE", 64)
    staged = CudaStaging()
    assert staged.room() == 600, "half of what is free, or cached by torch"
    flats = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(3)]
    copies = [staged.copy(flat) for flat in flats]
    assert all(torch.equal(copy.result(20), flat) for copy, flat in zip(copies, flats, strict=True))
    assert [len(buffer) for buffer in staged._pinned] == [64, 64]
    assert gpu.calls.count("side 1 waits for default") == gpu.calls.count("kept for side 1") == 3
    assert gpu.calls.count("event on side 1") == 3 * -(-size // 64)
    staged.close()


def test_a_bucket_waits_for_the_buffers_of_the_one_before_it(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that the GPU has not completed is still in its buffer when the next bucket comes."""
    monkeypatch.setattr(cuda, "PIECE", 64)
    gpu.looks = 30
    staged = CudaStaging()
    staged.room()
    flats = [torch.full((64,), number, dtype=torch.uint8) for number in range(4)]
    copies = [staged.copy(flat) for flat in flats]
    assert all(torch.equal(copy.result(20), flat) for copy, flat in zip(copies, flats, strict=True))
    staged.close()


@pytest.mark.parametrize(("size", "at_once"), [(300, 2), (301, 1), (600, 1), (1000, 1), (200, 3), (201, 2)])
def test_as_many_buckets_wait_on_the_gpu_as_there_is_room_for(
    gpu: Recorder, size: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for 600 bytes; a larger bucket waits alone."""
    go, waiting = threading.Semaphore(0), [0]
    real = CudaStaging._copy

    def held(self: CudaStaging, *given: Any) -> torch.Tensor:
        go.acquire()
        waiting[0] -= 1
        return real(self, *given)

    monkeypatch.setattr(CudaStaging, "_copy", held)
    staged = CudaStaging()
    assert staged.room() == 600
    for _ in range(at_once):
        waiting[0] += 1
        staged.copy(torch.zeros(size, dtype=torch.uint8))
    late = threading.Thread(target=staged.copy, args=(torch.zeros(size, dtype=torch.uint8),))
    late.start()
    late.join(0.05)
    assert late.is_alive(), "there is no room"
    go.release()
    late.join(20)
    assert not late.is_alive() and waiting[0] == at_once - 1
    for _ in range(at_once):
        go.release()
    staged.close()


@pytest.mark.parametrize(
    ("path", "interface"),
    [(path, WeightGroup) for path in (*process_group.GROUPS.values(), "tests.support.lazy_group:LazyGroup")]
    + [(path, Staging) for path in (*staging.STAGING.values(), "tests.support.lazy_group:DeviceStaging")],
)
def test_every_backend_and_its_double_have_one_interface(path: str, interface: type) -> None:
    made = resolve_name(path)
    methods = [name for name, member in vars(interface).items() if inspect.isfunction(member) and name[0] != "_"]
    assert methods
    for name in methods:
        wanted, found = (list(inspect.signature(getattr(of, name)).parameters) for of in (interface, made))
        assert wanted == found, f"{path}.{name}"
    for name in interface.__annotations__:
        assert isinstance(getattr(made, name), bool)
