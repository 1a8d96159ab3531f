"""The state of an engine as files, loadable by any number of ranks at any stage, without pickle.

state.json               counters, and the shape and file of every tensor
KEY.RANK.N.safetensors   whole float32 tensors by parameter name; KEY: master, exp_avg, exp_avg_sq, ema
buffers.safetensors      buffers of the module
random.RANK.safetensors  random state of a rank

The tensors are distributed over the ranks, which write in parallel. Each rank flushes and hashes a file in a thread
while it gathers or writes the next, and lists its files for the manifest (`learner.checkpoint`). Frozen parameters are
not saved: they equal those of the initial model.

A load reads O(P / R) bytes on each of R ranks for P saved bytes, in whole rows of a tensor, and the master weights
whole below stage 3, where each rank holds every parameter of the forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from learner.checkpoint.checkpoint import PLANNED, WRITTEN, written_file
from learner.engine.optimizer import GuardedAdamW
from learner.engine.partition import EMA, MASTER, MOMENTS, Partition, gathered, low_range, set_low
from learner.engine.ranks import fail_together
from protocol.errors import UserError
from protocol.runtime.files import fsync_path

FORMAT = 1
INDEX = "state.json"
BUFFERS = "buffers.safetensors"
HASHING_THREADS = 2
"""Threads of a rank that flush and hash files; one hashes faster than most disks write."""
FILE_BYTES = 1 << 30
"""Bytes after which a rank begins a new file: a file is built in memory."""


class StateFiles:
    """One directory of state, and the parts of the engine that it saves and restores.

    device  device for communication between ranks
    seed    seed of this rank, used without a saved random state
    """

    def __init__(
        self,
        directory: Path,
        partition: Partition,
        optimizer: GuardedAdamW,
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ) -> None:
        self.directory, self.partition, self.optimizer = directory, partition, optimizer
        self.buffers, self.device, self.seed = buffers, device, seed
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def save(self, updates: int, stage: int, *, averages: bool) -> None:
        """Write this rank's files and, last, the index (rank 0); collective.

        Raises OSError on every rank if one of them fails, and only at the end: all ranks must take part in every
        collective.
        """
        plan = {key: self._plan(key) for key in _keys(averages)}
        index = self._index_of(updates, stage, plan, averages=averages)
        failures = self._write(self._contents(plan, None), index)
        if fail_together(bool(failures), self.device):
            raise failures[0] if failures else OSError("another rank failed to write its files")

    def snapshot(
        self, updates: int, stage: int, room: dict[str, torch.Tensor], *, averages: bool
    ) -> Callable[[], None]:
        """Copy what `save` would write on this rank into `room` (filled at the first call); collective. Return the
        function that writes it, which raises OSError and may run in another thread.
        """
        plan = {key: self._plan(key) for key in _keys(averages)}
        index = self._index_of(updates, stage, plan, averages=averages)
        contents = list(self._contents(plan, room))

        def write() -> None:
            if failures := self._write(contents, index):
                raise failures[0]

        return write

    def _index_of(self, updates: int, stage: int, plan: Mapping[str, Any], *, averages: bool) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "updates": updates,
            "averages": averages,
            "zero_stage": stage,
            "ranks": self.ranks,
            "shapes": {name: list(shape) for name, shape in self.partition.shapes.items()},
            "steps": self._steps(),
            "files": plan,
        }

    def _plan(self, key: str) -> dict[str, str]:
        """Return the file of each tensor, the same on every rank: tensor i belongs to rank i % R."""
        files, held, number = {}, [0] * self.ranks, [0] * self.ranks
        for i, (name, shape) in enumerate(self.partition.shapes.items()):
            owner, size = i % self.ranks, shape.numel() * 4
            if held[owner] and held[owner] + size > FILE_BYTES:
                held[owner], number[owner] = 0, number[owner] + 1
            held[owner] += size
            files[name] = f"{key}.{owner:05}.{number[owner]:03}.safetensors"
        return files

    def _planned(self, plan: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Return the names of the files and lists of all ranks."""
        of_ranks = (n for r in range(self.ranks) for n in (f"random.{r:05}.safetensors", f"{WRITTEN}.{r:05}.json"))
        return sorted({BUFFERS, *of_ranks, *(file for files in plan.values() for file in files.values())})

    def _contents(
        self, plan: Mapping[str, Mapping[str, str]], room: dict[str, torch.Tensor] | None
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (name, tensors in main memory) of each file of this rank, copies in `room` or new ones; collective."""
        for key, file_of in plan.items():
            yield from self._contents_of(key, file_of, room)
        yield f"random.{self.rank:05}.safetensors", _random_state()
        if self.rank == 0:
            yield BUFFERS, {name: b.detach().to("cpu", copy=True).contiguous() for name, b in self.buffers.items()}

    def _contents_of(
        self, key: str, file_of: Mapping[str, str], room: dict[str, torch.Tensor] | None
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        kept = {id(flat): self.optimizer.kept(flat, key) for flat, _ in self.partition.groups}
        owner = {name: int(file.split(".")[1]) for name, file in file_of.items()}
        held: dict[str, torch.Tensor] = {}
        file = ""
        for name, tensor in gathered(self.partition, kept, self.device, owner):
            if held and file_of[name] != file:
                yield file, held
                held = {}
            file = file_of[name]
            if room is None:
                held[name] = tensor.to("cpu", copy=True)
            else:  # the same pages again: new ones take longer than the copy
                held[name] = room.setdefault(f"{key} {name}", torch.empty(0)).resize_(tensor.shape).copy_(tensor)
        if held:
            yield file, held

    def _write(
        self, contents: Iterable[tuple[str, dict[str, torch.Tensor]]], index: Mapping[str, Any]
    ) -> list[OSError]:
        """Write all files, the index and the list of what was written. Return the errors, after all of `contents`."""
        failures: list[OSError] = []
        written: dict[str, Future[dict[str, Any]]] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            failures.append(error)
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            for file, tensors in contents:
                try:
                    save_file(tensors, self.directory / file)
                    written[file] = pool.submit(_finish, self.directory / file)
                except OSError as error:
                    failures.append(error)
                except SafetensorError as error:  # a full disk, for instance
                    failures.append(OSError(f"{self.directory / file}: {error}"))
        try:
            if not failures and self.rank == 0:
                (self.directory / INDEX).write_text(json.dumps(index, indent=1))
                (self.directory / PLANNED).write_text(json.dumps(self._planned(index["files"])))
            listed = {file: entry.result() for file, entry in written.items()}
            if not failures:
                (self.directory / f"{WRITTEN}.{self.rank:05}.json").write_text(json.dumps(listed))
        except OSError as error:
            failures.append(error)
        return failures

    def _steps(self) -> dict[str, int]:
        return {
            name: int(self.optimizer.state_of(flat)["step"]) for flat, names in self.partition.groups for name in names
        }

    def load(self) -> tuple[int, bool]:
        """Load this rank's part from all ranks' files; return (updates, whether there is an average); collective.

        Raises UserError on every rank if one of them fails, so that they stay in step.
        """
        try:
            found = self._load()
        except UserError:
            fail_together(True, self.device)
            raise
        if fail_together(False, self.device):
            raise _unusable(self.directory, "another rank failed to read its part")
        return found

    def _load(self) -> tuple[int, bool]:
        index = self._index()
        averages = bool(index["averages"])
        for key in _keys(averages):
            if key == EMA:
                for flat, _ in self.partition.groups:
                    self.optimizer.state_of(flat)[EMA] = torch.zeros_like(flat.detach())
            self._load_key(key, index["files"][key])
        for flat, names in self.partition.groups:
            self.optimizer.state_of(flat)["step"].fill_(max((index["steps"][name] for name in names), default=0))
        self._load_buffers()
        self._load_random(int(index["ranks"]))
        return int(index["updates"]), averages

    def _index(self) -> dict[str, Any]:
        path = self.directory / INDEX
        try:
            index: dict[str, Any] = json.loads(path.read_text())
            if index["format"] != FORMAT:
                raise _unusable(path, f"its format is {index['format']}, but this version reads {FORMAT}")
            saved = {name: torch.Size(shape) for name, shape in index["shapes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unusable(path, f"{type(error).__name__}: {error}") from None
        here = self.partition.shapes
        for name in saved.keys() | here.keys():
            if saved.get(name) != here.get(name):
                raise UserError(
                    f"the saved state in {self.directory} belongs to another model",
                    why=f"{name} is {_shape(saved.get(name))} in the checkpoint and {_shape(here.get(name))} in this "
                    "model",
                    todo="use the run.model and learner.model settings that the run started with",
                )
        return index

    def _load_key(self, key: str, file_of: Mapping[str, str]) -> None:
        by_file: dict[str, list[str]] = {}
        for name in self.partition.shapes:
            by_file.setdefault(file_of[name], []).append(name)
        for file, names in by_file.items():
            path = self.directory / file
            try:
                with safe_open(path, framework="pt", device="cpu") as shard:
                    for name in names:
                        self._take(key, name, shard, path)
            except (OSError, SafetensorError) as error:
                raise _unusable(path, str(error)) from None

    def _take(self, key: str, name: str, shard: Any, path: Path) -> None:
        """Read the elements of a tensor that this rank keeps, and the rest of their rows."""
        expected, saved = self.partition.shapes[name], shard.get_slice(name)
        if saved.get_shape() != list(expected) or saved.get_dtype() != "F32":
            found = f"{saved.get_shape()} {saved.get_dtype()}"
            raise _unusable(path, f"{name} is {found}, expected {_shape(expected)} F32")
        piece = self.partition.pieces.get(name)
        ranges = [(piece.start, piece.start + piece.count)] if piece is not None else []
        if key == MASTER:
            ranges.append(low_range(self.partition, name))
        begin, end = min((r[0] for r in ranges), default=0), max((r[1] for r in ranges), default=0)
        if begin >= end:
            return
        row = expected[1:].numel()
        rows = saved[begin // row : -(-end // row)] if len(expected) else shard.get_tensor(name)
        values = rows.reshape(-1)[begin % row :][: end - begin]
        if piece is not None:
            piece.put(self.optimizer.kept(piece.flat, key), values, begin)
        if key == MASTER:
            set_low(self.partition, name, values, begin)

    def _load_buffers(self) -> None:
        path = self.directory / BUFFERS
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                if set(shard.keys()) != set(self.buffers):
                    raise _unusable(
                        path, f"it contains {sorted(shard.keys())}, but the model has {sorted(self.buffers)}"
                    )
                for name, buffer in self.buffers.items():
                    buffer.copy_(shard.get_tensor(name))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise _unusable(path, str(error)) from None

    def _load_random(self, ranks: int) -> None:
        path = self.directory / f"random.{self.rank:05}.safetensors"
        if self.rank >= ranks:
            torch.manual_seed(self.seed)
            return
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                torch.set_rng_state(shard.get_tensor("cpu"))
                if "cuda" in set(shard.keys()) and torch.cuda.is_available():
                    torch.cuda.set_rng_state(shard.get_tensor("cuda"))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise _unusable(path, str(error)) from None


def _finish(path: Path) -> dict[str, Any]:
    fsync_path(path)
    return written_file(path)


def _keys(averages: bool) -> tuple[str, ...]:
    return (MASTER, *MOMENTS, EMA) if averages else (MASTER, *MOMENTS)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _unusable(path: Path, why: str) -> UserError:
    return UserError(
        f"cannot load the saved state: {path} is missing or damaged",
        why=why,
        todo="restore the file, or resume from an older checkpoint",
    )
