"""Hardware profiles: settings of a machine, merged over a preset, and the file that `foray init --hardware` writes.

A profile has layouts in order of preference; the first in which GPUs and memory suffice is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.config import RunConfig, from_tree
from deploy.hardware.assign import NO_GPUS, EngineArgs, Placement, needs, place
from deploy.hardware.host_memory import memory_needed, memory_parts
from deploy.hardware.inventory import CPU, HARDWARE, Host, gib
from deploy.hardware.shape import read_shape
from protocol.errors import UserError
from retriever.index.config import IndexSettings
from rollout_server.node.config import GPU_INTERPRETER, SglangEngine

LORA_RANK = 32
ENGINES_PER_ROLLOUT = 4
THREADS = 4
BASE_READY_S = 600
LOAD_BYTES_PER_S = 100e6
"""Bytes of weights per second, from the start of a run until engines serve them: read, hashed, written and read again.
Assumed for a slow shared disk, not measured."""
ADAPTERS = (
    "--enable-lora",
    "--max-lora-rank",
    str(LORA_RANK),
    "--max-loras-per-batch",
    "4",
    "--lora-target-modules",
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""The layers are those of the learner's adapters. With `all` SGLang also wraps the output layer, and computes its
logits in bfloat16 whatever --enable-fp32-lm-head says."""
CPU_GROUPS = 8
"""Largest `run.groups_per_step` on CPU."""
OWN_GPU = ("--mem-fraction-static", "0.85")
STAGES: tuple[dict[str, Any], ...] = ({"zero_stage": 2}, {"zero_stage": 3, "overlap_comm": True}, {"zero_stage": 3})
"""ZeRO in order of preference. Stage 3 gathers the weights two or three times per micro-batch, beside the computation
with overlap_comm only."""


@dataclass(frozen=True)
class Layout:
    """One division of a machine.

    cache_tokens  tokens of an engine's KV cache, if it shares its GPU with the learner; 0: each has its own GPUs
    offload       the optimizer is in main memory
    lora          train adapters
    """

    engines: int
    ranks: int
    cache_tokens: int = 0
    offload: bool = False
    lora: bool = False


PROFILES: dict[str, tuple[Layout, ...]] = {
    "1x24gb": (Layout(1, 1, cache_tokens=65_536, lora=True),),
    "1xh200": (Layout(1, 1, cache_tokens=262_144), Layout(1, 1, cache_tokens=262_144, offload=True)),
    "4xa100-40": (Layout(2, 2), Layout(1, 3), Layout(1, 2), Layout(1, 3, offload=True), Layout(1, 2, offload=True)),
    "8xh100": (Layout(4, 4), Layout(3, 4), Layout(3, 5), Layout(2, 5), Layout(2, 6), Layout(2, 6, offload=True)),
    "2x8xh100": (Layout(8, 8), Layout(7, 8)),
    "8x8xh100": (Layout(32, 32), Layout(31, 32)),
}


@dataclass(frozen=True)
class Resolved:
    """A preset on a profile: the tree of settings, the run, and its placement."""

    tree: dict[str, Any]
    config: RunConfig
    placement: Placement
    layout: Layout


def resolve(
    tree: Mapping[str, Any], hardware: str, facts: Mapping[str, Any], index: IndexSettings | None = None
) -> Resolved:
    """Return the settings `tree` of a preset on a hardware profile.

    Args:
        tree: settings of the preset, with overrides.
        hardware: name of the profile.
        facts: config.json of run.model.
        index: settings of the retriever's index, if the tree leaves them to a built one.

    Raises UserError, with the memory needed and there, if no layout suffices.
    """
    model = from_tree(tree).run.model
    if not facts:
        raise UserError(
            f"{model} has no config.json",
            why="memory is computed from the model's shape",
            todo="give the model's directory with --model DIR; `foray data get` downloads one",
        )
    if hardware == CPU:
        merged = _merged(tree, _on_cpu(from_tree(tree), facts))
        return Resolved(merged, from_tree(merged), NO_GPUS, Layout(1, 1))
    if read_shape(facts) is None:
        raise UserError(
            f"the memory of a {facts.get('model_type', 'model without a type')} cannot be computed",
            why="its shape is not among those in deploy/hardware/shape.py",
            todo="use a model of another family, or omit --hardware and set launch.engines and launch.learner_ranks",
        )
    hosts, refused = HARDWARE[hardware], UserError("")
    found: list[Resolved] = []
    tried = ((layout, zero) for layout in PROFILES[hardware] for zero in STAGES[: 1 if layout.ranks == 1 else None])
    for layout, zero in tried:
        try:
            one = _on(hosts, layout, zero, tree, hardware, facts, index)
        except UserError as error:
            refused = error
            continue
        found.append(one)
        wanted = {need.name for need in needs(one.config, facts, index=index) if need.gpus}
        if wanted == {a.need.name for a in one.placement.assignments}:
            return one  # also the encoder that can do without a GPU has one
    if not found:
        raise UserError(f"{hardware}: {refused.what}", refused.why, refused.todo)
    return found[0]


def _on(
    hosts: tuple[Host, ...],
    layout: Layout,
    zero: Mapping[str, Any],
    tree: Mapping[str, Any],
    hardware: str,
    facts: Mapping[str, Any],
    index: IndexSettings | None,
) -> Resolved:
    merged = _merged(tree, _settings(layout, zero, tree, hardware, facts))
    config = from_tree(merged)
    needed = -(-memory_needed(config) * 5 // (4 << 20))
    merged["launch"]["redis_maxmemory_mb"] = max(config.launch.redis_maxmemory_mb, needed)
    config = from_tree(merged)
    return Resolved(merged, config, place(config, hosts, needs(config, facts, index=index)), layout)


def _on_cpu(config: RunConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the CPU profile sets: the recipe's loss and rewards in small batches, for a small model."""
    longest = min(config.rollout.episode.max_context, facts.get("max_position_embeddings") or math.inf)
    groups = min(CPU_GROUPS, config.run.groups_per_step)
    return {
        "run": {"groups_per_step": groups},
        "rollout": {"concurrency_groups": 2 * groups, "episode": {"max_context": longest}},
        "learner": {
            "algorithm": {"minibatches": 1},
            "model": {"dtype": "float32", "gradient_checkpointing": False},
            "engine": {"zero_stage": 0},
            "batch": {"row_tokens": longest, "micro_batch_tokens": longest},
        },
        "engine": {"kind": {"type": "cpu"}},
        "launch": {"engines": 1, "learner_ranks": 1, "rollouts": 1, "threads": 1},
    }


def _settings(
    layout: Layout, zero: Mapping[str, Any], tree: Mapping[str, Any], hardware: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the layout sets, with the `zero` settings of the learner."""
    config = from_tree(tree)
    shape = read_shape(facts)
    assert shape is not None
    ready = int(math.ceil((BASE_READY_S + 2 * shape.parameters / LOAD_BYTES_PER_S) / 60) * 60)
    kind = config.engine.kind
    given = kind.args if isinstance(kind, SglangEngine) else ()
    python = {} if isinstance(kind, SglangEngine) and kind.python else {"python": GPU_INTERPRETER}
    engines = max(1, layout.engines // max(1, EngineArgs.of(given).gpus))
    args = [*(OWN_GPU if not layout.cache_tokens else ("--max-total-tokens", str(layout.cache_tokens)))]
    engine = {**zero, "offload_optimizer": True} if layout.offload else dict(zero)
    learner: dict[str, Any] = {"engine": engine}
    if not layout.cache_tokens and len(HARDWARE[hardware]) == 1:
        # from GPU to GPU; an engine that misses a transfer reads files
        learner["publish"] = {"type": "distributed", "backend": "nccl"}
    if layout.lora:
        args += ADAPTERS
        row = config.learner.batch.row_tokens
        learner |= {
            "model": {"lora": {"rank": LORA_RANK, "alpha": LORA_RANK}, "logit_chunk_bytes": 1 << 28},
            "optim": {"lr": float(f"{10 * config.learner.optim.lr:g}")},
            "batch": {"micro_batch_tokens": max(row, config.rollout.episode.max_context)},
            "publish": {"type": "adapter"},
        }
    launch: dict[str, Any] = {
        "hardware": hardware,
        "engines": engines,
        "learner_ranks": layout.ranks,
        "rollouts": -(-engines // ENGINES_PER_ROLLOUT),
        "threads": THREADS,
        "ready_s": ready,
    }
    if layout.cache_tokens:
        launch["gpus"] = {"share": True}
    return {
        "learner": learner,
        "engine": {"kind": {"type": "sglang", **python, "args": [*args, *given]}, "start_timeout_s": ready},
        "launch": launch,
    }


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`; a group of another `type` is replaced."""
    out = dict(base)
    for name, value in over.items():
        old = out.get(name)
        if (
            isinstance(value, Mapping)
            and isinstance(old, Mapping)
            and value.get("type", old.get("type")) == old.get("type")
        ):
            out[name] = _merged(old, value)
        else:
            out[name] = value
    return out


def choices(resolved: Resolved, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what a profile with GPUs has chosen: interpreter of the engines, ZeRO stage, how weights are published,
    and main memory of the learner."""
    kind, learner, shape = resolved.config.engine.kind, resolved.config.learner, read_shape(facts)
    publish: Any = learner.publish
    held = sum(memory_parts(resolved.config, shape.parameters if shape else 0).values())
    return {
        "engines run in": kind.python if isinstance(kind, SglangEngine) else kind.type,
        "ZeRO stage": str(learner.engine.zero_stage),
        "weights by": publish.backend if publish.type == "distributed" else publish.type,
        "main memory of the learner": gib(held),
    }


def document(resolved: Resolved, title: str) -> str:
    """Return the file: a comment and the settings, one key of a section per line."""
    return "\n".join([f"# {title}", *_lines(resolved.tree)]) + "\n"


def _lines(tree: Mapping[str, Any]) -> Iterator[str]:
    for section, values in tree.items():
        if not values:
            continue
        yield f"{section}:"
        for name, value in values.items():
            yield f"  {name}: {_flow(value)}"


def _flow(value: Any) -> str:
    plain = value if not isinstance(value, Path) else str(value)
    text: str = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()
