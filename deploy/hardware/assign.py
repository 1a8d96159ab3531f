"""Who gets which GPU: a pure function from the hosts and the needs of a run to CUDA_VISIBLE_DEVICES per process.

Engines come first, in order, those for evaluation last, then the learner, then retrievers; GPUs that `launch.gpus`
names are assigned before. An engine does not span hosts, the learner may. Without GPUs nothing is assigned and every
process runs as it would alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.config import RunConfig
from deploy.hardware.inventory import VISIBLE, Gpu, Host, gib
from deploy.hardware.memory import USABLE, EngineNeed, MemoryEstimate, estimate_memory
from deploy.hardware.shape import read_shape
from deploy.terminal import aligned
from protocol.errors import UserError
from retriever.encoder.config import ComputeSettings
from retriever.index.config import IndexSettings
from rollout_server.node.config import SglangEngine

MIN_EPISODES = 8
"""Episodes of full length that the KV cache of an engine must hold at least; fewer would serialise the rollouts."""
OWN_DOCS = "docs/hardware.md"


@dataclass(frozen=True)
class EngineArgs:
    """The flags of SGLang that decide its GPUs. `base`: --base-gpu-id, which the launcher replaces."""

    tp: int
    pp: int
    dp: int
    device: str
    fraction: float
    cache_tokens: int
    base: int | None

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one engine."""
        return 0 if self.device == "cpu" else self.tp * self.pp * self.dp

    @classmethod
    def of(cls, args: Sequence[str]) -> EngineArgs:
        """Read `engine.kind.args`; flags of other purposes are ignored. Raises UserError for a wrong value."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", dest="tp", type=int, default=1)
        parser.add_argument("--pp-size", "--pipeline-parallel-size", dest="pp", type=int, default=1)
        parser.add_argument("--dp-size", "--data-parallel-size", dest="dp", type=int, default=1)
        parser.add_argument("--enable-dp-attention", dest="within", action="store_true")
        parser.add_argument("--device", default="")
        parser.add_argument("--mem-fraction-static", dest="fraction", type=float, default=0.0)
        parser.add_argument("--max-total-tokens", dest="cache_tokens", type=int, default=0)
        parser.add_argument("--base-gpu-id", dest="base", type=int, default=None)
        try:
            known, _ = parser.parse_known_args(list(args))
        except (argparse.ArgumentError, SystemExit) as error:
            raise UserError("engine.kind.args is not a valid command line of SGLang", str(error)) from None
        dp = 1 if known.within else known.dp  # with attention in parallel the ranks of tp are those of dp
        return cls(known.tp, known.pp, dp, known.device, known.fraction, known.cache_tokens, known.base)


@dataclass(frozen=True)
class Need:
    """GPUs of one process.

    gpus      how many; 0: none
    memory    bytes on each of them, 0 if unknown
    optional  only if one is left
    spans     may use several hosts
    """

    name: str
    kind: str
    gpus: int
    memory: int = 0
    optional: bool = False
    spans: bool = False


@dataclass(frozen=True)
class Assignment:
    """The GPUs of one process on one host."""

    need: Need
    host: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Placement:
    """The result of `place`.

    gpus    whether GPUs were assigned; without, no process's environment changes
    wanted  the needs, also of processes without a GPU
    home    name of the host of processes that need no GPU, "" for this machine
    """

    gpus: bool
    assignments: tuple[Assignment, ...] = ()
    left: int = 0
    wanted: tuple[Need, ...] = ()
    home: str = ""

    def of(self, name: str, kind: str, rank: int = 0, ranks: int = 1) -> Place:
        """Return where a process runs; the ranks of a learner divide its GPUs in order."""
        need = next((need for need in self.wanted if need.name == name), Need(name, kind, 0))
        held = [(a.host, gpu) for a in self.assignments if a.need.name == name for gpu in a.gpus]
        held = held[len(held) * rank // ranks : len(held) * (rank + 1) // ranks]
        host = held[0][0] if held else self.home
        return Place(replace(need, gpus=need.gpus // ranks), host, tuple(gpu for _, gpu in held), shown=self.gpus)


@dataclass(frozen=True)
class Place:
    """The host and the GPUs of one process. shown: it sees these GPUs and no others."""

    need: Need
    host: str
    gpus: tuple[Gpu, ...]
    shown: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Return the variable that shows the process its GPUs."""
        return {VISIBLE: ",".join(gpu.id for gpu in self.gpus)} if self.shown else {}


NOWHERE = Place(Need("", "", 0), "", ())
"""The place of a process that needs none in particular."""
NO_GPUS = Placement(gpus=False)
"""The placement on a machine without GPUs."""


def estimate(config: RunConfig, facts: Mapping[str, Any]) -> MemoryEstimate | None:
    """Return the memory of a run per GPU, None if the model's family is unknown here."""
    shape = read_shape(facts)
    if shape is None:
        return None
    longest = config.rollout.episode.max_context
    kind = config.engine.kind
    args = EngineArgs.of(kind.args) if isinstance(kind, SglangEngine) else EngineArgs.of(())
    tokens = args.cache_tokens or MIN_EPISODES * longest
    need = EngineNeed(max(1, args.tp * args.pp), tokens)
    return estimate_memory(shape, config.learner, ranks=config.launch.learner_ranks, longest=longest, engine=need)


def needs(
    config: RunConfig, facts: Mapping[str, Any], *, index: IndexSettings | None = None, cuda: bool = True
) -> list[Need]:
    """Return the needs of the processes that `foray up` starts, in order of assignment.

    Args:
        config: the run.
        facts: config.json of run.model, {} if it is unknown: then memory is not checked.
        index: settings of the retriever's index; None: `retriever.index`.
        cuda: whether the learner's torch can use GPUs.
    """
    found, kind = estimate(config, facts), config.engine.kind
    args = EngineArgs.of(kind.args) if isinstance(kind, SglangEngine) else None
    width = args.gpus if args else 0
    memory = found.engine if found else 0
    out = [Need(name, "engine", width, memory) for name in config.engine_roles]
    if config.launch.learner:
        ranks = config.launch.learner_ranks if cuda else 0
        out.append(Need("learner", "learner", ranks, found.learner if found else 0, spans=True))
    wanted, forced = _retrieval(config, index or config.retriever.index)
    out += [
        Need(f"retriever-{i}", "retriever", wanted, optional=not forced) for i in range(1, config.num_retrievers + 1)
    ]
    return out


def _retrieval(config: RunConfig, index: Any) -> tuple[int, bool]:
    """Return the GPUs of a retriever, and whether it cannot run without them."""
    if config.retriever.online is not None:
        return 0, False
    members = [index, *getattr(index, "members", ())]
    fixed = [len(m.devices) for m in members if getattr(m, "devices", ())]
    fixed += [1 for m in members if m.type == "faiss_gpu" and not m.devices]
    models = [m.encoder for m in members if hasattr(m, "encoder")] + [config.retriever.rerank]
    devices = [m.device for m in models if isinstance(m, ComputeSettings)]
    if fixed or any(device.startswith("cuda") for device in devices):
        return max(fixed, default=1), True
    return int("auto" in devices or any(m.type == "torch_flat" for m in members)), False


def place(config: RunConfig, hosts: Sequence[Host], wanted: Sequence[Need]) -> Placement:
    """Return the GPUs of every process on `hosts`.

    Raises UserError, with the numbers needed and there, if GPUs or their memory do not suffice, if `launch.gpus` names
    a GPU twice or one that is not there, or if engine.kind.args chooses GPUs itself.
    """
    if not any(host.gpus for host in hosts):
        return NO_GPUS
    chosen = config.launch.gpus
    kind = config.engine.kind
    if isinstance(kind, SglangEngine) and config.engine_roles and EngineArgs.of(kind.args).base is not None:
        raise UserError(
            "engine.kind.args has --base-gpu-id",
            why="`foray up` shows each engine its own GPUs only, numbered from 0",
            todo="remove it; launch.gpus.engines chooses the GPUs",
        )
    pool = _Pool(hosts, share=chosen.share)
    pool.reserve("launch.gpus.others", chosen.others)
    explicit = {"engine": chosen.engines, "learner": chosen.learner, "retriever": chosen.retrievers}
    for name, given in explicit.items():
        pool.reserve(f"launch.gpus.{name}s" if name != "learner" else "launch.gpus.learner", given)
    required = [need for need in wanted if need.gpus and not need.optional]
    total, there = sum(need.gpus for need in required), sum(len(host.gpus) for host in hosts) - len(chosen.others)
    if total > there and not chosen.share:
        parts = ", ".join(f"{need.name} {need.gpus}" for need in required)
        raise UserError(
            f"the run needs {total} GPUs, {there} are there",
            why=f"{parts}; a GPU belongs to one process",
            todo=f"lower launch.{'eval_' if config.launch.eval_engines else ''}engines or launch.learner_ranks, "
            f"use smaller models, or set launch.gpus.share=true ({OWN_DOCS})",
        )
    assignments: list[Assignment] = []
    for need in sorted(wanted, key=lambda need: need.optional):
        assignments += pool.take(need, explicit[need.kind])
    order = {need.name: i for i, need in enumerate(wanted)}
    assignments.sort(key=lambda a: order[a.need.name])
    return Placement(True, tuple(assignments), pool.left, tuple(wanted), hosts[0].name)


class _Pool:
    """GPUs not yet assigned, by host; and the bytes planned on each."""

    def __init__(self, hosts: Sequence[Host], *, share: bool) -> None:
        self._hosts, self._share = hosts, share
        self._all = [(host, gpu) for host in hosts for gpu in host.gpus]
        self._held: dict[int, str] = {}
        self._used: dict[int, list[Need]] = {}

    @property
    def left(self) -> int:
        """Return the number of GPUs that nobody uses."""
        return sum(i not in self._used and i not in self._held for i in range(len(self._all)))

    def reserve(self, setting: str, indices: Sequence[int]) -> None:
        """Keep GPUs for a setting. Raises UserError for an overlap or a GPU that is not there."""
        for index in indices:
            if index >= len(self._all):
                detail = f"{setting} names GPU {index}, {len(self._all)} are there"
                raise UserError(detail, why="GPUs are numbered from 0", todo=f"correct {setting}")
            if index in self._held and not (self._share and "others" not in setting + self._held[index]):
                raise UserError(
                    f"GPU {index} is in {self._held[index]} and in {setting}",
                    why="two processes on one GPU take each other's memory",
                    todo="name each GPU once, or set launch.gpus.share=true",
                )
            self._held[index] = setting

    def take(self, need: Need, explicit: Sequence[int]) -> Iterator[Assignment]:
        """Yield the GPUs of one process, by host. Raises UserError if there are too few, or too little memory."""
        if not need.gpus:
            return
        free = [i for i in explicit or range(len(self._all)) if explicit or i not in self._held]
        unused = [i for i in free if i not in self._used]
        indices = self._pick(need, unused)
        if len(indices) < need.gpus and self._share and not need.optional:
            busy = sorted((i for i in free if i in self._used), key=lambda i: len(self._used[i]))
            indices = self._pick(need, sorted({*unused, *busy[: need.gpus - len(unused)]}))
        if len(indices) < need.gpus:
            if need.optional:
                return
            raise UserError(
                f"{need.name} needs {need.gpus} GPUs on one machine, {len(unused)} are left",
                why="tensor parallelism within an engine does not cross machines",
                todo=f"lower --tp-size, or the number of engines ({OWN_DOCS})",
            )
        for index in indices:
            self._used.setdefault(index, []).append(need)
            self._check(index)
        for host in self._hosts:
            mine = tuple(self._all[i][1] for i in indices if self._all[i][0] is host)
            if mine:
                yield Assignment(need, host.name, mine)

    def _pick(self, need: Need, free: Sequence[int]) -> list[int]:
        if need.spans:
            return list(free[: need.gpus])
        for host in self._hosts:
            here = [i for i in free if self._all[i][0] is host]
            if len(here) >= need.gpus:
                return here[: need.gpus]
        return []

    def _check(self, index: int) -> None:
        host, gpu = self._all[index]
        total = sum(need.memory for need in self._used[index])
        if total > USABLE * gpu.memory:
            parts = " and ".join(f"{need.name} {gib(need.memory)}" for need in self._used[index])
            where = f" of {host.name}" if host.name else ""
            raise UserError(
                f"GPU {gpu.id}{where}: {gib(total)} needed, {gib(USABLE * gpu.memory)} of {gib(gpu.memory)} usable",
                why=parts,
                todo="use more ranks at learner.engine.zero_stage 3, learner.engine.offload_optimizer, adapters "
                f"(learner.model.lora.rank), a larger --tp-size, or a smaller model ({OWN_DOCS})",
            )


def placement_lines(placement: Placement, ports: Mapping[str, str]) -> list[str]:
    """Return the placement as lines: process, host, GPUs, memory per GPU, port."""
    rows = []
    hosts = len({a.host for a in placement.assignments}) > 1
    for a in placement.assignments:
        least = min(gpu.memory for gpu in a.gpus)
        memory = f"{gib(a.need.memory)} of {gib(least)}" if a.need.memory else f"of {gib(least)}"
        where = f"{a.host}: " if hosts else ""
        rows.append((a.need.name, where + ",".join(gpu.id for gpu in a.gpus), memory, ports.get(a.need.name, "")))
    named = {a.need.name for a in placement.assignments}
    rows += [(name, "none", "", port) for name, port in ports.items() if name not in named]
    return aligned(("process", "CUDA_VISIBLE_DEVICES", "memory per GPU", "port"), rows)
